"""`colibri experts`: how often each expert of a model was used, as a map.

In: a model directory and its usage history, or a file that --trace wrote.  Out: layers by experts on the screen, as one HTML page, or JSON.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ..errors import reports_errors
from ..options import ExpertCacheType, command, json_option, pin_option, pinned_experts
from ..services import Services
from ..text import neutralise, one_line, to_json

if TYPE_CHECKING:
    from libcolibri.expert_usage import ExpertUsage


@command(name="experts")
@click.argument("model", required=False)
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Draw a recorded run instead of the usage history.")
@click.option("--expert-cache", type=ExpertCacheType(), metavar="N|SIZE", help="Mark the experts that a cache of this size begins with.")
@pin_option
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write the map as one HTML page, over a file that is there.")
@click.option("--forget", is_flag=True, help="Remove the model's usage history.")
@json_option
@click.pass_context
@reports_errors
def experts(ctx: click.Context, model: str | None, forget: bool, **options: Any) -> None:
    """Draw how often each expert of MODEL was used, layer by layer.

    `colibri run`, `colibri perplexity` and `colibri-chat` remember it, unless they are given --no-usage-history: expert numbers only,
    no text. With --trace, MODEL may be left out.
    """
    services = ctx.obj or Services()
    if model is None and (forget or options["trace"] is None):
        raise click.UsageError("no model: name one, or give a recorded run with --trace FILE")
    if forget and (options["trace"] or options["html"] or options["as_json"]):
        raise click.UsageError("--forget draws nothing: give it alone")
    if options["expert_cache"] == "auto":
        raise click.UsageError("--expert-cache auto: expected experts per layer or a size, what auto takes is known when a model is opened")
    path = None if model is None else services.home.model(model)
    manifest = None if path is None else routed_manifest(services, path)
    if forget:
        forget_usage(services, path, manifest)
        return
    shown = make_map(services, path, manifest, options)
    if options["html"] is not None:
        write_page(options["html"], shown)
    if options["as_json"]:
        from ..expert_map import as_json

        click.echo(to_json({"model": path, "trace": options["trace"], **as_json(shown)}))
    elif options["html"] is not None:
        for line in (*shown.lines(), f"written to {one_line(str(options['html']))}"):
            click.echo(line)
    else:
        from rich.console import Console

        from ..expert_map import draw

        draw(Console(file=sys.stdout, highlight=False, markup=False, emoji=False), shown)


def routed_manifest(services: Services, path: Path) -> Any:
    """The manifest of a model with experts; ConfigError for another."""
    manifest = services.read_manifest(path)
    if not manifest.experts:
        _refuse(f"{path} has no experts: it is dense, every token uses all of it")
    return manifest


def forget_usage(services: Services, path: Path | None, manifest: Any) -> None:
    """Remove the history, and say what there was."""
    from libcolibri.usage_history import forget, history_file

    found = forget(history_file(services.home.usage, manifest.fingerprint))
    click.echo(neutralise(f"{path}: its usage history is forgotten" if found else f"{path}: has no usage history"))


def make_map(services: Services, path: Path | None, manifest: Any, options: dict[str, Any]) -> Any:
    """Uses, residents and pins. Raises ConfigError or FormatError when nothing was recorded, or something does not fit the model."""
    from libcolibri.expert_cache import check_pins

    from ..expert_map import ExpertMap

    if options["trace"] is not None:
        usage, sizes, source = from_trace(path, manifest, options["trace"])  # sizes: expert_bytes, num_experts, num_experts_per_tok
    else:
        usage, sizes, source = from_history(services, path, manifest)
    pins = frozenset(pinned_experts(options))
    check_pins(pins, sizes.num_experts)
    shown = ExpertMap(path.name if path is not None else options["trace"].name, source, usage, pins)
    if options["expert_cache"] is None:
        return shown
    if manifest is not None:
        from libcolibri.models.registry import parse_config

        sizes.num_experts_per_tok = parse_config(manifest.config).num_experts_per_tok
    return with_residents(shown, sizes, options["expert_cache"])


def from_history(services: Services, path: Path | None, manifest: Any) -> tuple["ExpertUsage", Any, str]:
    """Uses, sizes and how much was recorded, from the user's folder."""
    from libcolibri.usage_history import history_file, read_usage

    sizes = sizes_of(manifest)
    found = read_usage(history_file(services.home.usage, manifest.fingerprint), manifest.fingerprint, sizes.num_experts)
    if found is None or not found[0]:
        _refuse(f"{path}: no use of its experts is recorded yet; run it once, as in `colibri run -m {path} -p Hello`, or give --trace FILE")
    tokens, usage = found
    return usage, sizes, f"{tokens:,} token{'' if tokens == 1 else 's'} recorded"


def from_trace(path: Path | None, manifest: Any, file: Path) -> tuple["ExpertUsage", Any, str]:
    """The same from a recorded run, which must be the model's if there is one."""
    from libcolibri.errors import FormatError
    from libcolibri.expert_trace import read_trace
    from libcolibri.expert_usage import ExpertUsage

    trace = read_trace(file)
    if not trace.passes:
        raise FormatError(f"{file}: no pass is recorded in it; record a run with --trace")
    fewest = min(done.n_tok for done in trace.passes)
    most = max(len(used) for done in trace.passes for used in done.experts if done.n_tok == fewest)  # a token's experts, in a pass over one
    sizes = SimpleNamespace(
        expert_bytes=dict(zip(trace.layers, trace.expert_bytes, strict=True)),
        num_experts=dict(zip(trace.layers, trace.num_experts, strict=True)),
        num_experts_per_tok=most,
    )
    if manifest is not None:
        own = sizes_of(manifest)
        if (own.expert_bytes, own.num_experts) != (sizes.expert_bytes, sizes.num_experts):
            raise FormatError(f"{file}: was recorded with another model than {path}: its layers or experts differ")
        sizes = own
    count = len(trace.passes)
    return ExpertUsage.of_trace(trace), sizes, f"{count:,} pass{'' if count == 1 else 'es'} recorded in {one_line(file.name)}"


def sizes_of(manifest: Any) -> Any:
    """expert_bytes and num_experts by layer."""
    layers = sorted(manifest.experts.items())
    return SimpleNamespace(
        expert_bytes={layer: entry.expert_bytes for layer, entry in layers},
        num_experts={layer: entry.num_experts for layer, entry in layers},
    )


def with_residents(shown: Any, sizes: Any, expert_cache: str | int) -> Any:
    """The map with what a cache of that size begins with: the pinned ones, then the hottest."""
    import dataclasses

    from libcolibri.expert_cache import would_hold
    from libcolibri.memory_plan import parse_budget

    budget = parse_budget(expert_cache).in_bytes(sizes.expert_bytes, sizes.num_experts)
    first = [*sorted(shown.pinned), *shown.usage.hottest_first()]
    held = would_hold(sizes, budget, sizes.num_experts_per_tok, first)
    return dataclasses.replace(shown, budget_bytes=budget, resident=frozenset(held))


def write_page(file: Path, shown: Any) -> None:
    """The HTML page, whole or not at all."""
    from libcolibri.atomic_file import write_atomically

    from ..expert_page import page

    try:
        write_atomically(file, page(shown).encode())
    except OSError as error:  # name the file that was asked for, not the one beside it
        raise OSError(error.errno, error.strerror, str(file)) from error


def _refuse(message: str) -> NoReturn:
    from libcolibri.errors import ConfigError

    raise ConfigError(message)
