"""The keyboard while an answer is written: Ctrl-C stops the answer, not the program, and nothing typed shows up inside it.

In: SIGINT while the context is entered.  Out: a set event the first time, KeyboardInterrupt the second time.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def cancel_on_interrupt() -> Iterator[threading.Event]:
    """Yield the event that Ctrl-C sets. A second Ctrl-C raises KeyboardInterrupt, in case the work does not listen.

    Signals can be caught in the main thread only; elsewhere the event is the caller's alone.
    """
    cancel = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield cancel
        return

    def interrupted(signum: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    previous = signal.signal(signal.SIGINT, interrupted)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def keys_unseen() -> Iterator[None]:
    """Keys typed meanwhile are not shown by the terminal; they are there for the next prompt. Ctrl-C works as ever.

    Enter stays the key it is: translated to a line feed it would start a new line of one long message at the next prompt.
    """
    try:
        import termios
    except ImportError:  # Windows shows no keys that no program reads
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    settings = termios.tcgetattr(sys.stdin)
    quiet = [settings[0] & ~termios.ICRNL, *settings[1:3], settings[3] & ~termios.ECHO, *settings[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
