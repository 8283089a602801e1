"""Words to token ids: byte-pair encoding and WordPiece.

In: a vocabulary and merges. Out: the ids of a word; words that come again are looked up.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import regex

from .errors import TokenizerError
from .tokenizer_pieces import METASPACE
from .word_cache import WordCache

_NO_MERGE = 1 << 62
_LONG_WORD_TOK = 100  # from here on a heap is faster than looking through all pairs


class WordModel(Protocol):
    """Gives the ids of one word."""

    def ids_of(self, word: str) -> Sequence[int]: ...


class Merges:
    """Merging pairs of neighbouring tokens, the best ranked pair first, the leftmost of equal ones.

    merges   best first, each "left right" or [left, right]; TokenizerError for anything else, and when `vocab` lacks a result
    """

    def __init__(self, merges: Sequence[Any], vocab: Collection[str]):
        # Half a million merges are kept as they come, in one table of strings: anything else doubles the time to load.
        self._between = " "
        try:
            keys = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
            if any(key.count(" ") != 1 for key in keys):  # tokens that hold a space come as pairs
                self._between = "\0"
                keys = ["\0".join(_pair(merge)) for merge in merges]
        except TypeError as error:
            raise TokenizerError(f"has malformed merges, expected 'left right' or pairs of tokens ({error})") from error
        if (lost := next((key for key in keys if key.replace(self._between, "", 1) not in vocab), None)) is not None:
            raise TokenizerError(f"has the merge {lost[:60]!r}, whose result is not in its vocabulary: the file is damaged")
        self._rank_of = dict(zip(keys, range(len(keys)), strict=True)).get

    def apply(self, tokens: list[str]) -> list[str]:
        """The tokens left when no pair can be merged any more; may change `tokens`."""
        return self._apply_to_short(tokens) if len(tokens) < _LONG_WORD_TOK else self._apply_to_long(tokens)

    def _apply_to_short(self, tokens: list[str]) -> list[str]:
        rank_of, between = self._rank_of, self._between
        ranks = [rank_of(left + between + right, _NO_MERGE) for left, right in pairwise(tokens)]
        while ranks:
            best = min(ranks)
            if best == _NO_MERGE:
                break
            at = ranks.index(best)
            tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]
            del ranks[at]
            if at:
                ranks[at - 1] = rank_of(tokens[at - 1] + between + tokens[at], _NO_MERGE)
            if at < len(ranks):
                ranks[at] = rank_of(tokens[at] + between + tokens[at + 1], _NO_MERGE)
        return tokens

    def _apply_to_long(self, tokens: list[str]) -> list[str]:
        """The same with a heap of (rank, position); pairs that changed since they were pushed are passed over."""
        n, rank_of, between = len(tokens), self._rank_of, self._between
        following, previous = [*range(1, n), -1], [*range(-1, n - 1)]
        ranks = [rank_of(left + between + right) for left, right in pairwise(tokens)]
        heap = [rank * n + at for at, rank in enumerate(ranks) if rank is not None]
        heapq.heapify(heap)
        while heap:
            rank, at = divmod(heapq.heappop(heap), n)
            right = following[at]
            if right < 0 or not tokens[at] or rank_of(tokens[at] + between + tokens[right]) != rank:
                continue
            tokens[at], tokens[right] = tokens[at] + tokens[right], ""
            after, before = following[right], previous[at]
            following[at], following[right] = after, -1
            if after >= 0:
                previous[after] = at
                if (new := rank_of(tokens[at] + between + tokens[after])) is not None:
                    heapq.heappush(heap, new * n + at)
            if before >= 0 and (new := rank_of(tokens[before] + between + tokens[at])) is not None:
                heapq.heappush(heap, new * n + before)
        return [token for token in tokens if token]


def _pair(merge: Any) -> Sequence[str]:
    if isinstance(merge, str) or len(merge) != 2:
        raise TokenizerError(f"has the merge {str(merge)[:60]!r}, expected two tokens")
    return merge


class BpeModel:
    """Byte-pair encoding of words spelled as the vocabulary is.

    whole_words    a word that is a token is taken without merging ("ignore_merges")
    unknown        the token for a character that has none; None leaves it out
    fuse_unknown   one unknown token for a run of such characters
    byte_fallback  the tokens <0x00> to <0xFF> for the bytes of such a character, where the vocabulary has them all
    hidden         ids no word may become as a whole (control tokens)
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Merges,
        *,
        whole_words: bool = False,
        unknown: str | None = None,
        fuse_unknown: bool = False,
        byte_fallback: bool = False,
        hidden: frozenset[int] = frozenset(),
    ):
        self._vocab, self._merges, self._whole_words, self._hidden = vocab, merges, whole_words, hidden
        self._unknown = unknown if unknown in vocab else None
        self._fuse_unknown, self._byte_fallback = fuse_unknown, byte_fallback
        self._letters = {token for token in vocab if len(token) == 1}
        self._seen = WordCache()

    def ids_of(self, word: str) -> Sequence[int]:
        """Ids of one word."""
        return self._seen.get(word, self._encode)

    def _encode(self, word: str) -> Sequence[int]:
        if self._whole_words and (whole := self._vocab.get(word)) is not None and whole not in self._hidden:
            return (whole,)
        tokens = list(word) if self._letters.issuperset(word) else list(self._with_unknown(word))
        return [self._vocab[token] for token in self._merges.apply(tokens)]

    def _with_unknown(self, word: str) -> Iterable[str]:
        fused = False  # whether the last token is an unknown one to which the next unknown character belongs
        for letter in word:
            spelled = [letter] if letter in self._letters else self._bytes_of(letter)
            if spelled:
                yield from spelled
            elif self._unknown is not None and not fused:
                yield self._unknown
            fused = not spelled and self._fuse_unknown

    def _bytes_of(self, letter: str) -> list[str]:
        spelled = [f"<0x{byte:02X}>" for byte in letter.encode()] if self._byte_fallback else []
        return spelled if all(token in self._vocab for token in spelled) else []


def word_starts(vocab: Collection[str]) -> "regex.Pattern[str] | None":
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

    def __init__(self, vocab: Mapping[str, int], unknown: str | None, longest_word: int, hidden: frozenset[int]):
        unknown_id = vocab.get(unknown) if unknown is not None else None
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
