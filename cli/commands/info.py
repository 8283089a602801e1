"""`colibri info`: what a model directory holds.

In: a model directory, or nothing.  Out: kind, family, sizes, tensor types, experts, tokenizer, source; or a list of the models there are.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import click

from ..errors import reports_errors, user_message
from ..options import command, json_option
from ..services import Services
from ..text import neutralise, one_line, readable_bytes, to_json

SHAPE_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings",
)  # fmt: skip


@command(name="info")
@click.argument("model", required=False)
@json_option
@click.pass_context
@reports_errors
def info(ctx: click.Context, model: str | None, as_json: bool) -> None:
    """Show what MODEL holds: family, shape, tensor types, experts, tokenizer, where it came from.

    Without MODEL, list the models in the user's folder.
    """
    services = ctx.obj or Services()
    if model is None:
        list_models(services, as_json)
        return
    path = services.home.model(model)
    facts = summarise(path, services.read_manifest(path))
    if as_json:
        click.echo(to_json(facts))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        click.echo(neutralise(f"{name:<{width}}  {_readable(value)}"))


def list_models(services: Services, as_json: bool) -> None:
    """One line for each model in the user's folder; one that cannot be read is listed with the reason."""
    from libcolibri.errors import ColibriError

    entries: list[dict[str, Any]] = []
    for path in services.home.model_directories():
        try:
            entries.append({"name": path.name, **summarise(path, services.read_manifest(path))})
        except (ColibriError, OSError) as error:
            entries.append({"name": path.name, "model": str(path), "error": user_message(error)})
    if as_json:
        click.echo(to_json({"folder": str(services.home.models), "models": entries}))
        return
    if not entries:
        click.echo(neutralise(f"no models in {services.home.models}: `python3 bootstrap.py demo` or `colibri-convert` makes one"))
    width = max((len(entry["name"]) for entry in entries), default=0)
    for entry in entries:
        shown = entry.get("error") or ", ".join(str(entry[key]) for key in ("kind", "family", "quantization", "size") if key in entry)
        click.echo(f"{one_line(entry['name']):<{width}}  {one_line(shown)}")


def summarise(path: Path, manifest: Any) -> dict[str, Any]:
    """The manifest's facts, in the order in which they are shown; what is not there is left out."""
    types = Counter(entry.type for entry in manifest.tensors.values())
    facts: dict[str, Any] = {
        "model": str(path),
        "kind": manifest.kind,
        "family": manifest.family,
        "format": manifest.format_version,
        "quantization": manifest.quantization.get("recipe"),
        "size": readable_bytes(sum(entry.bytes for entry in manifest.files.values())),
        "files": len(manifest.files),
        "tensor types": ", ".join(f"{count} x {name}" for name, count in types.most_common()),
        "expert layers": _experts(manifest.experts),
    }
    facts |= {key: manifest.config.get(key) for key in SHAPE_KEYS}
    facts |= {"tokenizer": (manifest.tokenizer or {}).get("file"), "source": manifest.source.get("name")}
    facts |= {"converter": manifest.converter_version}
    return {name: value for name, value in facts.items() if value is not None}


def _experts(experts: dict[int, Any]) -> str | None:
    """'24 layers of 60 experts, 8.3 MB each (q4_k, q4_k, q6_k)'; widths may differ by layer, so each kind of layer is listed."""
    kinds = Counter(
        (entry.num_experts, entry.expert_bytes, ", ".join(part.type for part in entry.parts.values())) for entry in experts.values()
    )
    parts = [f"{layers} layers of {count} experts, {readable_bytes(size)} each ({types})" for (count, size, types), layers in kinds.items()]
    return "; ".join(parts) or None


def _readable(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
