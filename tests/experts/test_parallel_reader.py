"""Reads in parallel: exact bytes whatever fails, urgent ones first, two drives, and no thread left behind."""

import gc
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.drive import FAULTS_TO_GIVE_UP, Drive
from libcolibri.parallel_reader import ATTEMPTS, ParallelReader, ReadRequest
from tests.experts.fake_file import FakeFile

CONTENT = np.random.default_rng(0).integers(0, 256, 4096, np.uint8).tobytes()
PIECE = 64


def request(files, offset: int, size: int = PIECE) -> ReadRequest:
    return ReadRequest(tuple(files), offset, np.zeros(size, np.uint8), f"bytes from {offset}")


def is_filled(one: ReadRequest) -> bool:
    return one.target.tobytes() == CONTENT[one.offset : one.offset + one.target.nbytes]


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 10 s"
        time.sleep(0.0005)


def read_threads() -> int:
    return sum(thread.name.startswith("colibri-read") for thread in threading.enumerate())


@pytest.fixture
def one():
    """A reader with one thread, and its file, stopped at the first read, from offset 0."""
    file, reader = FakeFile(CONTENT), ParallelReader([Drive("a", 1)], PIECE)
    file.gate.clear()
    reader.start([request([file], 0)])
    until(lambda: file.running == 1)
    yield reader, file
    file.gate.set()
    reader.close()


def test_urgent_pieces_go_first(one):
    reader, file = one
    early = reader.start([request([file], 128), request([file], 192)], urgent=False)
    late = reader.start([request([file], 256), request([file], 320)])
    assert not early.is_done() and not late.is_done()
    file.gate.set()
    assert late.wait() == [] and early.wait() == []
    assert file.log == [0, 256, 320, 128, 192] and early.is_done()


def test_what_is_promoted_goes_before_what_is_not(one):
    reader, file = one
    first = reader.start([request([file], 128)], urgent=False)
    second = reader.start([request([file], 192, 2 * PIECE)], urgent=False)
    third = reader.start([request([file], 320)])
    second.promote()
    second.promote()
    file.gate.set()
    for reads in (first, second, third):
        assert reads.wait() == []
    assert file.log == [0, 320, 192, 256, 128]


def test_waiting_promotes(one):
    reader, file = one
    first = reader.start([request([file], 128)], urgent=False)
    second = reader.start([request([file], 192)], urgent=False)
    waiting = threading.Thread(target=second.wait)
    waiting.start()
    until(lambda: second.urgent)
    file.gate.set()
    waiting.join()
    first.wait()
    assert file.log == [0, 192, 128]


def test_nothing_to_read_is_done_at_once(one):
    reads = one[0].start([])
    assert reads.is_done() and reads.wait() == []


def test_closing_ends_what_has_begun_and_fails_what_has_not(one):
    reader, file = one
    waits, later = reader.start([request([file], 128)]), reader.start([request([file], 192)], urgent=False)
    closing = threading.Thread(target=reader.close)
    closing.start()
    until(waits.is_done)
    assert closing.is_alive()  # the first read is still under way
    file.gate.set()
    closing.join()
    for reads in (waits, later):
        ((_, error),) = reads.wait()
        assert "closed" in str(error)
    with pytest.raises(ValueError, match="closed"):
        reader.start([request([file], 0)])
    assert file.log == [0] and file.running == 0
    reader.close()


def test_threads_end_with_their_reader():
    before = read_threads()
    reader = ParallelReader([Drive("a", 3), Drive("b", 2)], PIECE)
    assert read_threads() == before + 5
    reader.close()
    assert read_threads() == before
    ParallelReader([Drive("a", 3)], PIECE)
    gc.collect()
    until(lambda: read_threads() == before)  # nobody closed it


def test_our_own_bugs_are_raised():
    with_bug, reader = FakeFile(CONTENT), ParallelReader([Drive("a", 1)])
    with_bug.read_into = lambda target, offset: 1 // 0
    with pytest.raises(ZeroDivisionError):
        reader.read([request([with_bug], 0)])
    reader.close()


places = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 600)), min_size=1, max_size=8)


def starts_of(spans) -> list[int]:
    return [at for start, size in spans for at in range(start, start + size, PIECE)]


def draw_faults(data, spans) -> dict[int, int]:
    """Offset -> how often reads from there fail. Only where one piece starts: of two, which meets the fault would be chance."""
    starts = starts_of(spans)
    single = [at for at in starts if starts.count(at) == 1]
    return data.draw(st.dictionaries(st.sampled_from(single), st.integers(1, ATTEMPTS + 1), max_size=5)) if single else {}


def is_lost(span, *faults) -> bool:
    return any(all(told.get(at, 0) >= ATTEMPTS for told in faults) for at in starts_of([span]))


@settings(deadline=None, max_examples=60)
@given(places, st.sets(st.integers(0, 7)), st.integers(1, 4), st.data())
def test_one_drive_any_order_any_faults(spans, later, threads, data):
    """Each target is exact, or its request is named as failed because a piece of it failed ATTEMPTS times."""
    file, reader, told = FakeFile(CONTENT), ParallelReader([Drive("a", threads)], PIECE), draw_faults(data, spans)
    file.fails = dict(told)
    requests = [request([file], start, size) for start, size in spans]
    reads = [reader.start([one], urgent=number not in later) for number, one in enumerate(requests)]
    for span, one, started in zip(spans, requests, reads, strict=True):
        failed = started.wait()
        assert [name for name, _ in failed] == ([one] if is_lost(span, told) else [])
        assert failed or is_filled(one)
    reader.close()
    assert reader.drives[0].in_flight == reader.drives[0].bytes_in_flight == 0


@settings(deadline=None, max_examples=80)
@given(places, st.tuples(st.booleans(), st.booleans()), st.integers(1, 3), st.integers(1, 3), st.data())
def test_two_drives_any_faults(spans, broken, threads, other_threads, data):
    """A drive that fails is made up for by the other; only what both fail to read is lost."""
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    told = [dict.fromkeys(starts_of(spans), ATTEMPTS) if broken[i] else draw_faults(data, spans) for i in (0, 1)]
    for file, is_broken, faults in zip(files, broken, told, strict=True):
        file.broken, file.fails = is_broken, {} if is_broken else dict(faults)
    reader = ParallelReader([Drive("a", threads), Drive("b", other_threads)], PIECE)
    requests = [request(files, start, size) for start, size in spans]
    failed = {id(one) for one, _ in reader.read(requests)}
    assert [id(one) in failed for one in requests] == [is_lost(span, *told) for span in spans]
    assert all(is_filled(one) for one in requests if id(one) not in failed)
    reader.close()
    if not failed:
        assert sum(drive.n_bytes for drive in reader.drives) == sum(one.target.nbytes for one in requests)
    assert all(drive.n_bytes == 0 for drive, is_broken in zip(reader.drives, broken, strict=True) if is_broken)


def test_a_failing_drive_is_given_up_but_never_the_last():
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    files[1].broken = True
    reader = ParallelReader([Drive("a", 1), Drive("b", 1)], PIECE)
    files[0].delay_s = 0.002
    assert reader.read([request(files, at) for at in range(0, 2048, PIECE)]) == []
    assert reader.drives[1].fault is not None and len(files[1].log) == FAULTS_TO_GIVE_UP
    files[0].broken = True
    assert len(reader.read([request(files, at) for at in range(0, 512, PIECE)])) == 8
    assert reader.drives[0].fault is None
    files[0].broken = False
    assert reader.read([request(files, 0)]) == []
    reader.close()


def test_what_only_a_given_up_drive_has_is_read_there():
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    reader = ParallelReader([Drive("a", 1), Drive("b", 1)], PIECE)
    reader.drives[0].fault = OSError("gone")
    only = request((files[0], None), 0)
    assert reader.read([only]) == [] and is_filled(only) and files[1].log == []
    reader.close()


def test_a_slow_drive_is_not_waited_for():
    """Its share follows its speed, and the last pieces are left to the fast one."""
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    files[1].delay_s = 0.05
    reader = ParallelReader([Drive("a", 1, 64 / 0.0005), Drive("b", 1, 64 / 0.05)], PIECE)
    for at in range(8):
        assert reader.read([request(files, at * 128, 128)]) == []
    assert files[1].log == []  # the fast drive would have had both pieces long before
    reader.close()


def test_a_drive_that_was_slow_is_tried_again():
    """Once its pieces would cost little of the time that was spent on reading; then its share follows its speed again."""
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    files[0].delay_s = 0.001
    reader = ParallelReader([Drive("a", 1, 64 / 0.001), Drive("b", 1, 64 / 0.003)], PIECE)
    for _ in range(40):
        assert reader.read([request(files, 0)]) == []
    assert files[1].log == []
    until(lambda: reader.read([request(files, 0)]) == [] and len(files[1].log) > 20)
    reader.close()


def test_a_drive_that_hangs_is_made_up_for():
    """What was left to a drive that was fast until now, and now stands still, is read by the slow one."""
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    reader = ParallelReader([Drive("a", 1, 64 / 0.001), Drive("b", 1, 64 / 0.01)], PIECE)
    files[0].gate.clear()
    stuck = reader.start([request(files, 0)])
    until(lambda: files[0].running == 1)
    second = reader.start([request(files, 64)])
    assert second.wait() == [] and files[1].log == [64]
    files[0].gate.set()
    assert stuck.wait() == []
    reader.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("libcolibri.parallel_reader.HANG_S", 0.1)
    monkeypatch.setattr("libcolibri.parallel_reader._LOOK_S", 0.02)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_read_that_never_returns_is_done_by_the_other_drive(impatient, bad):
    """The drive is given up, its late answer touches nothing, and closing does not wait for it."""
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    reader = ParallelReader([Drive("a", 2), Drive("b", 2)], PIECE)
    files[bad].gate.clear()
    hung = []
    while reader.drives[bad].fault is None:
        requests = [request(files, at) for at in range(0, 512, PIECE)]
        assert reader.read(requests) == [] and all(is_filled(one) for one in requests)
        hung += requests
    assert "does not answer" in str(reader.drives[bad].fault)
    assert reader.drives[bad].in_flight == reader.together.in_flight == 0 and files[bad].running >= 1
    n_asked = len(files[bad].log)
    assert reader.read([request(files, at) for at in range(0, 4096, PIECE)]) == [] and len(files[bad].log) == n_asked
    for one in hung:
        one.target[:] = 7  # the memory is somebody else's now
    reader.close()
    files[bad].gate.set()
    until(lambda: files[bad].running == 0 and read_threads() == 0)
    assert all((one.target == 7).all() for one in hung) and reader.drives[bad].n_bytes == 0


def test_a_drive_that_answers_late_is_used_again(impatient):
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    reader = ParallelReader([Drive("a", 1), Drive("b", 1)], PIECE)
    files[1].gate.clear()
    while reader.drives[1].fault is None:
        assert reader.read([request(files, at) for at in range(0, 512, PIECE)]) == []
    files[1].gate.set()
    until(lambda: reader.drives[1].fault is None)
    files[0].delay_s = 0.001
    until(lambda: reader.read([request(files, at) for at in range(0, 512, PIECE)]) == [] and reader.drives[1].n_bytes > 0)
    reader.close()


def test_when_both_hang_it_is_an_error(impatient):
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    reader = ParallelReader([Drive("a", 3), Drive("b", 3)], PIECE)
    for file in files:
        file.gate.clear()
    one = request(files, 0)
    ((failed, error),) = reader.read([one])
    assert failed is one and "does not answer" in str(error)
    for file in files:
        file.gate.set()
    two = request(files, 64)
    assert reader.read([two]) == [] and is_filled(two)
    reader.close()


def test_closing_fails_what_hangs(impatient):
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    reader = ParallelReader([Drive("a", 1), Drive("b", 1)], PIECE)
    for file in files:
        file.gate.clear()
    reads = reader.start([request(files, 0), request(files, 64)])
    until(lambda: files[0].running + files[1].running == 2)
    reader.close()
    assert len(reads.wait()) == 2
    for file in files:
        file.gate.set()
    until(lambda: read_threads() == 0)


def test_the_process_may_sleep(impatient, monkeypatch):
    """A clock that jumps, as after SIGSTOP, makes no drive hang."""
    monkeypatch.setattr("libcolibri.parallel_reader.HANG_S", 1.0)
    files = FakeFile(CONTENT), FakeFile(CONTENT)
    reader = ParallelReader([Drive("a", 1), Drive("b", 1)], PIECE)
    files[0].gate.clear()
    files[1].gate.clear()
    reads = reader.start([request(files, 0)])
    until(lambda: files[0].running + files[1].running == 1)
    now = time.perf_counter
    monkeypatch.setattr("libcolibri.parallel_reader.time.perf_counter", lambda: now() + 1000.0)
    time.sleep(0.2)
    for file in files:
        file.gate.set()
    assert reads.wait() == [] and len(files[0].log) + len(files[1].log) == 1
    reader.close()
