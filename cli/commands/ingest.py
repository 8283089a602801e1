"""`colibri-ingest`: documents into the knowledge base.

In: files and folders.  Out: the knowledge base brought up to date; a report of what was added, changed, moved, removed and skipped.
"""

import functools
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from ..errors import INTERRUPTED, SKIPPED, reports_errors
from ..interrupt import cancel_on_interrupt
from ..options import command, json_option
from ..progress import COMPILING, ProgressLine
from ..services import Services
from ..text import neutralise, one_line, to_json

FIRST_ESTIMATE_S = 5.0  # before that the rate is mostly that of starting
CHANGES = ("added", "changed", "moved", "removed")


@command(SKIPPED, name="colibri-ingest")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--kb", metavar="DIR", help="Knowledge base; made if it is not there.  [default: kb/default in the user's folder]")
@click.option("--embedder", metavar="MODEL", help="Embedder's directory or name.  [default: named in models/default-embed]")
@click.option("--collection", metavar="NAME", help="Put the documents into this collection.  [default: default]")
@click.option("--dry-run", is_flag=True, help="Say what would be done, change nothing.")
@click.option("--keep-missing", is_flag=True, help="Keep documents whose files are gone from the folders given.")
@json_option
@click.pass_context
@reports_errors
def main(
    ctx: click.Context,
    paths: tuple[str, ...],
    kb: str | None,
    embedder: str | None,
    collection: str | None,
    dry_run: bool,
    keep_missing: bool,
    as_json: bool,
) -> None:
    """Put the documents at each PATH (files or folders) into a knowledge base.

    Only what is new or changed is read again; run it again at any time, also after an interruption: what was finished is kept.
    Documents that vanished from a folder given here are removed from the knowledge base, unless --keep-missing is given.
    """
    services = ctx.obj or Services()
    check_paths(paths)
    folder = Path(kb).expanduser() if kb else services.home.default_knowledge_base
    model = services.home.embedder(embedder)
    with ProgressLine(sys.stderr) as progress:
        with progress.waiting("opening the embedder", COMPILING):
            embedder_model = services.open_encoder(model)
            embedder_model.name = model.name  # what messages about the knowledge base call it
        with closing(embedder_model) as encoder, closing(open_base(services, folder, encoder, dry_run)) as base:
            options = {} if collection is None else {"collection": collection}
            with cancel_on_interrupt() as cancel:  # the document in hand is finished or left out, never half written
                report = base.ingest(
                    list(paths),
                    on_progress=functools.partial(show_progress, progress, Remaining()),
                    dry_run=dry_run,
                    remove_missing=not keep_missing,
                    cancel=cancel,
                    **options,
                )
    show_report(report, folder, dry_run, as_json)
    if report.cancelled:
        click.echo("interrupted: what is listed is kept, the next run goes on from there", err=True)
        raise SystemExit(INTERRUPTED)
    if report.skipped:
        raise SystemExit(SKIPPED)


def open_base(services: Services, folder: Path, encoder: Any, dry_run: bool) -> Any:
    """The knowledge base to bring up to date; in a dry run nothing is made, so one that is not there is stood in for in memory."""
    if not dry_run:
        return services.open_knowledge_base(folder, encoder, create=True)
    return services.open_knowledge_base(folder if (folder / "kb.sqlite").exists() else Path(":memory:"), encoder)


class Remaining:
    """How long the rest takes, by the rate so far. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._start: tuple[float, int] | None = None  # when the first report came, and what was done by then

    def text(self, done: int, total: int) -> str:
        """', about 12 min left'; '' as long as too little is done to tell, and at the end."""
        now_s = self._clock()
        if self._start is None:
            self._start = (now_s, done)
        passed_s, gained = now_s - self._start[0], done - self._start[1]
        if passed_s < FIRST_ESTIMATE_S or gained <= 0 or done >= total:
            return ""
        left_s = passed_s * (total - done) / gained
        return f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {max(left_s, 1):.0f} s left"


def show_progress(line: ProgressLine, remaining: Remaining, progress: Any) -> None:
    """Totals are of the work to be done: first files to compare, then bytes of the documents that are new or changed."""
    if progress.phase == "compare":
        line.report("comparing files", progress.done_documents, progress.total_documents)
    else:
        counts = f"document {min(progress.done_documents + 1, progress.total_documents)} of {progress.total_documents}"
        left = remaining.text(progress.done_bytes, progress.total_bytes)
        line.report("reading", progress.done_bytes, progress.total_bytes, f"({counts}, {progress.n_chunks} passages{left})")


def check_paths(paths: tuple[str, ...]) -> None:
    """Refuse what does not exist before the embedder is loaded."""
    from libcolibri.errors import SourceError

    for path in paths:
        if "://" in path:
            raise SourceError(f"{path} is an address: colibri never downloads; save the document and give its path")
        if not Path(path).expanduser().exists():
            raise SourceError(f"{path} does not exist: give files or folders with documents")


def show_report(report: Any, folder: Path, dry_run: bool, as_json: bool) -> None:
    """What was done on standard output, what was skipped on standard error, each with its reason."""
    facts = {name: [_change(entry) for entry in getattr(report, name)] for name in CHANGES}
    if as_json:
        reasons = {kind: [{"path": item.path, "reason": item.reason} for item in getattr(report, kind)] for kind in ("skipped", "ignored")}
        numbers = {"unchanged": len(report.unchanged), "passages": report.n_chunks, "embedded": report.n_embedded}
        click.echo(to_json({"knowledge_base": str(folder), "dry_run": dry_run, **facts, **numbers, **reasons}))
        return
    if dry_run:
        for name in CHANGES:
            for entry in facts[name]:
                click.echo(neutralise(f"{name:<8} {entry}"))
    counts = [f"{len(facts[name])} {name}" for name in CHANGES]
    counts += [f"{len(report.unchanged)} unchanged", f"{len(report.skipped)} skipped", f"{len(report.ignored)} ignored"]
    click.echo(neutralise(f"{'would be: ' if dry_run else ''}{', '.join(counts)}; knowledge base {folder}"))
    for item in report.ignored:
        if Path(item.path).is_dir():  # of files it would be every picture; a folder is a link that leads outside
            click.echo(f"ignored {one_line(item.path)}: {one_line(item.reason)}", err=True)
    for item in report.skipped:
        click.echo(f"skipped {one_line(item.path)}: {one_line(item.reason)}", err=True)


def _change(entry: Any) -> str:
    """A path, or 'old -> new' for a moved document."""
    return entry if isinstance(entry, str) else " -> ".join(entry)
