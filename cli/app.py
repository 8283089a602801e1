"""`colibri`: the group of commands around one model.

In: arguments.  Out: the command's module is imported only when it is the one asked for.
"""

import importlib
from typing import Any

import click

from . import __name__ as PACKAGE
from .errors import told_when_interrupted
from .options import CONTEXT_SETTINGS

COMMANDS = {  # name of the module and of the function in it -> its line in --help
    "run": "Continue or answer a prompt.",
    "perplexity": "Measure how well a model predicts a text.",
    "verify": "Check a model directory against its checksums.",
    "trace": "Show what expert caches of several sizes would do with a recorded run.",
    "experts": "Draw how often each expert of a model was used.",
    "info": "List the models, or show what one of them holds.",
}


class LazyGroup(click.Group):
    """A group whose --help comes from a table, without importing the commands."""

    def invoke(self, ctx: click.Context) -> Any:
        with told_when_interrupted():  # a command's own imports take a while
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"{PACKAGE}.commands.{cmd_name}"), cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            ctx.fail(f"no command {name!r}" + (f", did you mean {near[0]!r}?" if near else f": expected one of {', '.join(COMMANDS)}"))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="colibri-moe", prog_name="colibri")
def main() -> None:
    """Run Mixture-of-Experts language models bigger than memory.

    \b
    Beside this command:
      colibri-convert   make a model directory of a Hugging Face folder or a GGUF file
      colibri-ingest    put documents into a knowledge base
      colibri-chat      ask questions, answered from those documents

    Models, knowledge bases and what is remembered are in the user's folder: $COLIBRI_HOME, else ~/.colibri.
    """
