"""What commands need of the other packages, as one object that a test replaces by fakes.

In: nothing.  Out: functions that import libcolibri or colibri_rag when called, not before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .paths import Home


def _open_engine(path: Path, **options: Any) -> Any:
    from libcolibri.engine import Engine

    return Engine.open(path, **options)


def _open_encoder(path: Path) -> Any:
    from libcolibri.encoder import Encoder

    return Encoder.open(path)


def _open_knowledge_base(folder: Path, encoder: Any, create: bool = False) -> Any:
    from colibri_rag import EncoderEmbedder, KnowledgeBase

    return KnowledgeBase.open(folder, EncoderEmbedder(encoder), create=create)


def _scope(path: str | None) -> Any:
    from colibri_rag.scope import Scope

    return None if path is None else Scope(path_prefix=path)


def _perplexity(engine: Any, token_ids: list[int], context_length: int, **options: Any) -> Any:
    from libcolibri.perplexity import perplexity

    return perplexity(engine, token_ids, context_length, **options)


def _verify(path: Path, on_progress: Callable[[str, int, int], None]) -> Any:
    from libcolibri.format import verify

    return verify(path, on_progress)


def _read_manifest(path: Path) -> Any:
    from libcolibri.format import read_manifest

    return read_manifest(path)


def _longest_context(manifest: Any) -> int:
    from libcolibri.models.registry import parse_config

    return parse_config(manifest.config).max_context_length


def _sampling(**fields: Any) -> Any:
    from libcolibri.sampler import SamplingParams

    return SamplingParams(**fields)


@dataclass(frozen=True)
class Services:
    """The functions behind the commands, and the user's folder."""

    open_engine: Callable[..., Any] = _open_engine
    open_encoder: Callable[[Path], Any] = _open_encoder
    open_knowledge_base: Callable[..., Any] = _open_knowledge_base
    scope: Callable[[str | None], Any] = _scope
    perplexity: Callable[..., Any] = _perplexity
    verify: Callable[..., Any] = _verify
    read_manifest: Callable[[Path], Any] = _read_manifest
    longest_context: Callable[[Any], int] = _longest_context  # of a manifest: what the model's positions allow
    sampling: Callable[..., Any] = _sampling
    home: Home = field(default_factory=Home.from_environment)
