"""An engine whose model lies on two drives: the same tokens whatever one of them does; remarks and notices say what it was."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from libcolibri.drive_probe import DriveProbe, DriveSettings
from libcolibri.drive_settings import KnownDrives
from libcolibri.engine import Engine, Parts
from libcolibri.errors import ExpertReadError
from libcolibri.memory_plan import MemoryPlan
from libcolibri.models.decoder import Decoder
from libcolibri.models.state import SequenceState
from libcolibri.parallel_reader import READ_THREADS
from libcolibri.thread_team import Team
from tests.fake_decoder import fake_parts
from tests.tiny_model import make_model

PROMPT, MAX_TOKENS = [(11 * i * i + 3 * i) % 47 for i in range(12)], 24


def real_parts() -> Parts:
    return replace(fake_parts(), decoder=Decoder, state=SequenceState, team=Team)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", eos_token_id=None)


@pytest.fixture
def copies(model, tmp_path) -> dict[str, Path]:
    return {name: shutil.copytree(model, tmp_path / name) for name in ("main", "mirror")}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Both drives take whatever they can, however slow they seem: which of them is asked would else be chance."""
    monkeypatch.setattr("libcolibri.parallel_reader._TRIAL_SHARE", 1e9)


def tokens(engine: Engine, on_token=lambda n: None) -> list[int]:
    found = []
    for step in engine.new_session().generate(PROMPT, max_tokens=MAX_TOKENS):
        if step.token_id is not None:
            found.append(step.token_id)
            on_token(len(found))
    return found


@pytest.fixture(scope="module")
def expected(model) -> list[int]:
    with Engine.open(model, threads=1, expert_cache=2, parts=real_parts()) as engine:
        assert not any("mirror" in remark for remark in engine.remarks)
        return tokens(engine)


def open_engine(copies, **options) -> Engine:
    return Engine.open(copies["main"], threads=1, expert_cache=2, parts=real_parts(), mirror=str(copies["mirror"]), **options)


@pytest.mark.parametrize("options", [{}, {"verify_experts": True}, {"preload": True}, {"prefetch": True}])
def test_the_same_tokens(copies, expected, options):
    with open_engine(copies, **options) as engine:
        assert tokens(engine) == expected and engine.notices == ()
        assert any("on the same drive" in remark for remark in engine.remarks)


@pytest.mark.parametrize("bad", ["main", "mirror"])
@pytest.mark.parametrize("attack", ["cut", "overwrite"])
def test_a_drive_that_goes_bad_while_tokens_are_made(copies, expected, bad, attack):
    ruined: list[bool] = []

    def ruin(n_tokens: int) -> None:
        if n_tokens == 3 and not ruined:
            ruined.append(True)
            for path in copies[bad].glob("experts-*"):
                size = path.stat().st_size
                os.truncate(path, 4096)
                if attack == "overwrite":
                    os.truncate(path, size)

    with open_engine(copies) as engine:
        for _ in range(100):
            assert tokens(engine, ruin) == expected
            if engine.notices:
                break
    # The engine is closed, and still knows.
    assert engine.notices and all(str(copies[bad]) in notice for notice in engine.notices)


def test_when_both_go_bad_the_error_names_both(copies, expected):
    def ruin(n_tokens: int) -> None:
        for path in (path for folder in copies.values() for path in folder.glob("experts-*")):
            os.truncate(path, 4096)

    with (
        open_engine(copies) as engine,
        pytest.raises(ExpertReadError, match=r"main/experts-0000\d.safetensors: layer \d expert \d .*mirror/experts-.*changed while"),
    ):
        tokens(engine, ruin)


def test_a_useless_mirror_is_a_remark(copies, expected, tmp_path):
    for folder in (copies["main"], tmp_path / "nowhere"):
        with open_engine({**copies, "mirror": folder}) as engine:
            assert tokens(engine) == expected
            assert sum(remark.startswith(f"mirror {folder}: is ") for remark in engine.remarks) == 1


def drives_of(copies, path, monkeypatch, free: int) -> tuple[list, Engine]:
    """Which folders were tested by an engine that has `free` bytes beside its plan; and the engine, closed."""
    tested = []

    def probe(paths, read_bytes):
        tested.append(paths[0].parent)
        return DriveProbe(DriveSettings(False, 3, 4096), 2e9, 1e9)

    monkeypatch.setattr("libcolibri.engine.KnownDrives", lambda path: KnownDrives(path, probe))
    monkeypatch.setattr(MemoryPlan, "free", property(lambda plan: free))
    with open_engine(copies, drive_settings=path) as engine:
        assert len(tokens(engine)) == MAX_TOKENS
    return tested, engine


def test_drives_are_tested_where_memory_does_not_hold_the_model(copies, tmp_path, monkeypatch):
    path = tmp_path / "drives.json"
    tested, engine = drives_of(copies, path, monkeypatch, free=1 << 40)
    assert tested == [] and not path.exists() and [drive.threads for drive in engine._store.drives] == [READ_THREADS] * 2
    tested, engine = drives_of(copies, path, monkeypatch, free=0)
    assert tested == [copies["main"]] and path.exists()  # both folders are on one drive
    assert [drive.threads for drive in engine._store.drives] == [3, 3]
    assert not any(file.direct for files in engine._store._files.values() for file in files)
    assert drives_of(copies, path, monkeypatch, free=0)[0] == []


def test_drive_settings_that_cannot_be_remembered_are_a_remark(copies, tmp_path, monkeypatch):
    _, engine = drives_of(copies, tmp_path, monkeypatch, free=0)
    assert any(remark.startswith(f"drive settings {tmp_path}: cannot be written") for remark in engine.remarks)


def test_a_dense_model_has_nothing_to_read(tmp_path):
    folder = make_model(tmp_path / "dense", num_experts=6, mlp_only_layers=[0, 1, 2])
    with Engine.open(folder, threads=1, parts=real_parts(), mirror=tmp_path) as engine:
        assert f"mirror {tmp_path}: the model is dense, so that nothing is read from it while it runs" in engine.remarks
