"""`colibri perplexity`: how well a model predicts a text.

In: a model directory and a text file.  Out: perplexity, mean negative log-likelihood and the number of tokens.
"""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from ..errors import reports_errors
from ..options import Number, command, engine_arguments, json_option, memory_options
from ..progress import OPENING, ProgressLine
from ..services import Services
from ..text import neutralise, to_json
from .run import parse_token_ids

WINDOW_TOK = 512


@command(name="perplexity")
@click.argument("model")
@click.argument("textfile", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@memory_options
@click.option(
    "--ctx",
    "context_length",
    type=Number(int, 2),
    metavar="N",
    help="Tokens in a window.  [default: 512, or the model's context if that is shorter]",
)
@click.option("--stride", type=Number(int, 1), metavar="N", help="Tokens from one window's start to the next.  [default: a window]")
@json_option
@click.pass_context
@reports_errors
def perplexity(ctx: click.Context, model: str, textfile: str, stride: int | None, as_json: bool, **options: Any) -> None:
    """Measure how well MODEL predicts TEXTFILE (UTF-8; '-' reads standard input).

    Prints the perplexity, the mean negative log-likelihood in nats per token and the number of tokens measured.
    A model without a tokenizer takes a file of token ids.
    """
    services = ctx.obj or Services()
    path = services.home.model(model)
    text = read_text(textfile)
    manifest = services.read_manifest(path)  # what can be refused is refused before the model is loaded
    ready_ids = parse_token_ids(text) if manifest.tokenizer is None else None
    options["context_length"] = window = options["context_length"] or min(WINDOW_TOK, services.longest_context(manifest))
    if stride and stride > window:
        raise click.UsageError(f"--stride {stride}: expected at most the window of {window} tokens")
    with ProgressLine(sys.stderr) as progress:
        with progress.waiting(*OPENING):
            engine = services.open_engine(path, on_progress=progress.report, **engine_arguments(options, services.home))
        with closing(engine):
            for line in (engine.plan.line(), *engine.remarks):
                click.echo(neutralise(line), err=True)
            token_ids = engine.tokenizer.encode(text) if ready_ids is None else ready_ids
            extra = {"stride": stride} if stride else {}
            result = services.perplexity(engine, token_ids, window, on_progress=progress.report, **extra)
            for line in engine.notices:
                click.echo(neutralise(line), err=True)
    if as_json:
        click.echo(to_json({"ppl": float(result.ppl), "nll": float(result.nll), "n_tok": int(result.n_tok)}))
    else:
        click.echo(f"perplexity {result.ppl:.4f}  (negative log-likelihood {result.nll:.5f} nats per token, {result.n_tok} tokens)")


def read_text(textfile: str) -> str:
    """The text to measure; anything but UTF-8 is refused, because a wrong guess would measure another text."""
    data = sys.stdin.buffer.read() if textfile == "-" else Path(textfile).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        from libcolibri.errors import ConfigError

        raise ConfigError(f"{textfile} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}): convert it to UTF-8 first") from None
