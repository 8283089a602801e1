"""Options that several commands share, and what they turn into.

In: click decorators.  Out: keyword arguments for Engine.open and SamplingParams.
"""

import re
from collections.abc import Callable
from typing import Any

import click

from .errors import exit_codes_help

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "auto_envvar_prefix": None}


def command(*codes: int, name: str | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """`click.command` with our settings and the exit codes (the common ones and `codes`) at the end of --help."""
    return click.command(name=name, context_settings=CONTEXT_SETTINGS, epilog=exit_codes_help(*codes))


def _stack(*decorators: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


class ExpertCacheType(click.ParamType):
    """'auto', a number of experts per layer, or a size in bytes such as 6GB."""

    name = "auto|N|SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).strip()
        if text.isdecimal():
            return int(text)
        if text == "auto" or re.fullmatch(r"\d+(\.\d+)?\s*([kmgt]i?b?|b)", text, re.IGNORECASE):
            return text
        return self.fail(f"{value!r} is not auto, a number of experts per layer, or a size such as 6GB", param, ctx)


threads_option = click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Compute threads.  [default: physical cores]")
context_option = click.option(
    "--ctx", "context_length", type=click.IntRange(min=1), metavar="N", help="Context length.  [default: the model's, as memory allows]"
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
    click.option("--prefetch/--no-prefetch", default=None, help="Accepted for later versions; experts are read on demand so far."),
    click.option("--preload", is_flag=True, help="Fill the expert cache before the first token."),
)
engine_options = _stack(context_option, memory_options)

sampling_options = _stack(
    click.option("--temp", "temperature", type=float, default=0.0, show_default=True, metavar="X", help="Temperature; 0 is greedy."),
    click.option("--top-k", type=int, default=0, show_default=True, metavar="N", help="Keep the N likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=float, default=1.0, show_default=True, metavar="X", help="Keep the likeliest tokens up to this mass."),
    click.option("--min-p", type=float, default=0.0, show_default=True, metavar="X", help="Drop tokens below this share of the likeliest."),
    click.option(
        "--repeat-penalty",
        "repetition_penalty",
        type=float,
        default=1.0,
        show_default=True,
        metavar="X",
        help="Penalty on repeated tokens; 1 is none.",
    ),
    click.option("--seed", type=int, metavar="N", help="Seed of the random numbers.  [default: a new one each time]"),
)

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling options from `options` and return them as SamplingParams' fields."""
    return {name: options.pop(name) for name in SAMPLING_FIELDS}


def engine_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of Engine.open among `options`; an option that was not given takes the engine's own default."""
    arguments = {name: options[name] for name in ("threads", "context_length", "expert_cache", "preload") if options.get(name) is not None}
    if options.get("prefetch") is not None:
        arguments["prefetch"] = options["prefetch"]
    return arguments
