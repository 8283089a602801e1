"""Progress: one line on a terminal, a line now and then elsewhere, nothing left behind."""

import io
import time

from colibri_cli import progress
from colibri_cli.progress import ProgressLine, describe


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_newest_state_only() -> None:
    screen = Screen()
    with ProgressLine(screen) as line:
        line.report("weights", 1, 4)
        line.report("weights", 2, 4)  # too soon to be shown
        line.report("weights", 4, 4)
        line.report("experts", 1, 2)
    assert [part for part in screen.getvalue().split("\r\x1b[2K") if part] == [
        "[##........]  25 %  weights 1/4",
        "[##########] 100 %  weights 4/4",
        "[#####.....]  50 %  experts 1/2",
    ]
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_a_file_gets_a_line_now_and_then() -> None:
    now_s = [0.0]
    log = io.StringIO()
    line = ProgressLine(log, clock=lambda: now_s[0])
    for second in range(60):
        now_s[0] = float(second)
        line.report("weights", second, 60)
    line.note("soon")
    line.clear()
    assert [text.split()[-1] for text in log.getvalue().splitlines()] == ["10/60", "20/60", "30/60", "40/60", "50/60"]


def test_totals_are_honest() -> None:
    assert describe("files", 3, 12) == "[##........]  25 %  files 3/12"
    assert describe("reading", 1_572_864, 3_145_728).endswith(" 50 %  reading 1.6 MB of 3.1 MB")
    assert describe("files", 7, 0) == "files 7" and describe("files", 0, 0) == "files …"


def test_waiting_shows_the_time_and_then_the_reason(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    monkeypatch.setattr(progress, "HINT_S", 0.05)
    screen = Screen()
    line = ProgressLine(screen)
    with line.waiting("opening", "compiles"):
        time.sleep(0.2)
        line.report("weights", 1, 2)
        time.sleep(0.05)
    parts = screen.getvalue().split("\r\x1b[2K")
    assert parts[1] == "opening …" and "opening … 0 s" in parts and "opening … 0 s  (compiles)" in parts
    assert parts[-2].endswith("weights 1/2") and parts[-1] == ""  # nothing came over the report, nothing is left
