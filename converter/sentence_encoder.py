"""How a sentence encoder turns hidden states into one vector, as a sentence-transformers folder states it.

In:  a Hugging Face folder of an encoder
Out: the manifest's config["encoder"]; SourceError for a pooling or module without equations here
"""

import re
from pathlib import Path
from typing import Any

from libcolibri.errors import FormatError, SourceError
from libcolibri.safetensors_header import strict_json

POSITION_OFFSET = {"bert": 0, "xlm-roberta": 2}  # XLM-RoBERTa counts positions from padding_idx + 1
_MODULES = ("Transformer", "Pooling", "Normalize")
_E5_NAME = re.compile(r"(^|[-_/])e5([-_]|$)", re.IGNORECASE)


def encoder_settings(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """pooling ("mean" or "cls"), normalize, max_tok, query_prefix, passage_prefix; the defaults are mean, normalised, no prefix."""
    modules = _module_types(folder)
    if unknown := [name for name in modules if name not in _MODULES]:
        raise SourceError(f"{folder / 'modules.json'}: module {unknown[0][:40]!r} is not supported, only {', '.join(_MODULES)}")
    query, passage = _prefixes(folder, config)
    return {
        "pooling": _pooling(folder),
        "normalize": True,  # cosine similarity is what the knowledge base ranks by
        "max_tok": _max_tok(folder, config),
        "query_prefix": query,
        "passage_prefix": passage,
    }


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, {} for a missing file."""
    if not path.is_file():
        return {}
    try:
        return strict_json(path.read_bytes(), str(path))
    except FormatError as error:
        raise SourceError(str(error)) from error


def _module_types(folder: Path) -> list[str]:
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = strict_json(b'{"modules":' + path.read_bytes() + b"}", str(path))["modules"]
    except FormatError as error:
        raise SourceError(str(error)) from error
    if not isinstance(modules, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules):
        raise SourceError(f"{path}: expected a list of modules, each with a type: the file is damaged")
    return [module["type"].rsplit(".", 1)[-1] for module in modules]


def _pooling(folder: Path) -> str:
    modes = [key for key, value in _json(folder / "1_Pooling" / "config.json").items() if key.startswith("pooling_mode_") and value is True]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if not modes:
        return "mean"
    if len(modes) > 1 or modes[0] not in known:
        raise SourceError(f"{folder / '1_Pooling'}: {' with '.join(modes)} is not supported, only {' or '.join(known)}")
    return known[modes[0]]


def _max_tok(folder: Path, config: dict[str, Any]) -> int:
    positions = config.get("max_position_embeddings")
    limit = positions - POSITION_OFFSET[config["model_type"]] if isinstance(positions, int) else 0
    wanted = _json(folder / "sentence_bert_config.json").get("max_seq_length")
    return min(wanted, limit) if isinstance(wanted, int) and wanted > 0 else limit


def _prefixes(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """Prompts as the folder states them; E5 models need theirs and mostly state none, so they go by the name."""
    prompts = _json(folder / "config_sentence_transformers.json").get("prompts")
    if isinstance(prompts, dict) and prompts:
        query, passage = prompts.get("query", ""), prompts.get("passage", prompts.get("document", ""))
        if isinstance(query, str) and isinstance(passage, str) and (query or passage):
            return query, passage
    names = (str(config.get("_name_or_path", "")), folder.resolve().name)
    return ("query: ", "passage: ") if any(_E5_NAME.search(name) for name in names) else ("", "")
