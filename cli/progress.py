"""Progress on standard error: one line that rewrites itself on a terminal, a plain line now and then elsewhere.

In: (stage, done, total) reports.  Out: at most one line of the screen in use, cleared when the work is over.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from .text import neutralise, readable_bytes

REDRAW_S = 0.1
PLAIN_LINE_S = 10.0
TICK_S = 1.0
HINT_S = 3.0
BAR_COLUMNS = 10
COMPILING = "the first start on a machine compiles the kernels, which takes a minute"
OPENING = ("opening the model", COMPILING)


class ProgressLine:
    """A status line on `stream`; `clear` removes it before anything else is printed. Reports may come from any thread."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._shown = False
        self._last_s = clock()
        self._stage = ""
        self._lock = threading.Lock()

    def report(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """Show how far `stage` is; a `total` of 0 means that it is not known. `detail` may change with every report."""
        with self._lock:
            new_stage = stage != self._stage
            self._stage = stage
            if new_stage and not self._terminal:
                self._last_s = self._clock()  # a stage is worth a line of a log only if it takes long
            due = self._clock() - self._last_s >= (REDRAW_S if self._terminal else PLAIN_LINE_S)
            if due or (self._terminal and (new_stage or done == total)):
                self._show(describe(stage, done, total) + (f"  {detail}" if detail else ""))

    def note(self, text: str) -> None:
        """Show a line without numbers, at once on a terminal only."""
        with self._lock:
            self._stage = text
            if self._terminal:
                self._show(text)

    def clear(self) -> None:
        """Remove the line from the screen."""
        with self._lock:
            if self._shown:
                self._stream.write("\r\x1b[2K")
                self._stream.flush()
                self._shown = False

    @contextlib.contextmanager
    def waiting(self, text: str, hint: str = "") -> Iterator[None]:
        """Show `text` and the seconds that went by, as long as nothing else is reported; after HINT_S the `hint` with it."""
        self.note(f"{text} …")
        stage, started_s, done = self._stage, self._clock(), threading.Event()

        def tick() -> None:
            while not done.wait(TICK_S):
                with self._lock:
                    waited_s = self._clock() - started_s
                    if self._stage == stage and (self._terminal or self._clock() - self._last_s >= PLAIN_LINE_S):
                        self._show(f"{text} … {waited_s:.0f} s" + (f"  ({hint})" if hint and waited_s >= HINT_S else ""))

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()
            self.clear()

    def _show(self, text: str) -> None:
        text = neutralise(text).replace("\n", " ")
        if not self._terminal:
            self._stream.write(text + "\n")
        else:
            self._stream.write("\r\x1b[2K" + _fit(text, shutil.get_terminal_size().columns - 1))
            self._shown = True
        self._last_s = self._clock()
        self._stream.flush()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def describe(stage: str, done: int, total: int) -> str:
    """'[##..] 12 %  reading weights 3/24'; without the share when the total is unknown. A total of a million and more is one of bytes."""
    if total <= 0:
        return f"{stage} {done}" if done else f"{stage} …"
    numbers = f"{done}/{total}" if total < 1_000_000 else f"{readable_bytes(done)} of {readable_bytes(total)}"
    filled = BAR_COLUMNS * min(done, total) // total
    return f"[{'#' * filled}{'.' * (BAR_COLUMNS - filled)}] {100 * done // total:3} %  {stage} {numbers}"


def _fit(text: str, columns: int) -> str:
    """`text` cut to `columns` screen columns: a status line that wraps could not be rewritten."""
    from prompt_toolkit.utils import get_cwidth

    used = 0
    for index, character in enumerate(text):
        used += get_cwidth(character)
        if used > columns:
            return text[:index]
    return text
