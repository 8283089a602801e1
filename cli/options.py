"""Options that several commands share, and what they turn into.

In: click decorators.  Out: keyword arguments for Engine.open and SamplingParams.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .errors import USAGE, exit_codes_help
from .paths import Home
from .text import one_line

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "auto_envvar_prefix": None}


class ArgumentError(click.ClickException):
    """Wrong arguments, in one line."""

    exit_code = USAGE

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {one_line(self.message)}", file=file, err=file is None)


class Command(click.Command):
    """A command that answers wrong arguments with one line, where click writes a usage text."""

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise ArgumentError(describe_usage(error)) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise ArgumentError(describe_usage(error)) from None


def describe_usage(error: click.UsageError) -> str:
    """'--threads 0: expected ...' for a wrong value, click's own words for everything else, and where to look."""
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter) and isinstance(error.param, click.Option):
        return f"{max(error.param.opts, key=len)} {error.message}"
    return f"{error.format_message().rstrip('.')} (--help lists the options)"


def command(*codes: int, name: str | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """`click.command` with our settings and the exit codes (the common ones and `codes`) at the end of --help."""
    return click.command(name=name, cls=Command, context_settings=CONTEXT_SETTINGS, epilog=exit_codes_help(*codes))


def _stack(*decorators: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


class Number(click.ParamType):
    """A number within bounds, those of the library, so that a wrong one is an argument's error before anything is opened.

    kind     int or float
    above    the lower bound itself is not allowed
    """

    name = "number"

    def __init__(self, kind: type[int] | type[float], low: float, high: float | None = None, above: bool = False):
        self.kind, self.low, self.high, self.above = kind, low, high, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = self.kind(value)
        except ValueError:
            return self.fail(f"{value}: expected {self.describe()}", param, ctx)
        low_enough = self.high is None or number <= self.high
        high_enough = number > self.low if self.above else number >= self.low
        return number if low_enough and high_enough else self.fail(f"{value}: expected {self.describe()}", param, ctx)  # NaN fails too

    def describe(self) -> str:
        """The values allowed, in words."""
        what = "a whole number" if self.kind is int else "a number"
        if self.high is None:
            return f"{what} of at least {self.low:g}"
        return f"{what} above {self.low:g} and at most {self.high:g}" if self.above else f"{what} from {self.low:g} to {self.high:g}"


class ExpertCacheType(click.ParamType):
    """'auto', a number of experts per layer from 1 up, or a size in bytes such as 6GB."""

    name = "auto|N|SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).strip()
        number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:[kmgt]i?b?|b)", text, re.IGNORECASE)
        if text == "auto" or (number and float(number[1]) > 0):
            return text
        if text.isdecimal() and int(text) > 0:
            return int(text)
        return self.fail(f"{text}: expected auto, a number of experts per layer from 1 up, or a size such as 6GB", param, ctx)


class ExpertsType(click.ParamType):
    """'3:17', '3:17,3:20-25': experts by layer."""

    name = "LAYER:EXPERT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        experts: list[tuple[int, int]] = []
        for word in str(value).split(","):
            found = re.fullmatch(r"\s*([0-9]{1,6}):([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", word)
            first, last = (int(found[2]), int(found[3] or found[2])) if found else (1, 0)
            if found is None or last < first:
                return self.fail(f"{word.strip()}: expected LAYER:EXPERT, as in 3:17 or 3:17-20", param, ctx)
            experts += [(int(found[1]), expert) for expert in range(first, last + 1)]
        return tuple(experts)


threads_option = click.option("--threads", type=Number(int, 1, 256), metavar="N", help="Compute threads.  [default: physical cores]")
context_option = click.option(
    "--ctx", "context_length", type=Number(int, 1), metavar="N", help="Context length.  [default: the model's, as memory allows]"
)
pin_option = click.option(
    "--pin",
    type=ExpertsType(),
    multiple=True,
    metavar="LAYER:EXPERT",
    help="Experts that never leave memory, as in 3:17,3:20-25; may be given several times.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")

memory_options = _stack(
    threads_option,
    click.option(
        "--expert-cache",
        type=ExpertCacheType(),
        default="auto",
        show_default=True,
        help="Memory for experts: auto, experts per layer, or a size such as 6GB.",
    ),
    click.option(
        "--expert-policy",
        type=click.Choice(["auto", "lru", "least_stale", "decayed_frequency", "adaptive_frequency"]),
        default="auto",
        show_default=True,
        help="Which expert leaves a full cache first; auto is what replayed runs spoke for.",
    ),
    click.option(
        "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Record which experts each pass uses, for `colibri trace`."
    ),
    click.option("--verify-experts", is_flag=True, help="Compare every expert that is read with its checksum."),
    click.option(
        "--mirror",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="The same model on another drive: experts are read from both, and from one when the other fails.",
    ),
    click.option(
        "--prefetch",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Read experts that the next layer will probably need while this one waits; auto does so where it has made tokens faster.",
    ),
    click.option("--preload", is_flag=True, help="Fill the expert cache before the first token."),
    pin_option,
    click.option("--no-usage-history", is_flag=True, help="Do not remember, or make use of, which experts earlier runs used."),
    click.option("--no-drive-test", is_flag=True, help="Do not test, or make use of, how this machine's drives are read fastest."),
)
engine_options = _stack(context_option, memory_options)

sampling_options = _stack(
    click.option(
        "--temp", "temperature", type=Number(float, 0, 100), default=0.0, show_default=True, metavar="X", help="Temperature; 0 is greedy."
    ),
    click.option(
        "--top-k", type=Number(int, 0), default=0, show_default=True, metavar="N", help="Keep the N likeliest tokens; 0 keeps all."
    ),
    click.option(
        "--top-p",
        type=Number(float, 0, 1, above=True),
        default=1.0,
        show_default=True,
        metavar="X",
        help="Keep the likeliest tokens up to this mass.",
    ),
    click.option(
        "--min-p",
        type=Number(float, 0, 1),
        default=0.0,
        show_default=True,
        metavar="X",
        help="Drop tokens below this share of the likeliest.",
    ),
    click.option(
        "--repeat-penalty",
        "repetition_penalty",
        type=Number(float, 0, 100, above=True),
        default=1.0,
        show_default=True,
        metavar="X",
        help="Penalty on repeated tokens; 1 is none.",
    ),
    click.option("--seed", type=Number(int, 0), metavar="N", help="Seed of the random numbers.  [default: a new one each time]"),
)

THINKING = ("on", "off", "low", "medium", "high")


def thinking_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--think and --reasoning; `default` says what happens without --think."""
    return _stack(
        click.option(
            "--think",
            "thinking",
            type=click.Choice(THINKING),
            help=f"Whether, or how hard, a reasoning model thinks before it answers.  [default: {default}]",
        ),
        click.option(
            "--reasoning",
            "show_reasoning",
            type=click.Choice(["show", "hide"]),
            callback=lambda ctx, param, value: None if value is None else value == "show",
            help="Show the reasoning on standard error, or hide it.  [default: show on a terminal]",
        ),
    )


SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling options from `options` and return them as SamplingParams' fields."""
    return {name: options.pop(name) for name in SAMPLING_FIELDS}


def pinned_experts(options: dict[str, Any]) -> list[tuple[int, int]]:
    """(layer, expert) of every --pin."""
    return [expert for experts in options.get("pin") or () for expert in experts]


def engine_arguments(options: dict[str, Any], home: Home) -> dict[str, Any]:
    """The keyword arguments of Engine.open among `options`; an option that was not given takes the engine's own default.

    Usage histories, and how drives are read fastest, are kept in the user's folder, unless that was declined.
    """
    arguments = {name: options[name] for name in ("threads", "context_length", "expert_cache", "preload") if options.get(name) is not None}
    if options.get("expert_policy", "auto") != "auto":
        arguments["expert_policy"] = options["expert_policy"]
    if options.get("verify_experts"):
        arguments["verify_experts"] = True
    arguments |= {name: options[name] for name in ("trace", "mirror") if options.get(name) is not None}
    if options.get("prefetch", "auto") != "auto":
        arguments["prefetch"] = options["prefetch"]
    if pins := pinned_experts(options):
        arguments["pin"] = pins
    if not options.get("no_usage_history"):
        arguments["usage_history"] = home.make_usage()
    if not options.get("no_drive_test"):
        arguments["drive_settings"] = home.drives
    return arguments
