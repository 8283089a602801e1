"""Tokenizer files from a GGUF file's metadata, and the manifest entry that describes a tokenizer.

In: GGUF metadata, or a folder with tokenizer files. Out: the bytes of tokenizer.json and its companions; a manifest entry.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TokenizerError
from .pre_tokenizers import pre_tokenizer_by_name
from .sentencepiece_model import unigram_model
from .tokenizer import Tokenizer
from .tokenizer_json import parse_tokenizer_json
from .tokenizer_pieces import METASPACE
from .tokenizer_sentencepiece import added_tokens_beside

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_FILES = ("tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model")

# Tokens that end a turn whatever a checkpoint lists as its end token; only when they are added tokens of the vocabulary.
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<|eot|>"),
    *("<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_role|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|endofresponse|>"),
    *("<|return|>", "<|call|>"),
)


def tokenizer_files_from_gguf(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Files equal to the tokenizer inside a GGUF file: name -> content.

    tokenizer.json (tokenizer.model for t5), tokenizer_config.json and generation_config.json.

    metadata: GGUF keys with Python values, arrays as lists or numpy arrays, strings as str or bytes.
    Kinds: gpt2 (byte-level BPE), gemma4 (BPE over text), llama (SentencePiece BPE), t5 (Unigram), bert (WordPiece).
    Raises TokenizerError for others, for an unknown split pattern, and for incomplete vocabularies.
    """
    reader = _Metadata(metadata)
    kind = reader.text("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "gemma4": _text_bpe, "llama": _sentencepiece, "bert": _wordpiece}
    if kind not in builders and kind != "t5":
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}, supported are {', '.join(builders)} and t5")
    vocabulary = _Vocabulary(reader)
    if kind == "t5":
        content, add_bos = {"tokenizer.model": _unigram_file(reader, vocabulary)}, False
    else:
        parts, add_bos = builders[kind](reader, vocabulary)
        content = {"tokenizer.json": _json_bytes(_tokenizer_json(added_tokens=vocabulary.added_tokens(), **parts))}
    ends = [reader.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    generation = {"eos_token_id": list(dict.fromkeys(i for i in ends if i is not None))}
    config = _tokenizer_config(reader, vocabulary, add_bos)
    return content | {"tokenizer_config.json": _json_bytes(config), "generation_config.json": _json_bytes(generation)}


def chat_template_from_gguf(metadata: Mapping[str, Any]) -> str | None:
    """The chat template of a GGUF file, None when it has none."""
    value = metadata.get("tokenizer.chat_template")
    return None if value is None else _text(value)


def _json_bytes(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def _text(value: Any) -> str:
    """GGUF strings are UTF-8, but vocabularies hold single bytes now and then."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)


class _Metadata:
    """Typed access to GGUF metadata."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata

    def text(self, key: str) -> str:
        if key not in self._metadata:
            raise TokenizerError(f"the GGUF file has no {key}: it holds no tokenizer that can be rebuilt")
        return _text(self._metadata[key])

    def optional_text(self, key: str) -> str | None:
        return _text(self._metadata[key]) if key in self._metadata else None

    def texts(self, key: str) -> list[str]:
        if key not in self._metadata:
            raise TokenizerError(f"the GGUF file has no {key}: its tokenizer is incomplete")
        return [_text(value) for value in self._metadata[key]]

    def numbers(self, key: str, length: int) -> list[Any] | None:
        """An array of `length` numbers, None when the file has none."""
        if (value := self._metadata.get(key)) is None:
            return None
        found = np.asarray(value).tolist()
        if len(found) != length:
            raise TokenizerError(f"{key} has {len(found)} values for {length} tokens: the GGUF file is damaged")
        return found

    def integer(self, key: str) -> int | None:
        value = self._metadata.get(key)
        return None if value is None else int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key)
        return default if value is None else bool(value)

    def raw(self, key: str) -> bytes | None:
        value = self._metadata.get(key)
        return None if value is None else value if isinstance(value, bytes) else np.asarray(value).astype(np.uint8).tobytes()

    def merges(self) -> list[tuple[str, str]]:
        """Merges as pairs, from "left right" strings or from pairs. The separator is the first space that leaves two parts."""
        pairs = []
        for merge in self._metadata.get("tokenizer.ggml.merges", ()):
            if isinstance(merge, str | bytes):
                left, _, right = _text(merge)[1:].partition(" ")
                parts = [_text(merge)[:1] + left, right]
            else:
                parts = [_text(part) for part in merge]
            if len(parts) != 2 or not all(parts):
                raise TokenizerError(f"tokenizer.ggml.merges has the entry {str(merge)[:60]!r}, expected two tokens")
            pairs.append((parts[0], parts[1]))
        if not pairs:
            raise TokenizerError("the GGUF file has no tokenizer.ggml.merges: its BPE tokenizer is incomplete")
        return pairs


class _Vocabulary:
    """Tokens with their types; the lowest id wins where a token is listed twice."""

    def __init__(self, reader: _Metadata):
        self.tokens = reader.texts("tokenizer.ggml.tokens")
        n = len(self.tokens)
        self.types = reader.numbers("tokenizer.ggml.token_type", n) or [_NORMAL] * n
        self.unk_id = reader.integer("tokenizer.ggml.unknown_token_id")

    def ids(self) -> dict[str, int]:
        """token -> id without the unused ones, which no text may reach."""
        found: dict[str, int] = {}
        for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _UNUSED:
                found.setdefault(token, i)
        return found

    def added_tokens(self) -> list[dict[str, Any]]:
        return [
            _added(i, token, special=kind != _USER)
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER)
        ]

    def token(self, token_id: int | None) -> str | None:
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise TokenizerError(f"the GGUF file names the token id {token_id}, its vocabulary has {len(self.tokens)} tokens")
        return self.tokens[token_id]


def _added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def _tokenizer_json(*, model: Any, added_tokens: Any, decoder: Any, normalizer: Any = None, pre_tokenizer: Any = None) -> dict[str, Any]:
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens, "normalizer": normalizer}
    return head | {"pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model}


def _bpe_model(
    vocab: Any, merges: Any, *, unk_token: str | None = None, byte_fallback: bool = False, ignore_merges: bool = False
) -> dict[str, Any]:
    fixed = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    rules = {"unk_token": unk_token, "fuse_unk": byte_fallback, "byte_fallback": byte_fallback, "ignore_merges": ignore_merges}
    spaced = any(" " in left or " " in right for left, right in merges)  # such tokens need pairs; strings load in half the time
    return {**fixed, **rules, "vocab": vocab, "merges": [list(pair) if spaced else " ".join(pair) for pair in merges]}


def _byte_level(reader: _Metadata, vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    pre = pre_tokenizer_by_name(reader.text("tokenizer.ggml.pre"))
    model = _bpe_model(vocabulary.ids(), reader.merges(), ignore_merges=pre.ignore_merges)
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    parts = {"model": model, "normalizer": pre.normalizer(), "pre_tokenizer": pre.pre_tokenizer(), "decoder": decoder}
    return parts, pre.add_bos


def _text_bpe(reader: _Metadata, vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """Gemma 4: ranked merges over text with U+2581 for spaces, bytes where no token fits."""
    prefix = reader.flag("tokenizer.ggml.add_space_prefix", False)
    return _metaspace_bpe(vocabulary, reader.merges(), prefix), True


def _sentencepiece(reader: _Metadata, vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """SentencePiece BPE merges the pair whose result has the best score, so the scores put the merges in order."""
    scores = reader.numbers("tokenizer.ggml.scores", len(vocabulary.tokens))
    if scores is None:
        raise TokenizerError("the GGUF file has no tokenizer.ggml.scores: its SentencePiece tokenizer is incomplete")
    ids = vocabulary.ids()
    ranked = []
    for token, i in ids.items():
        if vocabulary.types[i] == _NORMAL:
            halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            ranked += [(-scores[i], ids[left], ids[right], left, right) for left, right in halves if left in ids and right in ids]
    prefix = reader.flag("tokenizer.ggml.add_space_prefix", True)
    return _metaspace_bpe(vocabulary, [pair[3:] for pair in sorted(ranked)], prefix), True


def _metaspace_bpe(vocabulary: _Vocabulary, merges: Sequence[Sequence[str]], prefix: bool) -> dict[str, Any]:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
    back = [{"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    unk = vocabulary.token(vocabulary.unk_id) or next(
        (t for t, k in zip(vocabulary.tokens, vocabulary.types, strict=True) if k == _UNKNOWN), None
    )
    return {
        "model": _bpe_model(vocabulary.ids(), merges, unk_token=unk, byte_fallback=_BYTE in vocabulary.types),
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": METASPACE}] * prefix + [spaces]},
        "decoder": {"type": "Sequence", "decoders": back + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix},
    }


def _unigram_file(reader: _Metadata, vocabulary: _Vocabulary) -> bytes:
    scores = reader.numbers("tokenizer.ggml.scores", len(vocabulary.tokens))
    if scores is None:
        raise TokenizerError("the GGUF file has no tokenizer.ggml.scores: its Unigram tokenizer is incomplete")
    return unigram_model(
        vocabulary.tokens,
        scores,
        vocabulary.types,  # GGUF took over SentencePiece's numbers
        charsmap=reader.raw("tokenizer.ggml.precompiled_charsmap") or b"",
        add_space_prefix=reader.flag("tokenizer.ggml.add_space_prefix", True),
        collapse_spaces=reader.flag("tokenizer.ggml.remove_extra_whitespaces", False),
    )


def _wordpiece(reader: _Metadata, vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """GGUF spells a word's start with U+2581 and its continuation plainly; WordPiece has "##" for a continuation."""
    vocab: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind != _NORMAL:
            spelled = token
        elif token.startswith(METASPACE):
            spelled = token[len(METASPACE) :]
        else:
            spelled = "##" + token
        vocab.setdefault(spelled, i)
    unk = vocabulary.token(vocabulary.unk_id) or "[UNK]"
    lowercase = reader.flag("tokenizer.ggml.normalizer.lowercase", True)
    accents = reader.flag("tokenizer.ggml.normalizer.strip_accents", lowercase)
    return {
        "model": {
            "type": "WordPiece",
            "unk_token": unk,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }, False


def _template_variants(reader: _Metadata) -> list[dict[str, str]]:
    """The chat templates of a file that has one for conversations with tools, as tokenizer_config.json lists them."""
    tool_use = reader.optional_text("tokenizer.chat_template.tool_use")
    default = reader.optional_text("tokenizer.chat_template")
    if tool_use is None or default is None:
        return []
    return [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]


def _tokenizer_config(reader: _Metadata, vocabulary: _Vocabulary, add_bos: bool) -> dict[str, Any]:
    bos = reader.integer("tokenizer.ggml.bos_token_id")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["add_bos_token"] = reader.flag("tokenizer.ggml.add_bos_token", add_bos) and bos is not None
    for name, key in (
        ("bos", "bos"),
        ("eos", "eos"),
        ("unk", "unknown"),
        ("pad", "padding"),
        ("sep", "seperator"),
        ("cls", "cls"),
        ("mask", "mask"),
    ):
        token = vocabulary.token(reader.integer(f"tokenizer.ggml.{key}_token_id"))
        if token is not None:
            config[f"{name}_token"] = token
    if variants := _template_variants(reader):
        config["chat_template"] = variants
    return config


def tokenizer_entry_from_folder(path: str | Path) -> dict[str, Any]:
    """The manifest's "tokenizer" entry for a folder with a Hugging Face tokenizer.

    Returns file, bos_token_id, eos_token_ids (end tokens of tokenizer, model and generation configuration, and the added
    tokens that end a chat turn), add_bos, and bos_token, eos_token, which chat templates write. Raises TokenizerError.
    """
    folder = Path(path)
    file = next(
        (name for name in ("tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model") if (folder / name).is_file()),
        None,
    )
    if file is None:
        other = [name for name in ("vocab.json", "vocab.txt") if (folder / name).is_file()]
        found = f"only {', '.join(other)}" if other else "none"
        raise TokenizerError(f"{folder}: expected tokenizer.json or tokenizer.model, found {found}; add the model's tokenizer.json")
    config, model_config, generation = (
        _json_object(folder / f"{name}.json") for name in ("tokenizer_config", "config", "generation_config")
    )
    ids, tokenizer = _special_ids(folder / file)
    bos = _token_text(config.get("bos_token"))
    eos = _token_text(config.get("eos_token"))
    bos_id = ids.get(bos) if bos is not None else _first_id(model_config.get("bos_token_id"))
    ends = [
        ids.get(eos) if eos is not None else None,
        *_id_list(generation.get("eos_token_id")),
        *_id_list(_nested(model_config, "eos_token_id")),
    ]
    # gpt-oss and Solar end a message with <|end|> and go on with the next channel; only other tokens end their turns.
    in_channels = "<|return|>" in ids or "<|content|>" in ids
    turn_ends = [token for token in _TURN_ENDS if token in ids and not (token == "<|end|>" and in_channels)]
    ends += [ids[token] for token in turn_ends]
    return {
        "file": file,
        "bos_token_id": bos_id,
        "eos_token_ids": list(dict.fromkeys(i for i in ends if i is not None)),
        "add_bos": bos_id is not None and _adds_bos(config, tokenizer, bos),
        "bos_token": bos,
        "eos_token": eos,
    }


def _json_object(path: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _special_ids(path: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """(spelling -> id of the tokens that may be special, the parsed tokenizer.json or {})."""
    if path.suffix != ".json":
        tokenizer = Tokenizer.from_sentencepiece(path.read_bytes(), added_tokens_beside(path.parent))
        return {token: i for i in range(tokenizer.vocab_size) if re.fullmatch(r"[<\[].*[>\]]", token := tokenizer.spelling(i) or "")}, {}
    try:
        parsed = parse_tokenizer_json(path.read_bytes())
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    return {token["content"]: token["id"] for token in parsed.get("added_tokens") or ()}, parsed


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json is a string or an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _nested(config: Mapping[str, Any], key: str) -> Any:
    """A key of config.json; models with several parts keep those of the language model in text_config."""
    text = config.get("text_config")
    return config.get(key, text.get(key) if isinstance(text, dict) else None)


def _id_list(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _first_id(value: Any) -> int | None:
    return next(iter(_id_list(value)), None)


def _adds_bos(config: Mapping[str, Any], tokenizer: Mapping[str, Any], bos: str | None) -> bool:
    """Whether prompts start with BOS: what tokenizer_config.json says, else what the post-processor does, else by class."""
    if isinstance(config.get("add_bos_token"), bool):
        return config["add_bos_token"]
    post = tokenizer.get("post_processor") or {}
    for step in post.get("processors") or [post]:
        if step.get("type") == "TemplateProcessing":
            first = (step.get("single") or [{}])[0]
            return bos is not None and first.get("SpecialToken", {}).get("id") == bos
    return str(config.get("tokenizer_class", "")).startswith(("Llama", "Gemma")) and not tokenizer
