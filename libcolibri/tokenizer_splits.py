"""How a tokenizer cuts text into words: the "pre_tokenizer" of a Hugging Face tokenizer.json.

In: the parsed pre-tokenizer. Out: a function from text to words; TokenizerError names a kind that is not supported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from .errors import TokenizerError
from .tokenizer_normalizers import compile_pattern
from .tokenizer_pieces import METASPACE, byte_alphabet, steps
from .unicode_tables import PUNCTUATION

# word, whether the word begins the whole text -> words
Step = Callable[[str, bool], Sequence[str]]

_GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_DIGIT, _DIGITS = regex.compile(r"\p{N}"), regex.compile(r"\p{N}+")
_WORDS = regex.compile(r"\w+|[^\w\s]+")
_SPACE = regex.compile(r"\s")
_LETTERS_OF_BYTES = str.maketrans({byte: letter for letter, byte in byte_alphabet().items()})


def spell_bytes(word: str) -> str:
    """The UTF-8 bytes of a word in the byte alphabet."""
    return word.encode().decode("latin-1").translate(_LETTERS_OF_BYTES)


class Splitter:
    """Cuts text into words.

    spells_bytes   words are still to be spelled in the byte alphabet, the last step; left to the caller, who keeps words it has seen
    """

    def __init__(self, node: Any):
        self._steps: list[Step] = []
        parts = list(steps(node, "pretokenizers"))
        for part in parts:
            self._steps += _make(part)
        self.spells_bytes = bool(parts) and parts[-1].get("type") == "ByteLevel"
        if self.spells_bytes:
            self._steps.pop()

    def split(self, text: str, at_start: bool) -> list[str]:
        """The words of a text, of which `at_start` says whether it is the beginning of what is encoded."""
        words = [text]
        for step in self._steps:
            words = [piece for i, word in enumerate(words) for piece in step(word, at_start and i == 0) if piece]
        return words


def _make(step: Mapping[str, Any]) -> list[Step]:
    match step.get("type"):
        case "Split":
            behavior = str(step.get("behavior", "Isolated"))
            return [_cut(compile_pattern(step.get("pattern")), behavior, bool(step.get("invert")))]
        case "ByteLevel":
            return _byte_level(step)
        case "Digits":
            return [_cut(_DIGIT if step.get("individual_digits") else _DIGITS, "Isolated")]
        case "Punctuation":
            return [_cut(PUNCTUATION, str(step.get("behavior", "Isolated")))]
        case "Whitespace":
            return [lambda word, _: _WORDS.findall(word)]
        case "WhitespaceSplit":
            return [_cut(_SPACE, "Removed")]
        case "BertPreTokenizer":
            return [_cut(_SPACE, "Removed"), _cut(PUNCTUATION, "Isolated")]
        case "Metaspace":
            return _metaspace(step)
        case other:
            raise TokenizerError(f"has a pre-tokenizer {other!r}, which is not supported")


def _byte_level(step: Mapping[str, Any]) -> list[Step]:
    found: list[Step] = []
    if step.get("add_prefix_space", True):
        found.append(lambda word, _: [word if word.startswith(" ") else " " + word])
    if step.get("use_regex", True):
        found.append(_cut(_GPT2_WORDS, "Isolated"))
    return [*found, lambda word, _: [spell_bytes(word)]]


def _metaspace(step: Mapping[str, Any]) -> list[Step]:
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
    mark = str(step.get("replacement", METASPACE))

    def prepend(word: str, at_start: bool) -> list[str]:
        word = word.replace(" ", mark)
        wanted = scheme == "always" or (scheme == "first" and at_start)
        return [mark + word if wanted and not word.startswith(mark) else word]

    return [prepend, _cut(regex.compile(regex.escape(mark)), "MergedWithNext")] if step.get("split", True) else [prepend]


def _cut(pattern: "regex.Pattern[str]", behavior: str, invert: bool = False) -> Step:
    """Cut at the matches of a pattern (invert: at what is between them), by what becomes of these."""
    if behavior == "Isolated" or (behavior == "Removed" and invert):
        return _matches(pattern, gaps=behavior == "Isolated")
    joins = {"Removed": _removed, "MergedWithPrevious": _with_previous, "MergedWithNext": _with_next, "Contiguous": _contiguous}
    if (join := joins.get(behavior)) is None:
        raise TokenizerError(f"has a split of the behavior {behavior!r}, which is not supported")
    return lambda word, _: join([(part, cut != invert) for part, cut in _parts(pattern, word)])


def _matches(pattern: "regex.Pattern[str]", gaps: bool) -> Step:
    """The matches, with what is between them or without."""
    findall = pattern.findall if not pattern.groups else lambda word: [found[0] for found in pattern.finditer(word)]

    def step(word: str, _: bool) -> Sequence[str]:
        found = findall(word)
        if not gaps or sum(map(len, found)) == len(word):  # nothing is between them, as mostly
            return found
        return [part for part, _ in _parts(pattern, word)]

    return step


def _parts(pattern: "regex.Pattern[str]", word: str) -> list[tuple[str, bool]]:
    """The word in order as (part, whether the pattern matches it)."""
    parts, start = [], 0
    for found in pattern.finditer(word):
        if found.start() > start:
            parts.append((word[start : found.start()], False))
        if found[0]:
            parts.append((found[0], True))
        start = found.end()
    if start < len(word):
        parts.append((word[start:], False))
    return parts


def _removed(parts: list[tuple[str, bool]]) -> list[str]:
    return [part for part, cut in parts if not cut]


def _with_previous(parts: list[tuple[str, bool]]) -> list[str]:
    words: list[str] = []
    open_word = False  # whether the last word is no match, to which one may be added
    for part, cut in parts:
        if cut and open_word:
            words[-1] += part
        else:
            words.append(part)
        open_word = not cut
    return words


def _with_next(parts: list[tuple[str, bool]]) -> list[str]:
    words: list[str] = []
    open_match = False
    for part, cut in parts:
        if open_match and not cut:
            words[-1] += part
        else:
            words.append(part)
        open_match = cut
    return words


def _contiguous(parts: list[tuple[str, bool]]) -> list[str]:
    words: list[str] = []
    last: bool | None = None
    for part, cut in parts:
        if cut == last:
            words[-1] += part
        else:
            words.append(part)
        last = cut
    return words
