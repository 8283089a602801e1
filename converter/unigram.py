"""Build a Hugging Face tokenizer.json for a SentencePiece unigram vocabulary with a character table of its own.

The table becomes a "Precompiled" normaliser: sentencepiece's charsmap, which is a double-array trie over UTF-8 bytes (the
darts-clone layout) followed by the zero-terminated replacements. Canonical composition follows, as in NFKC, because a table of
single characters cannot join a base letter with the accent after it.
"""

import base64
from collections.abc import Mapping, Sequence

import numpy as np

METASPACE = "\u2581"
LEAF_BIT, TERMINAL_BIT, LABEL_BYTE = 1 << 8, 1 << 31, 0xFF
OFFSET_LIMIT = 1 << 21


def unigram_tokenizer(
    pieces: Sequence[str], scores: np.ndarray, characters: Mapping[str, str], *, bos: int, eos: int, pad: int, unk: int
) -> dict:
    """The tokenizer.json of an XLM-RoBERTa style model: `<s> text </s>`, words begin with U+2581.

    pieces      in id order
    scores      (len(pieces),) float32, log probabilities
    characters  character -> replacement, applied before anything else
    """
    specials = [bos, eos, pad, unk] + [i for i, piece in enumerate(pieces) if piece == "<mask>"]
    charsmap = base64.b64encode(compile_charsmap(characters)).decode()
    metaspace = {"type": "Metaspace", "replacement": METASPACE, "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, pieces[i]) for i in sorted(specials)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Precompiled", "precompiled_charsmap": charsmap, "per_character": True}, {"type": "NFC"}],
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": _sentence_template(pieces, bos, eos),
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": unk,
            "vocab": [[piece, score] for piece, score in zip(pieces, scores.astype(np.float64).tolist(), strict=True)],
            "byte_fallback": False,
        },
    }


def _added_token(index: int, content: str) -> dict:
    flags = {"single_word": False, "lstrip": content == "<mask>", "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content} | flags


def _sentence_template(pieces: Sequence[str], bos: int, eos: int) -> dict:
    def special(index: int) -> dict:
        return {"SpecialToken": {"id": pieces[index], "type_id": 0}}

    def text(name: str) -> dict:
        return {"Sequence": {"id": name, "type_id": 0}}

    return {
        "type": "TemplateProcessing",
        "single": [special(bos), text("A"), special(eos)],
        "pair": [special(bos), text("A"), special(eos), special(eos), text("B"), special(eos)],
        "special_tokens": {pieces[i]: {"id": pieces[i], "ids": [i], "tokens": [pieces[i]]} for i in (bos, eos)},
    }


def compile_charsmap(characters: Mapping[str, str]) -> bytes:
    """sentencepiece's precompiled_charsmap: u32 trie bytes, the trie, the replacements, each ended by a zero byte."""
    texts, values, at = bytearray(), {}, 0
    for character, replacement in sorted(characters.items()):
        values[character.encode()] = at
        texts += replacement.encode() + b"\0"
        at = len(texts)
    trie = _double_array(values)
    return np.uint32(len(trie) * 4).tobytes() + trie.astype("<u4").tobytes() + bytes(texts)


def _double_array(values: Mapping[bytes, int]) -> np.ndarray:
    """A darts-clone trie: uint32 units; child `label` of the node at p with offset o lies at p ^ o ^ label.

    A unit holds its label in the low byte, bit 8 = a key ends here (its value is at child 0), and the offset in bits 10..30;
    a value unit holds the value and the top bit. The root is unit 0.
    """
    children: dict[bytes, set[int]] = {}
    for key in values:
        for length in range(len(key)):
            children.setdefault(key[:length], set()).add(key[length])
        children.setdefault(key, set()).add(0)
    units, used = np.zeros(256 * (len(children) + 2), np.uint32), bytearray(256 * (len(children) + 2))
    used[0] = 1
    bases = {0}  # no two nodes may share one, or each would find the other's children
    place = {b"": 0}
    searched = {True: 1, False: 1}  # by "only one child": such nodes fill the gaps that the others leave
    for prefix in sorted(children, key=lambda p: (len(p), p)):  # parents come before their children
        labels = sorted(children[prefix])
        base = searched[len(labels) == 1]
        while base in bases or any(used[base ^ label] for label in labels):
            base += 1
        bases.add(base)
        searched[len(labels) == 1] = base
        node = place[prefix]
        if node ^ base >= OFFSET_LIMIT:
            raise ValueError(f"a character table of {len(values)} entries does not fit a trie of {OFFSET_LIMIT} units")
        units[node] |= (node ^ base) << 10 | (LEAF_BIT if 0 in labels else 0)
        for label in labels:
            child = base ^ label
            used[child] = 1
            if label:
                units[child] = label
                place[prefix + bytes([label])] = child
            else:
                units[child] = TERMINAL_BIT | values[prefix]
    last = used.rindex(1)
    return units[: (last // 256 + 1) * 256]
