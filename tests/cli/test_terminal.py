"""A real terminal: the program runs on a pseudo-terminal, its screen is what a user would see."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from cli_fakes import make_home

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from cli_fakes import FakeEngine, FakeKnowledgeBase, FakeServices, fake_hit
from colibri_cli.commands.chat import main
engine = FakeEngine(*{replies!r}, delay_s={delay_s})
base = FakeKnowledgeBase(fake_hit("notes/缓存.md", "experts", ("Engine",), 3))
main(args={arguments!r}, obj=FakeServices(engine, base).services(Path({home!r})))
"""


class Terminal:
    """colibri-chat over fakes on a pseudo-terminal of `columns` by `rows`."""

    def __init__(
        self,
        home: Path,
        replies: list[object],
        *arguments: str,
        columns: int = 80,
        rows: int = 24,
        delay_s: float = 0.0,
        environ: dict[str, str] | None = None,
    ):
        values = {"folder": str(Path(__file__).parent), "home": str(home), "arguments": list(arguments)}
        source = PROGRAM.format(replies=replies, delay_s=delay_s, **values)
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")}
        environment |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"} | (environ or {})

        def own_terminal() -> None:  # so that Ctrl-C becomes a signal, as in a shell
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        command = [sys.executable, "-c", source]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, preexec_fn=own_terminal)
        os.close(slave)
        self.raw, self.seen = "", 0

    def wait_for(self, text: str, timeout_s: float = 20.0) -> str:
        """Read until `text` stands on the screen since the last wait; everything read so far."""
        end_s = time.monotonic() + timeout_s
        while text not in plain(self.raw[self.seen :]):
            left_s = end_s - time.monotonic()
            assert left_s > 0 and select.select([self.master], [], [], left_s)[0], f"{text!r} did not come, only {self.raw!r}"
            try:
                self.raw += os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(f"the program ended before {text!r}: {self.raw!r}") from None
        self.seen = len(self.raw)
        return plain(self.raw)

    def wait_for_prompt(self) -> None:
        """Read until the editor takes keys: it asks the terminal to bracket pastes then, and stops that when Enter was pressed."""
        while self.raw.rfind("\x1b[?2004h") <= max(self.raw.rfind("\x1b[?2004l"), 0):
            assert select.select([self.master], [], [], 20.0)[0], f"no prompt, only {self.raw!r}"
            self.raw += os.read(self.master, 65536).decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self, timeout_s: float = 10.0) -> int:
        """Wait until the program has left; its exit code."""
        end_s = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < end_s:
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self.raw += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.master)


def plain(raw: str) -> str:
    """Without the terminal's control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>()][0-9A-Z]?|\r", "", raw)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(home: Path) -> None:
    terminal = Terminal(home, [["word "] * 500, ["all right"]], delay_s=0.02)
    try:
        terminal.wait_for_prompt()
        terminal.type("first\r")
        terminal.wait_for("word word")
        terminal.type("\x03")
        terminal.wait_for("this answer is not complete")
        terminal.wait_for_prompt()
        terminal.type("second\r")
        terminal.wait_for("all right")
        terminal.wait_for_prompt()
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.raw
    finally:
        terminal.close()


def test_keys_typed_during_an_answer_wait_for_the_next_prompt(home: Path) -> None:
    terminal = Terminal(home, [["word "] * 60, ["then"]], delay_s=0.02)
    try:
        terminal.wait_for_prompt()
        terminal.type("first\r")
        terminal.wait_for("word word")
        terminal.type("typed early")
        screen = terminal.wait_for("tokens at")
        assert "typed early" not in screen and screen.count("word") == 60
        terminal.wait_for_prompt()
        terminal.type(" and late\r")
        terminal.wait_for("then")
        terminal.wait_for_prompt()
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "+typed early and late\n" in (home / "history").read_text()
    finally:
        terminal.close()


def test_a_paste_of_several_lines_is_one_question(home: Path) -> None:
    terminal = Terminal(home, [["seen"]])
    try:
        terminal.wait_for_prompt()
        terminal.type("\x1b[200~line one\nline two\nline three\x1b[201~")
        terminal.wait_for("line three")
        terminal.type("\r")
        terminal.wait_for("seen")
        terminal.wait_for_prompt()
        terminal.type("\x04")
        assert terminal.end() == 0
        history = (home / "history").read_text()
        assert "+line one\n+line two\n+line three\n" in history
        assert (home / "history").stat().st_mode & 0o077 == 0
    finally:
        terminal.close()


def test_wide_characters_in_a_narrow_window(home: Path) -> None:
    answer = "缓存在内存里，专家从磁盘读取 [1]。" * 6
    terminal = Terminal(home, [[answer]], columns=40)
    try:
        terminal.wait_for_prompt()
        terminal.type("专家在哪里？")
        terminal.wait_for("专家在哪里？")
        terminal.type("\x7f\r")  # backspace takes one whole character
        screen = terminal.wait_for("notes/缓存.md:3")
        assert answer in screen.replace("\n", "").replace("  ", " ").replace("读取[", "读取 [")
        terminal.wait_for_prompt()
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "+专家在哪里\n" in (home / "history").read_text()
    finally:
        terminal.close()


def test_an_answer_taller_than_the_screen_appears_once(home: Path) -> None:
    lines = [f"line {number} of a long answer\n" for number in range(200)]
    terminal = Terminal(home, [lines], rows=10)
    try:
        terminal.wait_for_prompt()
        terminal.type("long\r")
        terminal.wait_for("line 199 of")
        terminal.wait_for_prompt()
        screen = plain(terminal.raw)
        assert [screen.count(f"line {number} of") for number in range(200)] == [1] * 200
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_no_color_is_honoured(home: Path) -> None:
    cases: tuple[tuple[dict[str, str], bool], ...] = (({}, True), ({"NO_COLOR": "1"}, False))
    for environ, coloured in cases:
        terminal = Terminal(home, [["so [1]"]], environ=environ)
        try:
            terminal.wait_for_prompt()
            terminal.type("q\r")
            terminal.wait_for("notes/")
            terminal.wait_for_prompt()
            terminal.type("\x04")
            assert terminal.end() == 0
            assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.raw)) is coloured
        finally:
            terminal.close()


def chat_in_a_pipe(home: Path, stdin: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    values = {"folder": str(Path(__file__).parent), "home": str(home), "arguments": list(arguments)}
    source = PROGRAM.format(replies=[["so \x1b[31m[1]"], ["next"]], delay_s=0.0, **values)
    return subprocess.run([sys.executable, "-c", source], input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_a_pipe_gets_no_control_characters(home: Path) -> None:
    done = chat_in_a_pipe(home, "first\nsecond\n")
    assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr
    assert done.stdout.startswith("so ␛[31m[1]\n[1]\tnotes/缓存.md:3\tEngine\n") and "next\n" in done.stdout


def test_a_reader_that_goes_away_is_no_error(home: Path) -> None:
    values = {"folder": str(Path(__file__).parent), "home": str(home), "arguments": ["--once", "q"]}
    source = PROGRAM.format(replies=[["line\n"] * 3000], delay_s=0.001, **values)
    program = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None and program.stderr is not None
    program.stdout.readline()
    program.stdout.close()
    assert program.wait(30) == 141
    assert "Traceback" not in program.stderr.read()


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    heavy = ("numpy", "numba", "faiss", "rich", "prompt_toolkit", "sqlite_utils", "jinja2")
    for module in ("app", "commands.chat", "commands.ingest"):
        check = (
            f"import sys\nfrom colibri_cli.{module} import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit: pass\n"
            f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr.strip() == "[]"
