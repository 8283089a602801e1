"""The share of the possible, and the speeds of drive and memory that it is measured by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libcolibri.drive import BEST_BYTES, Drive
from libcolibri.engine import Engine
from libcolibri.memory_speed import memory_speed
from libcolibri.models.decoder import Decoder
from libcolibri.models.state import SequenceState
from libcolibri.roofline import ARITHMETIC_TOK, Roofline
from libcolibri.stats import ExpertStats, PhaseStats
from libcolibri.thread_team import Team
from tests.fake_decoder import fake_parts
from tests.tiny_model import make_model


def phase(*, n_tok=1, passes=1, seconds=1.0, computed=0, read=0, unused=0) -> PhaseStats:
    return PhaseStats(n_tok, passes, seconds, computed, ExpertStats(read_bytes=read, unused_bytes=unused))


def test_the_slower_of_drive_and_memory_bounds():
    drive = Roofline(phase(seconds=4.0, computed=3_000, read=2_500, unused=500), drive_bytes_s=1_000.0, memory_bytes_s=10_000.0)
    assert (drive.drive_s, drive.memory_s, drive.bound, drive.needed_s, drive.share) == (2.0, 0.3, "drive", 2.0, 0.5)
    memory = Roofline(phase(seconds=4.0, computed=30_000, read=2_000), drive_bytes_s=1_000.0, memory_bytes_s=10_000.0)
    assert (memory.bound, memory.needed_s, memory.share) == ("memory", 3.0, 0.75)


def test_a_prompt_in_memory_is_bound_by_arithmetic():
    for tokens, bound in ((ARITHMETIC_TOK - 1, "memory"), (ARITHMETIC_TOK, "arithmetic")):
        found = Roofline(phase(n_tok=tokens, computed=1_000), drive_bytes_s=0.0, memory_bytes_s=1_000.0)
        assert found.bound == bound and (found.share is None) == (bound == "arithmetic")
    assert Roofline(phase(n_tok=100, computed=1_000, read=2_000), drive_bytes_s=100.0, memory_bytes_s=1_000.0).bound == "drive"


def test_nothing_done_has_no_share():
    assert Roofline(PhaseStats(), 1.0, 1.0).share is None
    assert Roofline(phase(read=1), 0.0, 0.0).share == 0.0  # nothing is known of the drive


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0.01, 100), st.floats(1, 1e9), st.floats(1, 1e9))
def test_the_share_is_of_the_time_needed(read, computed, seconds, drive, memory):
    found = Roofline(phase(seconds=seconds, read=read, computed=computed), drive, memory)
    assert found.share == pytest.approx(max(read / drive, computed / memory) / seconds)


# --- the drive


def read(drive: Drive, n_bytes: int, started: float, ended: float, error=None) -> None:
    drive.begin(n_bytes, started)
    drive.end(n_bytes, ended, error)


def test_the_best_of_a_drive_is_over_many_bytes():
    drive, part = Drive("a", 1), BEST_BYTES // 4
    assert drive.best == 0.0
    read(drive, part, 0.0, 0.5)  # less than a window: what it gave altogether
    assert drive.best == part / 0.5
    for at in range(3):
        read(drive, part, 10.0 + at, 10.5 + at)
    assert drive.best == BEST_BYTES / 2.0  # pauses between reads are not its time
    for at in range(4):  # a slow window, with one quick read
        read(drive, part, 20.0 + 9 * at, 20.0 + 9 * at + (0.001 if at == 1 else 2.0))
    assert drive.best == BEST_BYTES / 2.0
    for at in range(4):
        read(drive, part, 90.0 + at, 90.25 + at)
    assert drive.best == BEST_BYTES / 1.0


def test_a_failed_read_takes_time_and_brings_nothing():
    drive = Drive("a", 1)
    read(drive, 100, 0.0, 1.0, OSError())
    read(drive, 100, 1.0, 2.0)
    assert drive.best == 50.0 and drive.busy_s == 2.0


# --- memory


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_speed_of_any_arrays(threads):
    for nothing in ([], [np.zeros(0, np.uint8)], [np.zeros(5, np.uint8)]):
        assert memory_speed(nothing, threads) == 0.0
    arrays = [np.ones((n, 3), np.uint8) for n in (1, 1000, 1 << 20)]
    assert memory_speed(arrays, threads) > 1e6


def test_an_engine_measures_its_memory_once_and_knows_its_drive(tmp_path):
    parts = fake_parts(decoder=Decoder, state=SequenceState, team=Team)
    with Engine.open(make_model(tmp_path / "tiny"), parts=parts, expert_cache=2) as engine:
        assert engine.drive_bytes_s == 0.0
        stats = list(engine.new_session().generate([1, 2, 3], max_tokens=3))[-1].stats
        assert engine.drive_bytes_s > 0.0 and engine.memory_bytes_s() == engine.memory_bytes_s() > 0.0
        found = engine.roofline(stats.decode)
        assert found.share > 0.0 and found.memory_s == stats.decode.computed_bytes / engine.memory_bytes_s()
        assert stats.experts.reading_s > 0.0
