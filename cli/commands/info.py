"""`colibri info`: what a model directory holds.

In: a model directory.  Out: kind, family, sizes, tensor types, experts, tokenizer, source.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import click

from ..errors import reports_errors
from ..options import command, json_option
from ..services import Services
from ..text import neutralise, readable_bytes, to_json
from .verify import describe_files

SHAPE_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings",
)  # fmt: skip


@command(name="info")
@click.argument("model")
@json_option
@click.pass_context
@reports_errors
def info(ctx: click.Context, model: str, as_json: bool) -> None:
    """Show what MODEL holds: family, shape, tensor types, experts, tokenizer, where it came from."""
    services = ctx.obj or Services()
    path = services.home.model(model)
    facts = summarise(path, services.read_manifest(path))
    if as_json:
        click.echo(to_json(facts))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        click.echo(neutralise(f"{name:<{width}}  {_readable(value)}"))


def summarise(path: Path, manifest: Any) -> dict[str, Any]:
    """The manifest's facts, in the order in which they are shown."""
    files = describe_files(manifest)
    types = Counter(entry["type"] for entry in manifest.tensors.values())
    facts: dict[str, Any] = {
        "model": str(path),
        "kind": manifest.kind,
        "family": manifest.family,
        "format": manifest.format_version,
        "quantization": (manifest.quantization or {}).get("recipe"),
        "size": readable_bytes(sum(files.values())),
        "files": len(files),
        "tensor types": ", ".join(f"{count} x {name}" for name, count in types.most_common()),
    }
    facts |= {key: manifest.config[key] for key in SHAPE_KEYS if manifest.config.get(key) is not None}
    facts |= {"expert layers": _experts(manifest.experts), "tokenizer": (manifest.tokenizer or {}).get("file")}
    facts |= {"source": (manifest.source or {}).get("name"), "converter": manifest.converter_version}
    return {name: value for name, value in facts.items() if value is not None}


def _experts(experts: dict[str, Any] | None) -> str | None:
    """'24 layers, 60 experts of 8.3 MB (q4_k, q4_k, q6_k)', from the first layer's entry."""
    if not experts:
        return None
    first = next(iter(experts.values()))
    types = ", ".join(first[part]["type"] for part in ("gate_proj", "up_proj", "down_proj"))
    return f"{len(experts)} layers, {first['num_experts']} experts of {readable_bytes(first['expert_bytes'])} ({types})"


def _readable(value: Any) -> str:
    return f"{value}" if not isinstance(value, list) else ", ".join(map(str, value))
