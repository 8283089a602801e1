"""Words to token ids: byte-pair encoding and WordPiece.

In: a vocabulary and merges. Out: the ids of a word; words that come again are looked up.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol

import regex

from .errors import TokenizerError
from .tokenizer_pieces import METASPACE

_NO_MERGE = 1 << 62
_LONG_WORD_TOK = 100  # from here on a heap is faster than looking through all pairs
_KEPT_WORDS, _KEPT_WORD_CHARS = 100_000, 64


class WordModel(Protocol):
    """Gives the ids of one word."""

    def ids_of(self, word: str) -> Sequence[int]: ...


class Merges:
    """Merging pairs of neighbouring tokens, the best ranked pair first, the leftmost of equal ones.

    pairs   (left token, right token), best first
    vocab   token -> id; TokenizerError for a pair whose tokens or result it does not have
    """

    def __init__(self, pairs: Sequence[Sequence[str]], vocab: Mapping[str, int]):
        self._base = base = max(vocab.values(), default=0) + 1
        try:
            left_ids, right_ids = [vocab[left] for left, _ in pairs], [vocab[right] for _, right in pairs]
            self._results = [vocab[left + right] for left, right in pairs]
        except KeyError as error:
            raise TokenizerError(f"merges into or from the token {str(error.args[0])[:40]!r}, which its vocabulary does not have") from error
        except (TypeError, ValueError) as error:
            raise TokenizerError(f"has malformed merges, expected pairs of tokens ({error})") from error
        ranks = {left * base + right: rank for rank, (left, right) in enumerate(zip(left_ids, right_ids, strict=True))}
        self._rank_of = ranks.get

    def apply(self, ids: list[int]) -> list[int]:
        """The ids left when no pair can be merged any more; may change `ids`."""
        return self._apply_to_short(ids) if len(ids) < _LONG_WORD_TOK else self._apply_to_long(ids)

    def _apply_to_short(self, ids: list[int]) -> list[int]:
        rank_of, base = self._rank_of, self._base
        ranks = [rank_of(left * base + right, _NO_MERGE) for left, right in zip(ids, ids[1:], strict=False)]
        while ranks:
            best = min(ranks)
            if best == _NO_MERGE:
                break
            at = ranks.index(best)
            ids[at : at + 2] = [self._results[best]]
            del ranks[at]
            if at:
                ranks[at - 1] = rank_of(ids[at - 1] * base + ids[at], _NO_MERGE)
            if at < len(ranks):
                ranks[at] = rank_of(ids[at] * base + ids[at + 1], _NO_MERGE)
        return ids

    def _apply_to_long(self, ids: list[int]) -> list[int]:
        """The same with a heap of (rank, position); pairs that changed since they were pushed are passed over."""
        n, base, rank_of = len(ids), self._base, self._rank_of
        following, previous = [*range(1, n), -1], [*range(-1, n - 1)]
        heap = [
            rank * n + at
            for at, (left, right) in enumerate(zip(ids, ids[1:], strict=False))
            if (rank := rank_of(left * base + right, _NO_MERGE)) != _NO_MERGE
        ]
        heapq.heapify(heap)
        while heap:
            rank, at = divmod(heapq.heappop(heap), n)
            right = following[at]
            if right < 0 or ids[at] < 0 or rank_of(ids[at] * base + ids[right]) != rank:
                continue
            ids[at], ids[right] = self._results[rank], -1
            after, before = following[right], previous[at]
            following[at] = after
            if after >= 0:
                previous[after] = at
                if (new := rank_of(ids[at] * base + ids[after])) is not None:
                    heapq.heappush(heap, new * n + at)
            if before >= 0 and (new := rank_of(ids[before] * base + ids[at])) is not None:
                heapq.heappush(heap, new * n + before)
        return [i for i in ids if i >= 0]


class BpeModel:
    """Byte-pair encoding of words spelled as the vocabulary is.

    whole_words   a word that is a token is taken without merging ("ignore_merges")
    unknown_id    stands for a character without a token; None leaves it out
    fuse_unknown  one unknown token for a run of such characters
    byte_ids      ids of <0x00> to <0xFF> for the bytes of such characters, where the vocabulary has them all
    hidden        ids no word may become as a whole (control tokens)
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Merges,
        *,
        whole_words: bool = False,
        unknown_id: int | None = None,
        fuse_unknown: bool = False,
        byte_ids: Sequence[int | None] | None = None,
        hidden: frozenset[int] = frozenset(),
    ):
        self._merges, self._unknown_id, self._fuse_unknown, self._byte_ids = merges, unknown_id, fuse_unknown, byte_ids
        self._letters = {token: i for token, i in vocab.items() if len(token) == 1}
        self._whole = {token: i for token, i in vocab.items() if i not in hidden} if whole_words and hidden else vocab if whole_words else None
        self._seen: dict[str, Sequence[int]] = {}

    def ids_of(self, word: str) -> Sequence[int]:
        """Ids of one word."""
        found = self._seen.get(word)
        if found is None:
            found = self._encode(word)
            if len(word) <= _KEPT_WORD_CHARS:
                if len(self._seen) >= _KEPT_WORDS:
                    self._seen.clear()
                self._seen[word] = found
        return found

    def _encode(self, word: str) -> Sequence[int]:
        if self._whole is not None and (whole := self._whole.get(word)) is not None:
            return (whole,)
        letters = self._letters
        try:
            ids = [letters[letter] for letter in word]
        except KeyError:
            ids = self._with_unknown(word)
        return self._merges.apply(ids)

    def _with_unknown(self, word: str) -> list[int]:
        ids: list[int] = []
        fused = False  # whether the last id is an unknown token to which the next unknown character belongs
        for letter in word:
            if (known := self._letters.get(letter)) is not None:
                ids.append(known)
                fused = False
            elif (spelled := self._bytes_of(letter)) is not None:
                ids += spelled
                fused = False
            elif self._unknown_id is not None and not fused:
                ids.append(self._unknown_id)
                fused = self._fuse_unknown
        return ids

    def _bytes_of(self, letter: str) -> list[int] | None:
        if self._byte_ids is None:
            return None
        ids = [self._byte_ids[byte] for byte in letter.encode()]
        return None if None in ids else [i for i in ids if i is not None]


def word_starts(vocab: Mapping[str, int]) -> "regex.Pattern[str] | None":
    """Where a text in which U+2581 stands for a space may be cut without a change of its ids; None if nowhere.

    No merge reaches across a place where no token holds the two characters beside it next to each other. So a text may be cut
    before a U+2581, unless the character before it precedes one inside of some token.
    """
    if METASPACE not in vocab:
        return None
    inside = {part[-1:] for part in "\0".join(vocab).split(METASPACE)[:-1]}  # "\0" stands between tokens, and is never cut after
    before = "".join(map(regex.escape, sorted({METASPACE, "\0", *inside} - {""})))
    return regex.compile(f"(?<=[^{before}])(?={METASPACE})")


class WordPieceModel:
    """Greedy longest prefixes; `##` continues a word. A word with a part that has no token is unknown as a whole."""

    def __init__(self, vocab: Mapping[str, int], unknown_id: int | None, longest_word: int, hidden: frozenset[int]):
        self._vocab = {token: i for token, i in vocab.items() if i not in hidden or i == unknown_id}
        self._unknown: tuple[int, ...] = () if unknown_id is None else (unknown_id,)
        self._longest_word = longest_word
        self._longest_token = max(map(len, self._vocab), default=0)

    def ids_of(self, word: str) -> Sequence[int]:
        """Ids of one word."""
        if len(word) > self._longest_word:
            return self._unknown
        ids, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(min(len(word), start + self._longest_token), start, -1):
                if (found := self._vocab.get(prefix + word[start:end])) is not None:
                    ids.append(found)
                    start = end
                    break
            else:
                return self._unknown
        return ids
