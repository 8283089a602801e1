"""What a tokenizer does to text before cutting it: the "normalizer" of a Hugging Face tokenizer.json.

In: the parsed normalizer. Out: a function from text to text; TokenizerError names a kind that is not supported.
"""

import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Literal

import regex

from .errors import TokenizerError
from .tokenizer_pieces import steps

Normalizer = Callable[[str], str]
Form = Literal["NFC", "NFD", "NFKC", "NFKD"]

# Tokenizers were made with Unicode 9's tables: of the characters that later versions added, these combine or decompose since.
# Python's tables follow its version, so such characters are kept out of the normalisation, and the ids are everywhere the same.
_LATER = (
    "7FD 897-89F 8CA-8D3 9FE C3C CF3 D3B-D3C EBA ECE 1715 1ABF-1AEB 1C89-1C8A 1DF6-1DFA 32FF A7F1-A7F4 A82C AB69 105C9 105E4 10781-107BA "
    "10D24-10D27 10D69-10D6D 10EAB-10EAC 10EFA-10EFF 10F46-10F50 10F82-10F85 11070 1133B 11382-113D2 1145E 11839-1183A 11938-11943 119E0 "
    "11A34 11A47 11A99 11D42-11D45 11D97 11F41-11F42 1612F 16121-16128 16D67-16D6A 16FF0-16FF1 1CCD6-1CCF9 1E030-1E06D 1E130-1E136 1E2AE "
    "1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF 1E6E3-1E6F5 1F16C 1FBF0-1FBF9"
)


def unicode_class(ranges: str) -> str:
    """'41-5A B5' as a pattern's character class."""
    return "[" + "".join("-".join(rf"\U{int(end, 16):08X}" for end in part.split("-")) for part in ranges.split()) + "]"


_LATER_CHARACTER = regex.compile(f"({unicode_class(_LATER)})")


def normalize(form: Form, text: str) -> str:
    """Unicode normalisation by the tables of Unicode 9."""
    if unicodedata.is_normalized(form, text):
        return text
    parts = _LATER_CHARACTER.split(text)  # every second part is such a character
    return "".join(part if i % 2 else unicodedata.normalize(form, part) for i, part in enumerate(parts))


def make_normalizer(node: Any) -> Normalizer | None:
    """The normalizer of a tokenizer.json, None when it changes nothing."""
    parts = [_make(step) for step in steps(node, "normalizers")]
    if not parts:
        return None

    def apply(text: str) -> str:
        for part in parts:
            text = part(text)
        return text

    return apply


def _make(step: Mapping[str, Any]) -> Normalizer:
    match step.get("type"):
        case "NFC" | "NFD" | "NFKC" | "NFKD" as form:
            return lambda text: normalize(form, text)
        case "Lowercase":
            return _lowercase
        case "StripAccents":
            return lambda text: _MARKS.sub("", text)
        case "Strip":
            return _strip(bool(step.get("strip_left", True)), bool(step.get("strip_right", True)))
        case "Replace":
            return _replace(step)
        case "Prepend":
            before = str(step.get("prepend", ""))
            return lambda text: before + text if text else text
        case "BertNormalizer":
            return _bert(step)
        case "Precompiled":
            raise TokenizerError("has a precompiled character map, supported only for Unigram models")
        case other:
            raise TokenizerError(f"has a normalizer {other!r}, which is not supported")


def _lowercase(text: str) -> str:
    return "".join(map(str.lower, text))  # character by character: str.lower would look at a sigma's neighbours


def _strip(left: bool, right: bool) -> Normalizer:
    if left and right:
        return str.strip
    return str.lstrip if left else str.rstrip if right else str


def _replace(step: Mapping[str, Any]) -> Normalizer:
    pattern, content = step.get("pattern"), step.get("content")
    if not isinstance(pattern, dict) or not isinstance(content, str):
        raise TokenizerError(f"has a malformed Replace normalizer {str(step)[:80]}")
    if isinstance(found := pattern.get("String"), str):
        return lambda text: text.replace(found, content)
    compiled = compile_pattern(pattern)
    return lambda text: compiled.sub(lambda _: content, text)


def compile_pattern(pattern: Any) -> "regex.Pattern[str]":
    """A tokenizer.json's {"Regex": ...} or {"String": ...}; TokenizerError when it cannot be compiled."""
    if isinstance(pattern, dict) and isinstance(text := pattern.get("String"), str):
        return regex.compile(regex.escape(text))
    text = pattern.get("Regex") if isinstance(pattern, dict) else pattern
    if not isinstance(text, str):
        raise TokenizerError(f"has a malformed pattern {str(pattern)[:80]}")
    # The files' own spellings of a code point and of an intersection of classes are not those of this library.
    spelled = regex.sub(r"\\x\{([0-9A-Fa-f]+)\}", lambda found: rf"\U{int(found[1], 16):08X}", text)
    try:
        return regex.compile(spelled, regex.V1 if "&&" in spelled else regex.V0)
    except (regex.error, OverflowError) as error:
        raise TokenizerError(f"has the split pattern {text[:60]!r}, which is refused ({error})") from error


_MARKS = regex.compile(r"\p{Mn}+")
_REMOVED = regex.compile(r"[\uFFFD\p{Cf}\p{Co}\p{Cc}--[\t\n\r]]+", regex.V1)
_SPACE = regex.compile(r"[\s]")
_IDEOGRAPH = regex.compile(f"({unicode_class('4E00-9FFF 3400-4DBF F900-FAFF 20000-2A6DF 2A700-2B81F 2B920-2CEAF 2F800-2FA1F')})")


def _bert(step: Mapping[str, Any]) -> Normalizer:
    lowercase = bool(step.get("lowercase", True))
    accents = step.get("strip_accents")
    strip_accents = lowercase if accents is None else bool(accents)
    clean, spaced = bool(step.get("clean_text", True)), bool(step.get("handle_chinese_chars", True))

    def apply(text: str) -> str:
        if clean:
            text = _SPACE.sub(" ", _REMOVED.sub("", text))
        if spaced:
            text = _IDEOGRAPH.sub(r" \1 ", text)
        if strip_accents:
            text = _MARKS.sub("", normalize("NFD", text))
        return _lowercase(text) if lowercase else text

    return apply
