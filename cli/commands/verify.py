"""`colibri verify`: every file of a model directory against its size and checksum.

In: a model directory.  Out: one line, exit code 0 if nothing differs.
"""

import sys
from typing import Any

import click

from ..errors import reports_errors
from ..options import command, json_option
from ..progress import ProgressLine
from ..services import Services
from ..text import to_json


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
        progress.note(f"reading {path} …")
        services.verify(path)
    files = describe_files(services.read_manifest(path))
    message = {"model": str(path), "files": len(files), "bytes": sum(files.values()), "verified": True}
    click.echo(to_json(message) if as_json else f"{path}: {len(files)} files, {message['bytes']} bytes, all as recorded")


def describe_files(manifest: Any) -> dict[str, int]:
    """File name -> size in bytes, as the manifest records them."""
    return {name: int(entry["bytes"]) for name, entry in manifest.files.items()}
