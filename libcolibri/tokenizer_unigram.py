"""Unigram vocabularies of a Hugging Face tokenizer.json: their character map, and the words' most probable pieces.

In: the parsed file. Out: a normalizer, a model of words; TokenizerError for what is malformed.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import regex

from .errors import TokenizerError
from .word_cache import WordCache

_UNKNOWN_PENALTY = 10.0  # how much less likely than the rarest token an unknown character is
_CLUSTER_BYTES = 6  # shorter clusters of a letter and its marks are looked up as a whole


class CharacterMap:
    """A "Precompiled" normalizer: sentencepiece's map of characters, applied as Hugging Face tokenizers do.

    A cluster of a letter and its marks is looked up as a whole when it is short, then character by character. What is looked up
    is replaced as a whole, by what the map has for its shortest beginning, so that rare clusters lose a mark: the models' own
    training had the same.

    data            the size of a double-array trie over UTF-8 (darts-clone), the trie, the zero-terminated replacements
    per_character   no clusters: each character by itself
    """

    def __init__(self, data: bytes, per_character: bool = False):
        size = int.from_bytes(data[:4], "little")
        if size % 4 or not 4 <= size <= len(data) - 4:
            raise TokenizerError(f"has a character map whose trie is {size} bytes of {len(data)}: the file is damaged")
        self._units: list[int] = np.frombuffer(data, "<u4", size // 4, 4).tolist()
        self._texts = data[4 + size :]
        self._parts = regex.compile(r"." if per_character else r"\X", regex.DOTALL)
        self._seen: dict[str, str] = {}

    @classmethod
    def from_step(cls, step: Mapping[str, Any]) -> "CharacterMap":
        """From a normalizer of the type Precompiled."""
        try:
            data = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
        except (ValueError, TypeError) as error:
            raise TokenizerError(f"has a character map that is not base64 ({error})") from error
        return cls(data, bool(step.get("per_character")))

    def __call__(self, text: str) -> str:
        return "".join([self._of_cluster(cluster) for cluster in self._parts.findall(text)])

    def _of_cluster(self, cluster: str) -> str:
        found = self._seen.get(cluster)
        if found is None:
            whole = self._replacement(cluster) if len(cluster.encode()) < _CLUSTER_BYTES else None
            found = "".join([self._of_character(character) for character in cluster]) if whole is None else whole
            if len(self._seen) < 1 << 16:
                self._seen[cluster] = found
        return found

    def _of_character(self, character: str) -> str:
        found = self._replacement(character)
        return character if found is None else found

    def _replacement(self, text: str) -> str | None:
        """What the map has for the shortest beginning of a text, None when it has nothing."""
        units = self._units
        at = _offset(units[0])
        for byte in text.encode():
            at ^= byte
            if byte == 0 or at >= len(units) or units[at] & 0x800000FF != byte:
                return None
            unit = units[at]
            at ^= _offset(unit)
            if unit >> 8 & 1 and at < len(units):
                start = units[at] & 0x7FFFFFFF
                return self._texts[start : self._texts.find(b"\0", start)].decode("utf-8", "replace")
        return None


def _offset(unit: int) -> int:
    """Where a unit's children begin, relative to the unit."""
    return (unit >> 10) << ((unit & 1 << 9) >> 6)


class UnigramModel:
    """The most probable pieces of a word: the path of the highest sum of scores, the first found of equal ones.

    vocab    [token, score] by id; control ids no word may reach
    unk_id   stands for a run of characters without a token, unless byte_fallback has tokens <0x00> to <0xFF> for all its bytes
    """

    def __init__(self, model: Mapping[str, Any], control_ids: frozenset[int]):
        vocab: Sequence[tuple[str, float]] = model["vocab"]
        unk_id = model.get("unk_id")
        if not isinstance(unk_id, int) or not 0 <= unk_id < len(vocab):
            raise TokenizerError(f"has a Unigram model with unk_id {unk_id!r}, expected the id of a token")
        self._unk_id = unk_id
        self._pieces = {piece: (score, i) for i, (piece, score) in enumerate(vocab) if i not in control_ids}
        self._longest = max(map(len, self._pieces), default=0)
        self._unk_score = min(score for _, score in vocab) - _UNKNOWN_PENALTY
        self._byte_fallback = bool(model.get("byte_fallback"))
        self._seen = WordCache()

    def ids_of(self, word: str) -> Sequence[int]:
        """Ids of one word."""
        return self._seen.get(word, self._encode)

    def _encode(self, word: str) -> Sequence[int]:
        ids: list[int] = []
        unknown = ""
        for i, text in self._best_path(word):
            if i == self._unk_id:
                unknown += text
                continue
            ids += [*self._unknown_ids(unknown), i]
            unknown = ""
        return [*ids, *self._unknown_ids(unknown)]

    def _best_path(self, word: str) -> Iterator[tuple[int, str]]:
        """(id, text) of the pieces."""
        n, pieces, longest = len(word), self._pieces, self._longest
        scores: list[float | None] = [0.0, *[None] * n]  # of the best path that ends before a character
        steps = [(0, self._unk_id)] * (n + 1)  # where its last piece starts, and the piece
        for start in range(n):
            before = scores[start]
            assert before is not None  # every character has a path: the unknown one
            known = False  # whether the character by itself is a piece
            for end in range(start + 1, min(n, start + longest) + 1):
                if (found := pieces.get(word[start:end])) is not None:
                    known |= end == start + 1
                    here = scores[end]
                    if here is None or found[0] + before > here:
                        scores[end], steps[end] = found[0] + before, (start, found[1])
            here = scores[start + 1]
            if not known and (here is None or self._unk_score + before > here):
                scores[start + 1], steps[start + 1] = self._unk_score + before, (start, self._unk_id)
        path, end = [], n
        while end > 0:
            start, i = steps[end]
            path.append((i, word[start:end]))
            end = start
        return reversed(path)

    def _unknown_ids(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        if self._byte_fallback:
            found = [self._pieces.get(f"<0x{byte:02X}>") for byte in text.encode()]
            if None not in found:
                return [piece[1] for piece in found if piece is not None]
        return (self._unk_id,)
