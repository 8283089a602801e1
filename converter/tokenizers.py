"""Tokenizer files: copied from a folder, made from a rank file, or rebuilt from a GGUF file's metadata.

In:  a folder, or GGUF metadata
Out: file name -> contents, and the manifest's tokenizer entry
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from libcolibri.errors import SourceError, TokenizerError

COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "generation_config.json",
    "chat_template.jinja",
)
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.txt")
TEKKEN = "tekken.json"
RANK_FILES = ("tokenizer.model", "tiktoken.model", "*.tiktoken")
TEMPLATE_NAME = "chat_template.jinja"
NO_TOKENIZER_HINT = "converting without is possible (--no-tokenizer); the model then takes token ids only"


def files_from_folder(folder: Path) -> dict[str, bytes]:
    """Tokenizer files of a Hugging Face folder, the chat template in a file of its own."""
    files = {name: (folder / name).read_bytes() for name in COPIED if (folder / name).is_file()}
    if "tokenizer.json" not in files and (made := _files_from_ranks(folder, files.get("tokenizer_config.json"))):
        files = made | files
        files.pop("tokenizer.model", None)  # it was a rank file, or stands beside the tekken.json that was read
    if not any(name in files for name in VOCABULARIES):
        names = ", ".join((*VOCABULARIES, TEKKEN, *RANK_FILES[1:]))
        raise SourceError(f"{folder}: no tokenizer files ({names}): add them; {NO_TOKENIZER_HINT}")
    if TEMPLATE_NAME not in files and (template := _template_in_config(files.get("tokenizer_config.json"), folder)):
        files[TEMPLATE_NAME] = template.encode("utf-8")
    return files


def _files_from_ranks(folder: Path, config: bytes | None) -> dict[str, bytes]:
    """tokenizer.json and its configuration made from tekken.json or a rank file; {} when the folder has none."""
    from libcolibri.tokenizer_ranks import files_from_ranks, files_from_tekken, is_rank_file

    if (tekken := folder / TEKKEN).is_file():
        with _naming(tekken):
            return files_from_tekken(tekken.read_bytes())
    for path in [path for pattern in RANK_FILES for path in sorted(folder.glob(pattern))]:
        if is_rank_file(data := path.read_bytes()):
            with _naming(path):
                return files_from_ranks(data, _listed_tokens(config))
    return {}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except TokenizerError as error:
        raise SourceError(f"{path}: {error}") from error


def _listed_tokens(config: bytes | None) -> dict[str, int]:
    """The added tokens that a tokenizer_config.json lists, with their ids."""
    try:
        listed = (json.loads(config) if config else {}).get("added_tokens_decoder") or {}
        return {str(token["content"]): int(i) for i, token in listed.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise TokenizerError(f"stands beside a tokenizer_config.json whose added_tokens_decoder cannot be read ({error})") from error


def _template_in_config(raw: bytes | None, folder: Path) -> str | None:
    """chat_template of tokenizer_config.json: text, or a list of named ones of which the default counts."""
    if raw is None:
        return None
    try:
        template = json.loads(raw).get("chat_template")
    except (ValueError, AttributeError, RecursionError) as error:
        raise SourceError(f"{folder / 'tokenizer_config.json'}: not a JSON object ({error}): the file is damaged") from error
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def files_from_gguf(path: Path, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Tokenizer files rebuilt from a GGUF file's metadata."""
    if metadata.get("tokenizer.ggml.model", "none") == "none":
        raise SourceError(f"{path}: no tokenizer in it (tokenizer.ggml.model): {NO_TOKENIZER_HINT}")
    from libcolibri.tokenizer_build import chat_template_from_gguf, tokenizer_files_from_gguf

    files = dict(tokenizer_files_from_gguf(metadata))
    if template := chat_template_from_gguf(metadata):
        files[TEMPLATE_NAME] = template.encode("utf-8")
    return files


def manifest_entry(folder: Path) -> dict[str, Any]:
    """The manifest's tokenizer entry for the tokenizer files in `folder`."""
    from libcolibri.tokenizer_build import tokenizer_entry_from_folder

    return tokenizer_entry_from_folder(folder)
