"""A model's files are deleted, moved, cut, replaced and overwritten while it runs: the right tokens, or an error; never other tokens."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from libcolibri.engine import Engine
from libcolibri.errors import ExpertReadError, FormatError
from tests.tiny_model import make_model

PROMPT, MAX_TOKENS, BEFORE = [(11 * i * i + 3 * i) % 47 for i in range(12)], 24, 3
FILE = "experts-00002.safetensors"
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="open files cannot be deleted or replaced there")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", eos_token_id=None)


@pytest.fixture(scope="module")
def expected(model) -> list[int]:
    return run(model, lambda folder: None)[0]


def run(folder: Path, attack) -> tuple[list[int], str | None]:
    """Tokens, and the error that ended them; the attack comes after the first few."""
    tokens, steps = [], 0
    with Engine.open(folder, threads=1, expert_cache=2, prefetch=True) as engine:
        try:
            for step in engine.new_session().generate(PROMPT, max_tokens=MAX_TOKENS):
                tokens += [] if step.token_id is None else [step.token_id]
                if len(tokens) == BEFORE and steps < BEFORE:
                    attack(folder)
                steps = len(tokens)
        except ExpertReadError as error:
            return tokens, str(error)
    return tokens, None


@pytest.fixture
def copy(model, tmp_path) -> Path:
    return shutil.copytree(model, tmp_path / "copy")


def delete(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replace(folder: Path) -> None:
    (folder / "other").write_bytes(bytes((folder / FILE).stat().st_size))
    os.replace(folder / "other", folder / FILE)


def rewrite(folder: Path) -> None:
    """The same bytes again."""
    (folder / FILE).write_bytes((folder / FILE).read_bytes())


@POSIX
@pytest.mark.parametrize("attack", [delete, move, replace, rewrite])
def test_the_open_files_are_read_to_the_end(attack, copy, expected):
    assert run(copy, attack) == (expected, None)


def cut(folder: Path) -> None:
    os.truncate(folder / FILE, 4096)


def empty(folder: Path) -> None:
    os.truncate(folder / FILE, 0)


def overwrite(folder: Path) -> None:
    with (folder / FILE).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(range(256)) * ((folder / FILE).stat().st_size // 256 - 16))


def overwrite_quietly(folder: Path) -> None:
    """Size and time of writing stay what they were."""
    before = os.stat(folder / FILE)
    overwrite(folder)
    os.utime(folder / FILE, ns=(before.st_atime_ns, before.st_mtime_ns))


ATTACKS = [cut, empty, overwrite, pytest.param(overwrite_quietly, marks=POSIX)]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_was_cut_or_overwritten_ends_the_answer(attack, copy, expected):
    tokens, error = run(copy, attack)
    assert tokens == expected[: len(tokens)] and BEFORE <= len(tokens) < MAX_TOKENS
    what = r"(has wrong bytes|cannot be read) \(.*\), tried twice; the file was changed while the model was open: copy or convert"
    assert error is not None and re.search(rf"{FILE}: layer 2 expert \d {what}", error)


def replace_all(folder: Path) -> None:
    """Another model of the same shape, as a conversion publishes it."""
    folder.rename(folder.with_name("elsewhere"))
    make_model(folder, seed=1, eos_token_id=None)


def rewrite_dense(folder: Path) -> None:
    path = folder / "dense.safetensors"
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        pytest.param(replace_all, "copy: was replaced by another model while it was opened", marks=POSIX),
        (rewrite_dense, r"dense\.safetensors: was written to while it was read"),
    ],
)
def test_a_model_that_changes_while_it_is_opened_is_refused(attack, message, copy):
    attacks = [attack]

    def on_progress(what, done, total):
        while attacks:
            attacks.pop()(copy)

    with pytest.raises(FormatError, match=message):
        Engine.open(copy, threads=1, on_progress=on_progress)
