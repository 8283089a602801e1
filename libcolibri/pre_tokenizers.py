"""How byte-level BPE vocabularies cut text into words before merging, by the name a GGUF file gives (tokenizer.ggml.pre).

In: a name. Out: the normalizer and pre-tokenizer of a Hugging Face tokenizer.json.
GGUF files carry no pattern, only the name, so the patterns stand here as their models' tokenizer.json publish them.
A wrong pattern makes a model worse without any error, so an unknown name is refused.
"""

from dataclasses import dataclass
from typing import Any

from .errors import TokenizerError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Splits applied one after the other; each cuts the pieces of the one before at its matches."""

    splits: tuple[str, ...]
    nfc: bool = False  # text is composed first (Unicode NFC)
    ignore_merges: bool = False  # a whole word that is a token is taken without merging
    add_bos: bool = False  # what a file means that does not say add_bos_token

    def normalizer(self) -> dict[str, Any] | None:
        return {"type": "NFC"} if self.nfc else None

    def pre_tokenizer(self) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in self.splits
        ]
        parts.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        return {"type": "Sequence", "pretokenizers": parts}


# English contractions, in lower case (GPT-2) or in any case (all later ones).
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = rf"(?i:{_CONTRACTIONS})"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(letters: str = r"\p{L}", digits: str = r"\p{N}", contractions: str = _ANY_CASE + "|") -> str:
    """The pattern of Llama 3 and Qwen: a word takes one leading sign, punctuation one leading space and following newlines."""
    signs = r"\p{L}\p{N}" if letters == r"\p{L}" else r"\p{L}\p{M}\p{N}"
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{signs}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, contraction: str = "", exclude: str = "", newline: str = r"[\r\n/]*") -> str:
    """The pattern of GPT-4o and Tekken: a word is capitals then small letters, or capitals alone."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{exclude}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{exclude}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{newline}|{_SPACES}"


_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_QWEN2, _LLAMA3, _QWEN35 = _words(), _words(digits=r"\p{N}{1,3}"), _words(letters=r"[\p{L}\p{M}]")
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"


def _signs_and_letters(newlines: str = r"\s*[\r\n]+|") -> str:
    """The main pattern of DeepSeek V3; with other newlines, signs do not take along those after them."""
    signs = r" ?[\p{P}\p{S}]+" + ("" if newlines == r"[\r\n]|" else r"[\r\n]*")
    lead = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{lead}|{signs}|{newlines}\s+(?!\S)|\s+"


_DEEPSEEK_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"

# The letters of DeepSeek LLM's published class: cased letters as Unicode 11 knew them, minus a few, so no property names it.
_DEEPSEEK_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481
48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45
1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC
1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E
2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06
FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""


def _char_class(ranges: str) -> str:
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in ranges.split()) + "]"


_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_char_class(_DEEPSEEK_LETTERS)}+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}",
)
_EAST_ASIAN = "+|".join(
    _char_class(ranges)
    for ranges in ("AC00-D7A3 3131-318E", "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F", "3105-312F")
) + r"+|" + _CJK
_ASIAN_SCRIPTS = """
4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF
1100-11FF
"""
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_TABLE: dict[str, PreTokenizer] = {}


def _define(names: str, *splits: str, nfc: bool = False, ignore_merges: bool = False, add_bos: bool = False) -> None:
    entry = PreTokenizer(splits, nfc, ignore_merges, add_bos)
    _TABLE.update(dict.fromkeys(names.split(), entry))


_define("gpt-2 phi-2 mpt jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum exaone4", _GPT2)
_define("jais trillion granite-docling", _GPT2)
_define("olmo modern-bert", _GPT2, nfc=True)
_define("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2)
_define("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2", _QWEN2, nfc=True)
_define("hunyuan solar-open grok-2", _QWEN2)
# Files of this name are encoded as the text is: what they were published with is checked by vectors that keep e + accent apart.
# Qwen's own tokenizer.json and rank files of the same models compose first, and say so themselves.
_define("qwen35", _QWEN35)
_define("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3, ignore_merges=True, add_bos=True)
_define("dbrx smaug-bpe chatglm-bpe", _LLAMA3)
_define("glm4 glm5", _LLAMA3, ignore_merges=True)
_define("minicpm5", r"\p{N}{1,3}", _words(digits=r"\p{N}+"), ignore_merges=True)
_define("ufakzeka", _words(contractions=""))
_define("seed-coder", rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}")
_define(
    "bailingmoe bailingmoe2 llada-moe",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_define("laguna", r"[^\n]+|[\n]+", _QWEN2)
_define("deepseek-llm", *_DEEPSEEK_LLM)
_define("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_define("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", _CJK, _signs_and_letters())
_define("spark2_5", r"\p{N}{1,3}", _CJK, _signs_and_letters(newlines=r"[\r\n]|"), r"\p{N}")
_define("afmoe", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _char_class(_ASIAN_SCRIPTS) + "+", _signs_and_letters())
_define(
    "exaone-moe",
    rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|"
    r"\s+(?!\S)|\s+",
)
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s{1}"
_define("jais-2", _LLAMA3.replace(r"|\s+(?!\S)|\s+", "|" + _JAIS2_SPACES))
_define("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")
_define("default", r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_GPT4O = _cased(r"\p{N}{1,3}", _ANY_CASE + "?")
_define("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", _GPT4O, ignore_merges=True)
_define("tekken", _cased(r"\p{N}"), ignore_merges=True, add_bos=True)
_define("youtu", _EAST_ASIAN, _cased(r"\p{N}", _ANY_CASE + "?"), ignore_merges=True)
_define("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)
_define(
    "kimi-k2",
    r"[\p{Han}]+|" + _cased(r"\p{N}{1,3}", _ANY_CASE + "?", exclude=r"&&[^\p{Han}]", newline=r"[\r\n]*"),
    ignore_merges=True,
)
_define("poro-chat bloom gpt3-finnish", _BLOOM)
_define("viking", _BLOOM, r"\p{N}")


def supported_names() -> list[str]:
    """Every name of the table, sorted."""
    return sorted(_TABLE)


def pre_tokenizer_by_name(name: str) -> PreTokenizer:
    """The entry for a GGUF's tokenizer.ggml.pre; TokenizerError names the unknown one."""
    if (entry := _TABLE.get(name)) is None:
        raise TokenizerError(f"tokenizer.ggml.pre {name!r} is not supported; supported are {', '.join(supported_names())}")
    return entry
