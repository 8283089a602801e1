"""A model on two drives: exact bytes from whichever has them; what is wrong with a copy is said, or named when nobody has the bytes."""

import errno
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libcolibri.arena import allocate
from libcolibri.drive_probe import DriveSettings
from libcolibri.errors import ExpertReadError
from libcolibri.expert_store import ExpertStore
from libcolibri.file_reader import FileReader
from libcolibri.format import expert_offsets, read_manifest
from libcolibri.parallel_reader import ATTEMPTS
from tests.tiny_model import make_model

FILE = "experts-00002.safetensors"
PIECE = 4096  # several pieces an expert


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def right(model) -> dict[tuple[int, int], bytes]:
    manifest, found = read_manifest(model), {}
    for layer, entry in manifest.experts.items():
        data = (model / entry.file).read_bytes()
        found |= {(layer, e): data[at : at + entry.expert_bytes] for e, at in enumerate(expert_offsets(model, manifest, layer))}
    return found


@pytest.fixture
def main(model, tmp_path) -> Path:
    return shutil.copytree(model, tmp_path / "main")


@pytest.fixture
def mirror(model, tmp_path) -> Path:
    return shutil.copytree(model, tmp_path / "mirror")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Both drives take whatever they can, however slow they seem: which of them is asked would else be chance."""
    monkeypatch.setattr("libcolibri.parallel_reader._TRIAL_SHARE", 1e9)


def open_store(main: Path, mirror: Path, **options) -> ExpertStore:
    settings = DriveSettings(threads=1, piece_bytes=PIECE)
    return ExpertStore(main, read_manifest(main), mirror=mirror, settings_for=lambda folder: settings, **options)


def read(store: ExpertStore, layer: int, experts: list[int]) -> list[bytes]:
    targets = allocate(len(experts) * store.expert_bytes[layer], "test").reshape(len(experts), -1)
    targets[:] = 0
    store.read(layer, experts, list(targets))
    return [target.tobytes() for target in targets]


def read_all(store: ExpertStore, right, rounds: int = 1) -> None:
    for _ in range(rounds):
        for layer in (0, 2):
            assert read(store, layer, [5, 0, 3, 1, 2, 4]) == [right[layer, e] for e in (5, 0, 3, 1, 2, 4)]


def read_until(condition, store: ExpertStore, right) -> None:
    """Which drive gives what is chance."""
    for _ in range(1000):
        if condition():
            break
        read_all(store, right)
    assert condition()


def overwrite(folder: Path, layer: int, expert: int, data: bytes) -> None:
    manifest = read_manifest(folder)
    with (folder / manifest.experts[layer].file).open("r+b") as file:
        file.seek(expert_offsets(folder, manifest, layer)[expert])
        file.write(data)


@pytest.mark.parametrize("direct", [False, True])
def test_both_drives_are_read(main, mirror, right, direct):
    store = open_store(main, mirror, drop_page_cache=direct)
    read_all(store, right, rounds=10)
    assert all(drive.n_bytes > 0 and drive.fault is None for drive in store.drives) and store.notices == ()
    (remark,) = store.remarks
    assert remark == f"mirror {mirror}: is on the same drive as {main}, so that reading becomes no faster"
    store.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_mirror_on_another_drive_needs_no_remark(main, right):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = open_store(main, shutil.copytree(main, Path(folder) / "mirror"), drop_page_cache=True)
        read_all(store, right)
        assert store.remarks == store.notices == ()
        store.close()


def test_a_missing_mirror(main, tmp_path, right):
    told(main, tmp_path / "nowhere", right, "is not there", drives=1)


def test_the_models_own_folder(main, tmp_path, right):
    (tmp_path / "link").symlink_to(main)
    for folder in (main, tmp_path / "link"):
        told(main, folder, right, "is the model's own folder and no second copy", drives=1)


def told(main: Path, mirror: Path, right, what: str, drives: int) -> None:
    """The store runs, and its one remark says what, in one line."""
    store = open_store(main, mirror)
    read_all(store, right, rounds=3)
    (remark,) = store.remarks
    assert remark.startswith(f"mirror {mirror}: {what}") and remark.endswith(f"read from {main} alone") and "\n" not in remark
    assert len(store.drives) == drives and store.notices == ()
    store.close()


def no_manifest(mirror: Path) -> str:
    (mirror / "colibri.json").unlink()
    return "has no colibri.json, so it is no copy of the model"


def a_file(mirror: Path) -> str:
    shutil.rmtree(mirror)
    mirror.write_text("no folder")
    return "(cannot be opened|has no colibri.json)"


def another_model(mirror: Path) -> str:
    shutil.rmtree(mirror)
    make_model(mirror, seed=1)
    return "holds another model"


def damaged_manifest(mirror: Path) -> str:
    (mirror / "colibri.json").write_text("{")
    return "its colibri.json cannot be read or is damaged"


def no_expert_files(mirror: Path) -> str:
    for path in mirror.glob("experts-*"):
        path.unlink()
    return r"2 of 2 expert files cannot be used, the first experts-00000.safetensors \(missing\)"


@pytest.mark.parametrize("fault", [no_manifest, a_file, another_model, damaged_manifest, no_expert_files])
def test_a_mirror_that_is_no_copy_is_left_alone(main, mirror, right, fault):
    what = fault(mirror)
    store = open_store(main, mirror)
    read_all(store, right)
    (remark,) = store.remarks
    assert re.match(f"mirror {re.escape(str(mirror))}: {what}.*; (their )?experts are read from {re.escape(str(main))} alone$", remark)
    assert len(store.drives) == 1
    store.close()


def missing(path: Path) -> str:
    path.unlink()
    return "missing"


def cut(path: Path) -> str:
    os.truncate(path, path.stat().st_size - 1)
    return rf"has {path.stat().st_size} bytes, expected {path.stat().st_size + 1}"


def header(path: Path) -> str:
    data = bytearray(path.read_bytes())
    data[9] = 0
    path.write_bytes(data)
    return "cannot be read, or its header is damaged"


@pytest.mark.parametrize("fault", [missing, cut, header])
def test_the_files_that_a_mirror_does_have_are_used(main, mirror, right, fault):
    why = fault(mirror / FILE)
    store = open_store(main, mirror)
    read_all(store, right, rounds=10)
    expected = f"mirror {mirror}: 1 of 2 expert files cannot be used, the first {FILE} ({why}); their experts are read from {main} alone"
    assert store.remarks == (expected,)
    assert store.drives[1].n_bytes > 0 and store.notices == ()
    store.close()


@pytest.mark.parametrize("bad", ["main", "mirror"])
def test_a_drive_that_fails_is_given_up(main, mirror, right, bad, monkeypatch):
    fail(monkeypatch, {bad})
    store = open_store(main, mirror)
    read_all(store, right, rounds=3)
    folders = {"main": main, "mirror": mirror}
    good = folders["mirror" if bad == "main" else "main"]
    expected = rf"{folders[bad]}: 3 reads in a row failed \(.*Input/output error\); what {good} has is read from there alone since then"
    (notice,) = store.notices
    assert re.fullmatch(expected, notice)
    store.close()


def fail(monkeypatch, folders: set[str]) -> None:
    original = FileReader.read_into

    def read_into(self, target, offset):
        if self.path.parent.name in folders:
            raise OSError(errno.EIO, "Input/output error")
        original(self, target, offset)

    monkeypatch.setattr(FileReader, "read_into", read_into)


def test_what_no_drive_gives_is_named_with_both_files(main, mirror, right, monkeypatch):
    fail(monkeypatch, {"main", "mirror"})
    store = open_store(main, mirror)
    what = rf"{main / FILE}: layer 2 expert 4 cannot be read \(.*\), tried twice, and {mirror / FILE} cannot be read \(.*\); check "
    with pytest.raises(ExpertReadError, match=what):
        read(store, 2, [4])
    monkeypatch.undo()
    read_all(store, right)
    store.close()


@pytest.mark.parametrize("bad", ["main", "mirror"])
@pytest.mark.skipif(sys.platform == "win32", reason="open files cannot be cut there")
def test_a_file_that_is_cut_short_meanwhile(main, mirror, right, bad):
    store = open_store(main, mirror)
    os.truncate((main if bad == "main" else mirror) / FILE, 4096)
    read_all(store, right, rounds=3)
    store.close()


@pytest.mark.parametrize("verify", [False, True])
def test_a_damaged_copy_gives_no_wrong_byte(main, mirror, right, verify):
    """Such as one of the right size that was never finished: what it gives is compared once, whether anybody asked for that or not."""
    for layer in (0, 2):
        for expert in (0, 3, 4):
            overwrite(mirror, layer, expert, bytes(len(right[layer, expert])))
    store = open_store(main, mirror, verify=verify)
    read_until(lambda: len(store.notices) == 2, store, right)  # one for each file
    what = rf"{mirror}/experts-0000[02].safetensors: gave wrong bytes for layer \d expert [034]; {main} has"
    assert all(re.match(what, notice) for notice in store.notices)
    store.close()


def test_what_a_mirror_gave_is_compared_once(main, mirror, right, monkeypatch):
    compared = []
    store = open_store(main, mirror)
    check = store._reader.check
    monkeypatch.setattr(store._reader, "check", lambda requests: compared.extend(requests) or check(requests))
    read_all(store, right, rounds=30)
    n_pieces = sum(-(-len(data) // PIECE) for data in right.values())
    assert 0 < len(compared) <= n_pieces
    compared.clear()
    for (layer, expert), data in right.items():
        if store._proven.get((layer, expert)) == (1 << -(-len(data) // PIECE)) - 1:
            assert read(store, layer, [expert]) == [data]
    assert compared == []
    store.close()


def test_a_wrong_expert_of_the_model_comes_from_the_mirror(main, mirror, right):
    overwrite(main, 2, 1, b"wrong")
    store = open_store(main, mirror, verify=True)
    read_until(lambda: store.notices, store, right)
    assert [notice.split(";")[0] for notice in store.notices] == [f"{main / FILE}: gave wrong bytes for layer 2 expert 1"]
    store.close()


@pytest.mark.parametrize("bad", ["main", "mirror"])
def test_the_file_that_was_changed_is_named(main, mirror, right, bad):
    """Both have the expert wrong; the one that was written to comes first."""
    folders = {"main": main, "mirror": mirror}
    changed, other = folders.pop(bad), folders.popitem()[1]
    overwrite(other, 2, 1, b"wrong")
    store = open_store(main, mirror, verify=True)
    overwrite(changed, 2, 1, b"wrong too")
    what = rf"{changed / FILE}: layer 2 expert 1 has wrong bytes \(.*\), tried twice, and {other / FILE} has wrong bytes \(.*\); the file"
    with pytest.raises(ExpertReadError, match=what):
        read(store, 2, [1])
    read_all_but = [e for e in range(6) if e != 1]
    assert read(store, 2, read_all_but) == [right[2, e] for e in read_all_but]
    store.close()


@pytest.mark.parametrize("bad", ["main", "mirror"])
def test_a_file_that_was_changed_is_made_up_for(main, mirror, right, bad):
    folders = {"main": main, "mirror": mirror}
    changed, other = folders.pop(bad), folders.popitem()[1]
    store = open_store(main, mirror)
    overwrite(changed, 2, 1, bytes(len(right[2, 1])))
    read_until(lambda: store.notices, store, right)
    (notice,) = store.notices
    what = "was changed while the model was open, and gave wrong bytes for layer 2 expert 1"
    assert notice == f"{changed / FILE}: {what}; {other} has the right ones: copy it again"
    store.close()


def test_an_expert_that_only_an_untrusted_drive_can_read(main, mirror, right, monkeypatch):
    """A flipped bit on the way made the mirror look wrong; later the model's own drive fails."""
    original, flips = FileReader.read_into, [1]

    def flip_once(self, target, offset):
        original(self, target, offset)
        if flips and self.path.parent == mirror and self.path.name == FILE:
            flips.pop()
            target[1] ^= 4

    monkeypatch.setattr(FileReader, "read_into", flip_once)
    store = open_store(main, mirror)
    while flips:
        assert read(store, 2, [0, 1, 2, 3, 4, 5]) == [right[2, e] for e in range(6)]
    monkeypatch.undo()
    ((layer, expert),) = store._trusted
    fail(monkeypatch, {"main" if store._trusted[layer, expert] == 0 else "mirror"})
    assert read(store, layer, [expert]) == [right[layer, expert]]
    store.close()


FAULTS = ("fine", "broken", "once", "wrong")
plans = st.dictionaries(st.tuples(st.sampled_from(["main", "mirror"]), st.integers(0, 5)), st.sampled_from(FAULTS), max_size=12)


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans, st.lists(st.integers(0, 5), min_size=1, max_size=6), st.booleans())
def test_any_faults_of_two_drives(model, copies, right, plan, wanted, verify):
    """Targets are exact, or the error names layer, expert and the files; without a checksum's comparison only the mirror may be wrong."""
    main, mirror = copies
    if not verify:
        plan = {at: fault for at, fault in plan.items() if at != ("main", at[1]) or fault != "wrong"}
    manifest = read_manifest(main)
    offsets, size = expert_offsets(main, manifest, 2), manifest.experts[2].expert_bytes
    original, counts = FileReader.read_into, {}

    def read_into(self, target, offset):
        expert = (offset - offsets[0]) // size
        fault, counts[self.path, offset] = plan.get((self.path.parent.name, expert), "fine"), counts.get((self.path, offset), 0) + 1
        if fault == "broken" or (fault == "once" and counts[self.path, offset] < ATTEMPTS):
            raise OSError(errno.EIO, "Input/output error")
        original(self, target, offset)
        if fault == "wrong":
            target[0] ^= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileReader, "read_into", read_into)
        store = open_store(main, mirror, verify=verify)
        for expert in wanted:
            lost = all(plan.get((folder, expert)) in ("broken", "wrong") for folder in ("main", "mirror"))
            try:
                assert read(store, 2, [expert]) == [right[2, expert]] and not lost
            except ExpertReadError as error:
                assert lost and f"layer 2 expert {expert} " in str(error)
                assert str(main / FILE) in str(error) and str(mirror / FILE) in str(error)
        store.close()


@pytest.fixture(scope="module")
def copies(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    return shutil.copytree(model, folder / "main"), shutil.copytree(model, folder / "mirror")
