"""Usage histories: what is counted against plain sums, files that are damaged or shared, what is read off them."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.atomic_file import write_atomically
from libcolibri.errors import FormatError
from libcolibri.expert_trace import Trace, TracedPass
from libcolibri.expert_usage import ExpertUsage
from libcolibri.usage_history import HALF_LIFE_TOK, SAVE_EVERY_S, UsageHistory, forget, read_usage

SHAPE = {2: 4, 0: 6}
MODEL = "a" * 64


def routed(n_tok: int, expert: int = 1) -> dict[int, np.ndarray]:
    """Every token uses `expert` and the one after it."""
    return {layer: np.tile([expert % count, (expert + 1) % count], (n_tok, 1)) for layer, count in SHAPE.items()}


def history(path: Path, **options) -> UsageHistory:
    return UsageHistory(path, MODEL, SHAPE, **options)


def stored(path: Path) -> tuple[int, ExpertUsage]:
    found = read_usage(path, MODEL, SHAPE)
    assert found is not None
    return found


passes = st.lists(st.tuples(st.integers(1, 3 * HALF_LIFE_TOK), st.integers(0, 5)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(passes, st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_uses_fade_by_tokens_however_often_they_are_saved(tmp_path_factory, steps, saves, reopens):
    path = tmp_path_factory.mktemp("h") / "使用.json"
    kept, counts, weight = history(path), np.zeros(6), 0.0
    for at, (n_tok, expert) in enumerate(steps):
        small, factor = {layer: ids[:1].repeat(n_tok, 0) for layer, ids in routed(1, expert).items()}, 0.5 ** (n_tok / HALF_LIFE_TOK)
        kept.note_pass(small)
        counts, weight = counts * factor, weight * factor + n_tok
        counts[[expert % 6, (expert + 1) % 6]] += n_tok
        if at in saves:
            kept.save()
        if at in reopens:
            kept.save()
            kept = history(path)
        np.testing.assert_allclose(kept.usage.uses[0], counts, rtol=1e-3)
        assert kept.usage.weight == pytest.approx(weight) and kept.tokens == sum(n for n, _ in steps[: at + 1])
    kept.save()
    assert kept.remarks == () and list(stored(path)[1].uses) == [0, 2]
    np.testing.assert_allclose(stored(path)[1].rates()[0], counts / weight, rtol=1e-3)


def test_two_that_keep_one_file_add_up(tmp_path):
    one, two = history(tmp_path / "h"), history(tmp_path / "h")
    one.note_pass(routed(10, 0))
    two.note_pass(routed(30, 3))
    one.save()
    two.save()
    tokens, usage = stored(tmp_path / "h")
    assert tokens == 40 and usage.uses[0].round(1).tolist() == [10, 10, 0, 30, 30, 0]
    assert two.tokens == 40 and one.tokens == 10  # each knows what it last read
    one.save()
    assert stored(tmp_path / "h")[0] == 40  # nothing new, nothing written


def _record(path: str, times: int) -> None:
    kept = history(Path(path))
    for _ in range(times):
        kept.note_pass(routed(1))
        kept.save()


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_record, args=(str(tmp_path / "h"), 60)) for _ in range(2)]
    for other in others:
        other.start()
    while any(other.is_alive() for other in others):
        assert (tmp_path / "h").exists() is False or stored(tmp_path / "h")[0] >= 1
    assert [other.exitcode for other in others] == [0, 0]
    assert 60 <= stored(tmp_path / "h")[0] <= 120 and os.listdir(tmp_path) == ["h"]


def test_it_is_saved_now_and_then(tmp_path):
    now = [0.0]
    kept = history(tmp_path / "new" / "h", clock=lambda: now[0])
    kept.note_pass(routed(1))
    assert not (tmp_path / "new").exists()
    now[0] = SAVE_EVERY_S
    kept.note_pass(routed(1))
    assert stored(tmp_path / "new" / "h")[0] == 2
    kept.note_pass(routed(5))
    assert stored(tmp_path / "new" / "h")[0] == 2


def test_the_file_holds_numbers_only(tmp_path):
    kept = history(tmp_path / "h")
    kept.note_pass(routed(3))
    kept.save()
    facts = json.loads((tmp_path / "h").read_text())
    assert set(facts) == {"format", "model", "tokens", "weight", "layers", "uses"} and facts["model"] == MODEL
    (tmp_path / "h.12-34.partial").write_text("of a process that was killed")
    assert forget(tmp_path / "h") and not forget(tmp_path / "h") and read_usage(tmp_path / "h", MODEL, SHAPE) is None
    assert os.listdir(tmp_path) == []


def written(tmp_path: Path) -> Path:
    kept = history(tmp_path / "h")
    kept.note_pass(routed(8))
    kept.save()
    return tmp_path / "h"


DAMAGE = {
    "cut": lambda data: data[:-9],
    "beginning": lambda data: data[:11],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "other model": lambda data: data.replace(b"aaaa", b"bbbb"),
    "later format": lambda data: data.replace(b"usage-1", b"usage-2"),
    "negative": lambda data: data.replace(b"8.0", b"-8.0", 1),
    "infinite": lambda data: data.replace(b"8.0", b"Infinity", 1),
    "nan": lambda data: data.replace(b"[0.0", b"[NaN", 1),
    "endless": lambda data: data.replace(b"8.0", b"1" + b"0" * 400, 1),
    "too many uses": lambda data: data.replace(b"[0.0,8.0", b"[0.0,9.0", 1),
    "layer missing": lambda data: data.replace(b'"layers":[0,2]', b'"layers":[0]'),
    "layer renamed": lambda data: data.replace(b'"layers":[0,2]', b'"layers":[0,3]'),
    "layers of lists": lambda data: data.replace(b'"layers":[0,2]', b'"layers":[[],2]'),
    "expert missing": lambda data: data.replace(b",0.0]", b"]", 1),
    "no number": lambda data: data.replace(b'"tokens":8', b'"tokens":"8"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_history_is_begun_anew(tmp_path, damage):
    path = written(tmp_path)
    before = path.read_bytes()
    path.write_bytes(DAMAGE[damage](before))
    assert path.read_bytes() != before
    with pytest.raises(FormatError, match="usage history"):
        read_usage(path, MODEL, SHAPE)
    kept = history(path)
    assert len(kept.remarks) == 1 and kept.remarks[0].endswith("; it is begun anew") and kept.usage.hottest_first() == []
    kept.note_pass(routed(2))
    kept.save()
    assert stored(path)[0] == 2 and history(path).remarks == ()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_bytes_raise(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("h"))
    whole = path.read_bytes()
    at, length = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, 30))
    path.write_bytes(whole[:at] + data.draw(st.binary(max_size=30)) + whole[at + length :])
    kept = history(path)
    kept.note_pass(routed(1))
    kept.save()
    assert kept.remarks or stored(path)[0] == kept.tokens


@pytest.mark.parametrize("content", [b"Dear diary\n", b"{}", b'{"format":"colibri-expert-trace-1"}', b"\x00PNG"])
def test_a_file_that_is_no_history_is_left_alone(tmp_path, content):
    (tmp_path / "h").write_bytes(content)
    kept = history(tmp_path / "h")
    kept.note_pass(routed(2))
    kept.save()
    assert (tmp_path / "h").read_bytes() == content and "left alone" in kept.remarks[0]
    assert kept.usage.uses[0][1] == 2  # known to this run


def test_a_file_that_takes_its_place_later_is_left_alone_too(tmp_path):
    kept = history(tmp_path / "h")
    kept.note_pass(routed(2))
    (tmp_path / "h").write_bytes(b"mine")
    kept.save()
    assert (tmp_path / "h").read_bytes() == b"mine" and kept.remarks == () and "left alone" in kept.notices[0]


def test_what_cannot_be_written_is_a_remark(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path, "cannot be read"), (tmp_path / "file" / "h", "cannot be read")):
        kept = history(path)
        kept.note_pass(routed(1))
        kept.save()
        assert words in kept.remarks[0] and len(kept.remarks) == 1 and kept.notices == ()
    kept = history(tmp_path / "h")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("libcolibri.usage_history.write_atomically", full)
    for _ in range(2):
        kept.note_pass(routed(1))
        kept.save()
    assert len(kept.notices) == 1 and f"{tmp_path / 'h'}: cannot be written (No space left on device); what" in kept.notices[0]
    monkeypatch.undo()
    kept.save()
    assert stored(tmp_path / "h")[0] == 2
    monkeypatch.setattr("os.access", lambda *arguments: False)
    assert "cannot be written to" in history(tmp_path / "other").remarks[0]


def test_atomic_files_follow_links_and_leave_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "real").read_bytes() == b"new" and (tmp_path / "link").is_symlink()

    def broken(*arguments):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no"):
        write_atomically(tmp_path / "real", b"newer")
    assert sorted(os.listdir(tmp_path)) == ["link", "real"] and (tmp_path / "real").read_bytes() == b"new"


def test_facts_of_usage():
    usage = ExpertUsage({0: np.array([6.0, 1, 1, 0]), 1: np.array([1.0, 1, 1, 1]), 2: np.zeros(3)}, 8.0)
    facts, overall = usage.facts(), usage.overall()
    assert (facts[0].hottest_quarter, facts[0].unused) == (0.75, 1)
    assert facts[0].entropy_bits == pytest.approx(0.75 * np.log2(4 / 3) + 0.25 * 3) and facts[1].entropy_bits == 2.0
    assert (facts[2].hottest_quarter, facts[2].entropy_bits, facts[2].unused) == (0.0, 0.0, 3)
    assert (overall.experts, overall.unused, overall.hottest_quarter) == (11, 4, 0.5)  # the mean of layers that were used
    assert usage.hottest_first() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert usage.rates()[0].tolist() == [0.75, 0.125, 0.125, 0] and usage.shares()[2].tolist() == [0, 0, 0]
    assert ExpertUsage({0: np.zeros(2)}, 0.0).rates()[0].tolist() == [0, 0]
    passes = TracedPass(5, ((0, 1), (2,)), ((1, 4), (5,))), TracedPass(1, ((1,), (2,)), ((1,), (1,)))
    trace = Trace((0, 3), (1, 1), (2, 3), passes)
    assert {layer: row.tolist() for layer, row in ExpertUsage.of_trace(trace).uses.items()} == {0: [1, 5], 3: [0, 0, 6]}
