"""What a sentence of an answer stands on, judged by its words.

In:  a sentence, the numbers it cites, the numbered texts it may stand on
Out: the numbers it should carry, and whether they differ from the model's

A word is a token of the full-text index (a word's stem, an identifier, two neighbouring Chinese characters) without the words that
questions and sentences are made of. Support of a sentence by a text is the share of the sentence's distinct words that the text
holds. Sharing words proves nothing: it tells which source a sentence was taken from, not that the sentence is true.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .chunker import sentence_spans
from .text_index import index_tokens, query_tokens

# A sentence copied or shortened from a text shares nearly all of its words with it, one put into other words about half.
CLEAR_SUPPORT = 0.6
# What unrelated texts of one subject share: its two or three commonest words.
NO_SUPPORT = 0.25
PLACE_SUPPORT = 0.4  # between the two: the passage is known, only its sentence is looked for
LEAST_WORDS = 2  # a sentence of fewer says nothing that could be looked up by itself


@dataclass(frozen=True, slots=True)
class MatchedCitation:
    """A citation that was put by comparing words, not by the model.

    sentence : as the model wrote it
    number : the source it now cites
    replaced : the numbers of the model that it stands for; () when the sentence had none
    """

    sentence: str
    number: int
    replaced: tuple[int, ...]


def sentence_words(sentence: str) -> set[str]:
    """The distinct words of a sentence that say something."""
    return set(query_tokens(sentence)) if sentence.strip() else set()


def support(words: set[str], text_words: set[str]) -> float:
    """Share of a sentence's words that a text holds, 0 to 1."""
    return len(words & text_words) / len(words) if words else 0.0


def match_sentence(sentence: str, cited: Sequence[int], texts: Mapping[int, set[str]], question: str = "") -> MatchedCitation | None:
    """The citation that a sentence should carry instead of its own; None when it may stay as it is.

    Parameters
    ----------
    sentence : without its citations
    cited : numbers of sources the model gave it
    texts : words of each source, by number; of equals the lower number is taken
    question : gives the words that a short answer such as "60" leaves out; the source must then hold the whole answer

    A sentence without a citation gets the source that clearly supports it. One that cites is changed only when none of its sources
    shares anything with it while another clearly supports it.
    """
    words = sentence_words(sentence)
    able = dict(texts)
    if len(words) < LEAST_WORDS:
        able = {number: text for number, text in texts.items() if words and words <= text}
        words |= sentence_words(question)
    if len(words) < LEAST_WORDS or not able:
        return None
    best = max(able, key=lambda number: (support(words, able[number]), -number))
    if support(words, able[best]) < CLEAR_SUPPORT:
        return None
    if cited and max(support(words, texts[number]) for number in cited) >= NO_SUPPORT:
        return None
    return MatchedCitation(sentence, best, tuple(cited))


@dataclass(frozen=True, slots=True)
class FoundSentence:
    """A sentence of a passage: passage[start:start + len(text)] == text; share is the support that was asked for, 0 to 1."""

    start: int
    text: str
    share: float


def best_sentence(words: set[str], passage: str) -> FoundSentence | None:
    """The sentence of a passage that holds most of `words`, the first of equals, headings left out; None when no sentence holds any."""
    best: FoundSentence | None = None
    for start, end in sentence_spans(passage, 0, len(passage)):
        text = passage[start:end]
        if text.lstrip().startswith("#") and "\n" not in text.strip():
            continue  # a heading says what a passage is about and states nothing
        share = support(words, set(index_tokens(text)))
        if share > (best.share if best else 0.0):
            best = FoundSentence(start + len(text) - len(text.lstrip()), text.strip(), share)
    return best


def stated_in(sentence: str, passage: str, question: str = "") -> FoundSentence | None:
    """The sentence of a passage that a sentence of an answer was taken from; None when none shares enough with it.

    question : gives the words that a short answer leaves out; the passage's sentence must then hold the whole answer
    """
    words = sentence_words(sentence)
    found = best_sentence(words, passage)
    if found is not None and len(words) < LEAST_WORDS:
        whole = best_sentence(words | sentence_words(question), passage)
        found = whole if whole is not None and words <= set(index_tokens(whole.text)) else found
    return found if found is not None and found.share >= PLACE_SUPPORT else None


def text_words(heading_path: Sequence[str], text: str) -> set[str]:
    """The words of a source, its headings included."""
    return set(index_tokens(" ".join(heading_path) + "\n" + text))
