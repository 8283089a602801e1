"""What a tokenizer does to text before cutting it: the "normalizer" of a Hugging Face tokenizer.json.

In: the parsed normalizer. Out: a function from text to text; TokenizerError names a kind that is not supported.
"""

import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Literal

import regex

from .errors import TokenizerError
from .tokenizer_pieces import steps
from .tokenizer_unigram import CharacterMap
from .unicode_tables import MARKS, NEW_TO_NORMALISATION, UNSEEN, unicode_class

Normalizer = Callable[[str], str]
Form = Literal["NFC", "NFD", "NFKC", "NFKD"]

_LATER_CHARACTER = regex.compile(f"({NEW_TO_NORMALISATION})")


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
            return lambda text: MARKS.sub("", text)
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
            return CharacterMap.from_step(step)
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


_SPACE = regex.compile(r"[\s]")
_IDEOGRAPH = regex.compile(f"({unicode_class('4E00-9FFF 3400-4DBF F900-FAFF 20000-2A6DF 2A700-2B81F 2B920-2CEAF 2F800-2FA1F')})")


def _bert(step: Mapping[str, Any]) -> Normalizer:
    lowercase = bool(step.get("lowercase", True))
    accents = step.get("strip_accents")
    strip_accents = lowercase if accents is None else bool(accents)
    clean, spaced = bool(step.get("clean_text", True)), bool(step.get("handle_chinese_chars", True))

    def apply(text: str) -> str:
        if clean:
            text = _SPACE.sub(" ", UNSEEN.sub("", text))
        if spaced:
            text = _IDEOGRAPH.sub(r" \1 ", text)
        if strip_accents:
            text = MARKS.sub("", normalize("NFD", text))
        return _lowercase(text) if lowercase else text

    return apply
