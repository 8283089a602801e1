"""`colibri verify`: every file of a model directory against its size and checksum.

In: a model directory.  Out: one line, exit code 0 if nothing differs.
"""

import sys

import click

from ..errors import reports_errors
from ..options import command, json_option
from ..progress import ProgressLine
from ..services import Services
from ..text import neutralise, readable_bytes, to_json


@command(name="verify")
@click.argument("model")
@json_option
@click.pass_context
@reports_errors
def verify(ctx: click.Context, model: str, as_json: bool) -> None:
    """Check the files of MODEL against the sizes and checksums in its colibri.json."""
    services = ctx.obj or Services()
    path = services.home.model(model)
    with ProgressLine(sys.stderr) as progress:
        manifest = services.verify(path, lambda name, done, total: progress.report("reading", done, total, name))
    total = sum(entry.bytes for entry in manifest.files.values())
    if as_json:
        click.echo(to_json({"model": str(path), "files": len(manifest.files), "bytes": total, "verified": True}))
    else:
        click.echo(neutralise(f"{path}: {len(manifest.files)} files, {readable_bytes(total)}, all as recorded"))
