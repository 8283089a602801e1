"""From an exception to one line on standard error and an exit code.

In: the function behind a command.  Out: the same function, with a user's mistake reported in one line, never a traceback.
A fault of our own (any other exception) keeps its traceback, because that is what a bug report needs.
"""

import contextlib
import errno
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from .text import one_line

DONE = 0
FAILED = 1
USAGE = 2  # click's own code for wrong arguments
NOT_IN_DOCUMENTS = 3
SKIPPED = 4
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE
FULL_DRIVE = (errno.ENOSPC, errno.EDQUOT)

EXIT_CODES = {
    DONE: "done",
    FAILED: "an error, told in one line on standard error",
    USAGE: "wrong arguments, told in one line",
    NOT_IN_DOCUMENTS: "colibri-chat --once: the documents do not say",
    SKIPPED: "colibri-ingest: done, but some files were skipped",
    INTERRUPTED: "interrupted with Ctrl-C",
    PIPE_CLOSED: "the reader of the output went away",
}


def exit_codes_help(*codes: int) -> str:
    """The `Exit codes` paragraph of a command's --help."""
    lines = [f"{code}  {EXIT_CODES[code]}" for code in sorted({DONE, FAILED, USAGE, INTERRUPTED, PIPE_CLOSED, *codes})]
    return "\b\nExit codes:\n" + "\n".join(f"  {line}" for line in lines)


def reports_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command so that what a user can cause ends in one line and a documented exit code."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        replace_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a console of few characters shows '?', it does not end the program
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            _silence_stdout()
            raise SystemExit(PIPE_CLOSED) from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None
        except Exception as error:
            message = user_message(error)
            if message is None:
                raise
            click.echo(f"error: {message}", err=True)
            raise SystemExit(FAILED) from None

    return guarded


@contextlib.contextmanager
def told_when_interrupted() -> Iterator[None]:
    """Ctrl-C inside ends the program with one line and our exit code, where click would say "Aborted!" and end with 1."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise SystemExit(INTERRUPTED) from None


def replace_closed_streams() -> None:
    """Let standard streams that the caller closed (`>&-`) lead nowhere; Python has None in their place.

    Opening takes the free descriptors, so that no model file becomes number 1 or 2 and is written to by a library's message.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends


def user_message(error: BaseException) -> str | None:
    """One line for an error that a user can cause, None for a fault of ours."""
    from libcolibri.errors import ColibriError  # only once something failed: --help needs no core

    if isinstance(error, ColibriError):
        return one_line(str(error))
    if isinstance(error, OSError) and error.errno in FULL_DRIVE:
        where = error.filename or "the output"  # writing to an open file or to standard output gives no name
        return one_line(f"{where}: the drive is full: free some space there, or write somewhere else, and run the same command again")
    if isinstance(error, OSError) and error.strerror:
        return one_line(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    if isinstance(error, MemoryError):
        return "out of memory: use a smaller --ctx or --expert-cache"
    return None


def _silence_stdout() -> None:
    """Point standard output at nothing, or the interpreter complains about the closed pipe when it exits."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # a stand-in stream without a descriptor has no closed pipe either
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
