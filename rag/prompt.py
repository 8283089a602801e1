"""Hits to the messages a model answers.

In:  question, hits, history, a token budget
Out: messages (system text with numbered sources, history, question), the sources by number, what did not fit

System text, sources and history come in this order and sources in a stable order, so that a session finds the longest possible
prefix already in its cache.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from libcolibri.errors import ContextLengthError

from .retriever import Hit

Message = dict[str, str]

HISTORY_SHARE = 0.25  # of the budget; sources matter more
_MESSAGE_TOK = 8  # what a chat template adds around one message, at most, in the families supported
_NAMES = ("system", "unanswerable", "quotation")

# What a model writes when no source has the answer, by language of the prompt. A word, because small models repeat a whole sentence
# of refusal whenever the prompt offers them one.
REFUSAL_MARKERS = {"en": "NONE", "zh": "无"}

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA_OR_HANGUL = re.compile(r"[\u3040-\u30ff\uac00-\ud7af]")
_LATIN_WORD = re.compile(r"[A-Za-z]+")
# Spellings by which tokenizers and templates mark roles; inside a document they must stay plain text.
_CONTROL_WORD = re.compile(
    r"<(\s*/?\s*(?:[|｜][^<>\s]{0,80}[|｜]|s|bos|eos|pad|unk|think|tool_call|tool_response|start_of_turn|end_of_turn"
    r"|sources?(?=[\s>])[^<>\n]{0,200}))\s*>"
    r"|(\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS)\])|(<</?SYS>>)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Source:
    """A hit with the number the model cites it by, from 1."""

    number: int
    hit: Hit


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent to the model, and what could not be.

    left_out : hits that did not fit into the budget, best first
    dropped_history : messages of the history that did not fit, counted from the oldest
    n_tok : estimate of the whole prompt's tokens
    """

    messages: list[Message]
    sources: tuple[Source, ...]
    left_out: tuple[Hit, ...]
    dropped_history: int
    n_tok: int
    language: str


def question_language(question: str) -> str:
    """"zh" for a question written in Chinese, else "en" (whose prompt asks for the question's own language)."""
    if _KANA_OR_HANGUL.search(question):
        return "en"
    n_han = len(_HAN.findall(question))
    return "zh" if n_han and n_han * 2 >= len(_LATIN_WORD.findall(question)) else "en"


def prompt_text(name: str, language: str) -> str:
    """One of the texts in prompts/: "system", "unanswerable" or "quotation", in "en" or "zh"."""
    assert name in _NAMES and language in ("en", "zh")
    return (resources.files(__package__) / "prompts" / f"{name}.{language}.txt").read_text(encoding="utf-8").strip()


def as_plain_data(text: str) -> str:
    """Text of a document such that nothing in it can end its source or play a role: such marks lose their brackets' shape."""

    def disarm(found: re.Match[str]) -> str:
        return found.group().replace("<", "‹").replace(">", "›").replace("[", "⟦").replace("]", "⟧")

    return _CONTROL_WORD.sub(disarm, text)


def render_source(number: int, hit: Hit) -> str:
    """One numbered source, delimited as data."""
    where = " > ".join(hit.chunk.heading_path) or hit.document.title
    title = as_plain_data(" ".join(where.split())).replace('"', "'")
    return f'<source id="{number}" title="{title}">\n{as_plain_data(hit.chunk.text)}\n</source>'


def build_prompt(
    question: str, hits: Sequence[Hit], history: Sequence[Message], count_tok: Callable[[str], int], budget_tok: int
) -> Prompt:
    """Fill the budget: system text and question always, then hits best first, then the newest history.

    Chunks go in whole or not at all. Raises ContextLengthError when not even the question fits.
    """
    language = question_language(question)
    system = prompt_text("system", language)
    ask = as_plain_data(question)
    fixed_tok = count_tok(system) + count_tok(ask) + 3 * _MESSAGE_TOK
    if fixed_tok >= budget_tok:
        raise ContextLengthError(fixed_tok, budget_tok)
    kept_history, history_tok = _fit_history(history, count_tok, int((budget_tok - fixed_tok) * HISTORY_SHARE))
    chosen, left_out, sources_tok = _fit_hits(hits, count_tok, budget_tok - fixed_tok - history_tok)
    # By place, not by rank: a follow-up question that finds some of the same chunks meets them in the same order.
    chosen.sort(key=lambda hit: (hit.document.path, hit.chunk.position))
    sources = tuple(Source(number, hit) for number, hit in enumerate(chosen, start=1))
    body = "\n\n".join([system, *(render_source(source.number, source.hit) for source in sources)])
    messages = [{"role": "system", "content": body}, *kept_history, {"role": "user", "content": ask}]
    n_tok = fixed_tok + history_tok + sources_tok
    return Prompt(messages, sources, tuple(left_out), len(history) - len(kept_history), n_tok, language)


def _fit_history(history: Sequence[Message], count_tok: Callable[[str], int], budget_tok: int) -> tuple[list[Message], int]:
    """The newest messages that fit, beginning with one of the user's."""
    kept: list[Message] = []
    total = 0
    for message in reversed(history):
        n_tok = count_tok(message["content"]) + _MESSAGE_TOK
        if total + n_tok > budget_tok:
            break
        kept.insert(0, message)
        total += n_tok
    while kept and kept[0]["role"] != "user":
        total -= count_tok(kept.pop(0)["content"]) + _MESSAGE_TOK
    return kept, total


def _fit_hits(hits: Sequence[Hit], count_tok: Callable[[str], int], budget_tok: int) -> tuple[list[Hit], list[Hit], int]:
    chosen: list[Hit] = []
    left_out: list[Hit] = []
    total = 0
    for hit in hits:
        n_tok = count_tok(render_source(len(hits), hit)) + 2
        if total + n_tok <= budget_tok:
            chosen.append(hit)
            total += n_tok
        else:
            left_out.append(hit)
    return chosen, left_out, total
