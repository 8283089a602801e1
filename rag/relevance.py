"""Whether the documents have an answer at all.

In:  a question, a hit's text, their cosine and the coverage of the question's words
Out: yes or no

Measured on the Debian FAQ in English and Chinese (120 questions each; 20 questions each about other subjects) with
multilingual-e5-small: cosine of the best hit, 5 % and 95 % quantiles.

    question and text                  answered by it     about something else
    both in letters                    0.85 and higher    up to 0.83
    both Chinese                       0.89 and higher    up to 0.86
    one Chinese, the other letters     0.80 and higher    up to 0.81

So the threshold depends on the two scripts.

A name that the question shares with every document ("the colibri edition for companies") lifts the cosine of a question about
something else. Such a question shares hardly any other word with the passages found: on colibri's own documents, 32 answered
questions put into other words have a best coverage of 0.10 and higher; of the five unanswered ones whose cosine passes, two have 0.06
and less. So a question must also share `least_shared` of its words' weight with a passage in its own script.

Other questions near the subject that the documents still do not answer are not told apart by any threshold: those are left to
the model, which is told to say so.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")
_LETTER = re.compile(r"[^\W\d_]")
WIDE_SHARE = 0.2  # of the letters: Chinese technical text is full of Latin names


@dataclass(frozen=True, slots=True)
class Relevance:
    """Thresholds of one embedder.

    cosine : question and text in alphabetic scripts
    wide_cosine : both in Chinese, Japanese or Korean
    cross_cosine : one of each
    slack : a cosine lower by this much still counts when the text covers `sure_coverage` of the question's words
    least_shared : best coverage, among the passages in the question's script, below which none of them answers
    least_coverage : what counts in a knowledge base without an embedder
    """

    cosine: float = 0.84
    wide_cosine: float = 0.87
    cross_cosine: float = 0.81
    slack: float = 0.03
    sure_coverage: float = 0.75
    least_shared: float = 0.08
    least_coverage: float = 0.4


E5 = Relevance()
# all-MiniLM-L6-v2, on the same English questions: answered ones 0.44 and higher, others up to 0.32. It knows no Chinese.
PLAIN = Relevance(cosine=0.36, wide_cosine=0.36, cross_cosine=0.36, slack=0.06)


def is_wide(text: str) -> bool:
    """Whether a text is written in Chinese, Japanese or Korean."""
    n_wide = len(_WIDE.findall(text))
    return n_wide > WIDE_SHARE * len(_LETTER.findall(text))


def is_answerable(question: str, text: str, cosine: float | None, coverage: float, relevance: Relevance = E5) -> bool:
    """Whether a hit may hold the answer.

    Parameters
    ----------
    text : the hit's chunk
    cosine : of question and chunk; None in a knowledge base without an embedder
    coverage : share of the question's words that the chunk holds, 0 to 1
    """
    if cosine is None:
        return coverage >= relevance.least_coverage
    wide, wide_text = is_wide(question), is_wide(text)
    same_script = relevance.wide_cosine if wide else relevance.cosine
    threshold = same_script if wide == wide_text else relevance.cross_cosine
    if coverage >= relevance.sure_coverage:
        threshold -= relevance.slack
    return cosine >= threshold


def shares_words(question: str, passages: Iterable[tuple[str, float]], relevance: Relevance = E5) -> bool:
    """Whether a question shares enough words with what was found in its script to be about the same thing.

    passages : (text, coverage) of the hits
    """
    wide = is_wide(question)
    return max((coverage for text, coverage in passages if is_wide(text) == wide), default=0.0) >= relevance.least_shared
