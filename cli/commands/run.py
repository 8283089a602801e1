"""`colibri run`: one prompt in, the model's text out, streamed.

In: a model directory and a prompt (-p, or standard input).  Out: text on standard output; the memory plan and the timing on
standard error. A model without a tokenizer takes and gives token ids.
"""

import sys
from contextlib import closing
from typing import Any

import click

from ..errors import INTERRUPTED, reports_errors
from ..generation import stats_dict, stats_line, stats_lines
from ..interrupt import cancel_on_interrupt
from ..options import Number, command, engine_arguments, engine_options, json_option, sampling_options, take_sampling, thinking_options
from ..progress import OPENING, ProgressLine
from ..services import Services
from ..text import neutralise, to_json


@command(name="run")
@click.option("-m", "--model", required=True, metavar="MODEL", help="Model directory, or the name of one in the models folder.")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; '-' or nothing reads standard input.")
@click.option("--system", metavar="TEXT", help="System message before the prompt.")
@engine_options
@sampling_options
@thinking_options("the model's own")
@click.option("-n", "--max-tokens", type=Number(int, 1), metavar="N", help="Stop after N tokens.  [default: the context's end]")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be given several times.")
@click.option("--raw", is_flag=True, help="Do not apply the chat template: continue the text as it is.")
@json_option
@click.option("--stats", "show_stats", is_flag=True, help="Print more on prompt and answer: speed, experts, drive, share of the possible.")
@click.pass_context
@reports_errors
def run(ctx: click.Context, model: str, **options: Any) -> None:
    """Continue or answer a prompt.

    The answer goes to standard output, everything else to standard error. The chat template is applied unless --raw is given.
    A model without a tokenizer takes token ids (1 2 3) and prints token ids.
    """
    services = ctx.obj or Services()
    path = services.home.model(model)
    text = read_prompt(options["prompt"], sys.stdin)
    # What can be refused is refused before the model is loaded.
    sampling = services.sampling(**take_sampling(options))
    token_ids = prompt_ids(text, options) if services.read_manifest(path).tokenizer is None else None
    with ProgressLine(sys.stderr) as progress:
        with progress.waiting(*OPENING):
            engine = services.open_engine(path, on_progress=progress.report, **engine_arguments(options, services.home))
        with closing(engine):
            for line in (engine.plan.line(), *engine.remarks):
                click.echo(neutralise(line), err=True)
            prompt = build_prompt(engine, text, options["system"], options["raw"]) if token_ids is None else token_ids
            options["template_options"] = template_options(engine, prompt, options["thinking"])
            finish_reason = generate(engine, prompt, sampling, options, progress)
            told = engine.notices
            for line in told:
                click.echo(neutralise(line), err=True)
        for line in engine.notices:  # closing writes the usage history, for which a drive may be too full
            if line not in told:
                click.echo(neutralise(line), err=True)
    if finish_reason == "cancelled":
        raise SystemExit(INTERRUPTED)


def read_prompt(prompt: str | None, stdin: Any) -> str:
    """The prompt given, or what standard input holds; usage error if there is neither."""
    if prompt is None and stdin.isatty():
        raise click.UsageError("no prompt: give one with -p TEXT, or pipe one into standard input")
    text = stdin.read() if prompt in (None, "-") else prompt
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    return text


def build_prompt(engine: Any, text: str, system: str | None, raw: bool) -> Any:
    """What `session.generate` takes of a text: itself if it is to be continued, or messages."""
    if raw:
        return (system + "\n" + text) if system else text
    if engine.chat_template is None:
        click.echo("this model has no chat template: the prompt is continued as it is", err=True)
        return text
    messages = [{"role": "user", "content": text}]
    return [{"role": "system", "content": system}, *messages] if system else messages


def template_options(engine: Any, prompt: Any, thinking: str | None) -> dict[str, Any]:
    """The chat template's variables for --think; TemplateError when there is no template, or it knows no such setting."""
    if thinking is None:
        return {}
    if isinstance(prompt, str) or engine.chat_template is None or not isinstance(prompt[0], dict):
        from libcolibri.errors import TemplateError

        raise TemplateError(f"--think {thinking} is for chat templates, none is applied here: leave it out")
    return engine.chat_template.thinking_options(thinking)


def prompt_ids(text: str, options: dict[str, Any]) -> list[int]:
    """The prompt of a model without a tokenizer; TokenizerError for an option that is about text."""
    for name, given in (("--system", options["system"]), ("--stop", options["stop"]), ("--think", options["thinking"])):
        if given:
            from libcolibri.errors import TokenizerError

            raise TokenizerError(f"this model has no tokenizer, {name} needs one: leave it out, or convert the model with its tokenizer")
    return parse_token_ids(text)


def parse_token_ids(text: str) -> list[int]:
    """'1 2 3', '1,2,3' or '[1, 2, 3]' as numbers."""
    words = text.strip().strip("[]").replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        from libcolibri.errors import TokenizerError

        raise TokenizerError(f"this model has no tokenizer, so the prompt must be token ids such as '1 2 3', found {text.strip()[:40]!r}")
    return [int(word) for word in words]


def generate(engine: Any, prompt: Any, sampling: Any, options: dict[str, Any], progress: ProgressLine) -> str | None:
    """Stream one completion; returns its finish reason."""
    show = make_writer(options["as_json"], sys.stdout.isatty())
    thoughts = ReasoningText(options["show_reasoning"], progress)
    pieces: list[str] = []
    token_ids: list[int] = []
    step = None
    with cancel_on_interrupt() as cancel:
        steps = engine.new_session().generate(
            prompt,
            sampling,
            max_tokens=options["max_tokens"],
            stop=tuple(options["stop"]),
            cancel=cancel,
            template_options=options["template_options"],
        )
        for step in steps:
            if step.token_id is None and not step.text and step.finish_reason is None:
                progress.report("reading the prompt", step.stats.prefilled_tok + step.stats.reused_tok, step.stats.prompt_tok)
                continue
            if step.token_id is not None:
                token_ids.append(step.token_id)
            if step.reasoning:
                thoughts.push(step.reasoning)
            if not step.text and engine.tokenizer is not None:
                continue
            progress.clear()
            thoughts.end()
            piece = step.text if engine.tokenizer is not None or step.token_id is None else f"{step.token_id} "
            pieces.append(piece)
            show(piece)
    progress.clear()
    thoughts.end()
    finish(step, "".join(pieces), thoughts.text, token_ids, options, show, engine)
    return step.finish_reason if step else None


class ReasoningText:
    """What the model thinks before it answers: on standard error, or counted in the progress line.

    shown   None: only when standard error is a terminal
    """

    def __init__(self, shown: bool | None, progress: ProgressLine):
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._progress, self._open = progress, False
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._pieces)

    def push(self, piece: str) -> None:
        """Take the next piece."""
        self._pieces.append(piece)
        if self._shown:
            self._progress.clear()
            click.secho(neutralise(piece), dim=True, nl=False, err=True)
            self._open = True
        else:
            self._progress.report("thinking, token", len(self._pieces), 0)

    def end(self) -> None:
        """The answer begins: set it apart."""
        if self._open:
            click.echo("\n", err=True)
            self._open = False


def make_writer(as_json: bool, terminal: bool) -> Any:
    """A function that shows a piece at once: exact bytes into a pipe, harmless characters on a terminal, nothing for JSON."""

    def write(piece: str) -> None:
        if piece and not as_json:
            sys.stdout.write(neutralise(piece) if terminal else piece)
            sys.stdout.flush()

    return write


def finish(step: Any, text: str, reasoning: str, token_ids: list[int], options: dict[str, Any], show: Any, engine: Any) -> None:
    """End the output: a newline, or the JSON object; then the timing on standard error."""
    if step is None:
        return
    if options["as_json"]:
        facts = {"text": text, **({"reasoning": reasoning} if reasoning else {}), "token_ids": token_ids}
        click.echo(to_json(facts | {"finish_reason": step.finish_reason, "stats": stats_dict(step.stats, engine)}))
    elif reasoning and not text:
        click.echo("the model was still thinking when it ended: --think off, or a larger -n", err=True)
    elif not text.endswith("\n"):
        show("\n")
    if step.finish_reason == "cancelled":
        click.echo("stopped by Ctrl-C: the text above is not complete", err=True)
    if options["show_stats"]:
        for line in stats_lines(step.stats, engine):
            click.echo(line, err=True)
    else:
        click.echo(stats_line(step.stats), err=True)
