"""Rank files (tiktoken's `*.tiktoken`, a `tokenizer.model` that is one, tekken.json) as a Hugging Face tokenizer.json.

In: the bytes of the file. Out: an equal tokenizer.json.
A rank file lists tokens in the order of their merging. It holds neither its split pattern nor its control tokens, so the
vocabulary is recognised by its size, and an unknown one is refused.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import TokenizerError
from .pre_tokenizers import PreTokenizer, pre_tokenizer_by_name
from .tokenizer_pieces import byte_alphabet

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


@dataclass(frozen=True, slots=True)
class _Known:
    """A published rank file. control: its control tokens, whose ids follow the ranks; pre: the name of its split pattern."""

    pre: str
    control: tuple[str, ...]
    nfc: bool = False
    bos: str | None = None
    eos: str | None = None


def _numbered(name: str, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"<|{name}_{number}|>" for number in numbers)


_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"),
    *("<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    *_numbered("reserved_special_token", range(2, 246)),
)
_LLAMA4 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
    *_numbered("text_post_train_reserved_special_token", range(6)),
    *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
    *_numbered("text_post_train_reserved_special_token", range(8, 69)),
    *("<|image_start|>", "<|image_end|>", *_numbered("vision_reserved_special_token", range(2))),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
    *(*_numbered("vision_reserved_special_token", range(2, 6)), "<|image|>", "<|vision_reserved_special_token_6|>", "<|patch|>"),
    *_numbered("vision_reserved_special_token", range(7, 1048)),
    *(*_numbered("reasoning_reserved_special_token", range(8)), "<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
)
_LLAMA4 += _numbered("reserved_special_token", range(2048 - len(_LLAMA4)))
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_numbered("extra", range(205)))
_QWEN35 = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>"),
    *("<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),
)
_KNOWN = {  # by the number of ranks
    128000: _Known("llama3", _LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>"),
    200000: _Known("llama4", _LLAMA4, bos="<|begin_of_text|>", eos="<|eot|>"),
    151643: _Known("qwen2", _QWEN, nfc=True, eos="<|im_end|>"),
    248044: _Known("qwen35", _QWEN35, nfc=True, eos="<|im_end|>"),
    199998: _Known("gpt-4o", ()),
    151329: _Known("glm4", ()),
    163584: _Known("kimi-k2", ()),
}
_TEKKEN_CONTROL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)  # of files that do not list them


def is_rank_file(data: bytes) -> bool:
    """Whether the bytes are tiktoken's format: a token in base64 and its rank on each line."""
    return _LINE.match(data) is not None


def files_from_ranks(data: bytes, listed: Mapping[str, int] | None = None) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json equal to a rank file.

    listed   control tokens and their ids where other files name them (tokenizer_config.json); those of the vocabulary otherwise
    Raises TokenizerError for a damaged file and for an unknown vocabulary.
    """
    ranks = _read_ranks(data)
    known = _KNOWN.get(len(ranks))
    if known is None:
        sizes = ", ".join(map(str, sorted(_KNOWN)))
        raise TokenizerError(
            f"is a rank file of {len(ranks)} tokens, whose split pattern is unknown (known: {sizes} tokens): add a tokenizer.json"
        )
    control = dict(listed or {}) or {token: len(ranks) + i for i, token in enumerate(known.control)}
    if not control:
        raise TokenizerError(f"is a rank file of {len(ranks)} tokens without its control tokens: add the model's tokenizer_config.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": known.bos is not None}
    config |= {key: token for key, token in (("bos_token", known.bos), ("eos_token", known.eos)) if token is not None}
    content = _tokenizer_json(ranks, control, pre_tokenizer_by_name(known.pre), known.nfc)
    return {"tokenizer.json": _json_bytes(content), "tokenizer_config.json": _json_bytes(config)}


def files_from_tekken(data: bytes) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json equal to Mistral's tekken.json. TokenizerError for a damaged file."""
    try:
        tekken = json.loads(data)
        config = tekken["config"]
        n_special, pattern = int(config["default_num_special_tokens"]), str(config["pattern"])
        n_ranks = int(config["default_vocab_size"]) - n_special
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in tekken["vocab"][:n_ranks]]
        listed = {str(entry["token_str"]): int(entry["rank"]) for entry in tekken.get("special_tokens") or ()}
    except (ValueError, KeyError, TypeError) as error:
        raise TokenizerError(f"is no tekken.json ({type(error).__name__}: {error}): expected config, vocab with token_bytes") from error
    if len(set(tokens)) != n_ranks:
        raise TokenizerError(f"has {len(set(tokens))} different tokens, expected {n_ranks}: the file is damaged")
    control = listed or {token: i for i, token in enumerate(_TEKKEN_CONTROL)}
    control |= {f"<SPECIAL_{i}>": i for i in set(range(n_special)).difference(control.values())}
    ranks = {token: n_special + rank for rank, token in enumerate(tokens)}
    content = _tokenizer_json(ranks, control, PreTokenizer((pattern,)), nfc=False)
    content["model"]["vocab"] |= control  # other readers number added tokens anew when they stand outside of the vocabulary
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    return {"tokenizer.json": _json_bytes(content), "tokenizer_config.json": _json_bytes(tokenizer_config)}


def _read_ranks(data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(f"is a damaged rank file: line {number} is {line[:40]!r}, expected base64 and a number") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"is a rank file whose ranks are not 0 to {len(ranks) - 1}: it is damaged")
    return ranks


def _tokenizer_json(ranks: Mapping[bytes, int], control: Mapping[str, int], pre: PreTokenizer, nfc: bool) -> dict[str, Any]:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    vocab = {"".join([letters[byte] for byte in token]): i for token, i in ranks.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "ignore_merges": True, "byte_fallback": False, "vocab": vocab, "merges": _merges(vocab)}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in sorted(control.items(), key=lambda item: item[1])],
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": pre.pre_tokenizer(),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _merges(vocab: Mapping[str, int]) -> list[str]:
    """Every way to make a token of two others, in the order of the tokens' ranks."""
    merges = []
    for token in sorted(vocab, key=vocab.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [(vocab[left], vocab[right], left, right) for left, right in halves if left in vocab and right in vocab]
        merges += [f"{left} {right}" for _, _, left, right in sorted(found)]
    return merges


def _json_bytes(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()
