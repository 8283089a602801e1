"""A Unigram vocabulary as the bytes of a SentencePiece .model, so that the sentencepiece library does the encoding.

In: tokens, scores, normalisation. Out: a ModelProto (field numbers from sentencepiece_model.proto).
"""

import struct
from collections.abc import Sequence

import sentencepiece

from .errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM = 1


def unigram_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    charsmap: bytes | None = None,
    add_space_prefix: bool = True,
    collapse_spaces: bool = True,
) -> bytes:
    """A Unigram .model (XLM-RoBERTa, T5).

    pieces, scores, types : by id; tokens spelled with U+2581, log probabilities, SentencePiece's types (one UNKNOWN)
    charsmap : the precompiled character map; None takes the library's nmt_nfkc, b"" normalises nothing
    add_space_prefix : text starts with a space
    collapse_spaces : several spaces count as one, those at the ends as none
    """
    if not len(pieces) == len(scores) == len(types):
        raise TokenizerError(
            f"a Unigram vocabulary has {len(pieces)} tokens, {len(scores)} scores and {len(types)} types: expected as many of each"
        )
    if (unknown := list(types).count(UNKNOWN)) != 1:
        raise TokenizerError(f"a Unigram vocabulary has {unknown} unknown tokens, expected one")
    if charsmap is None:
        charsmap = _field_of(sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_normalizer_spec(), 2)
    vocabulary = b"".join(
        _bytes(1, _bytes(1, piece.encode("utf-8", "replace")) + _float(2, score) + _int(3, kind))
        for piece, score, kind in zip(pieces, scores, types, strict=True)
    )
    trainer = _int(3, _UNIGRAM)
    normalizer = _bytes(2, charsmap) + _int(3, add_space_prefix) + _int(4, collapse_spaces) + _int(5, 1)
    return vocabulary + _bytes(2, trainer) + _bytes(3, normalizer)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _field_of(message: bytes, wanted: int) -> bytes:
    """The first length-delimited field of that number in a message of such fields only."""
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        length, place = _read_varint(message, place)
        if key == wanted << 3 | 2:
            return message[place : place + length]
        place += length
    raise TokenizerError(f"the sentencepiece library gave a normaliser without field {wanted}; install sentencepiece 0.2 or newer")


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while message[place] & 0x80:
        value |= (message[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | message[place] << shift, place + 1
