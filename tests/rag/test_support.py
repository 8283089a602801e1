"""Which source a sentence stands on, and citations put right in a stream."""

import pytest
from colibri_rag.sentence_matcher import SentenceMatcher
from colibri_rag.support import match_sentence, support, text_words
from hypothesis import given
from hypothesis import strategies as st

CACHE = "The `expert_cache` holds 64 experts per layer. It evicts the least recently used expert when it is full."
TOMATO = "Water the tomatoes every morning. Tomatoes need sun."
CHINESE = "专家缓存保存最近使用的专家。缓存大小由内存预算决定。"
TEXTS = {1: text_words(("Garden",), TOMATO), 2: text_words(("Expert cache",), CACHE), 3: text_words(("缓存",), CHINESE)}


def put_right(text, size=1000, question="", texts=TEXTS):
    matcher = SentenceMatcher(texts, question)
    shown = "".join(matcher.feed(text[i : i + size]) for i in range(0, len(text), size)) + matcher.finish()
    return shown, matcher


def test_support_is_a_share_of_the_sentences_words():
    assert support({"a", "b"}, {"a", "c"}) == 0.5
    assert support(set(), {"a"}) == 0.0


@pytest.mark.parametrize(
    ("sentence", "cited", "number"),
    [
        ("It evicts the least recently used expert.", [], 2),
        ("缓存大小由内存预算决定。", [], 3),
        ("It evicts the least recently used expert.", [1], 2),
        ("缓存大小由内存预算决定。", [1], 3),
        ("It evicts the least recently used expert.", [2], None),
        ("It evicts the least recently used expert.", [1, 2], None),
        ("Parrots eat seeds in the jungle.", [], None),
        ("Parrots eat seeds in the jungle.", [1], None),
        ("鹦鹉在丛林里吃种子。", [], None),
        ("Yes.", [], None),
        ("", [], None),
    ],
)
def test_a_sentence_gets_a_source_only_when_one_clearly_supports_it(sentence, cited, number):
    match = match_sentence(sentence, cited, TEXTS)
    assert (match.number if match else None) == number
    assert match is None or match.replaced == tuple(cited)


def test_a_short_answer_is_looked_up_with_the_questions_words():
    question = "How many experts per layer does the expert_cache hold?"
    assert match_sentence("64.", [], TEXTS, question).number == 2
    assert match_sentence("65.", [], TEXTS, question) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It evicts the least recently used expert.", "It evicts the least recently used expert [2]."),
        ("It evicts the least recently used expert [1]. Water the tomatoes every morning.",
         "It evicts the least recently used expert [2]. Water the tomatoes every morning [1]."),
        ("It evicts the least recently used expert. [2] Water the tomatoes every morning [1].",
         "It evicts the least recently used expert. [2] Water the tomatoes every morning [1]."),
        ("缓存大小由内存预算决定。专家缓存保存最近使用的专家。", "缓存大小由内存预算决定[3]。专家缓存保存最近使用的专家[3]。"),
        ("- Water the tomatoes every morning\n- Tomatoes need sun\n", "- Water the tomatoes every morning [1]\n- Tomatoes need sun [1]\n"),
        ("# Water the tomatoes every morning\n\nWell.", "# Water the tomatoes every morning\n\nWell."),
        ("| Water the tomatoes every morning |\n", "| Water the tomatoes every morning |\n"),
        ("Water the tomatoes every morning:\n", "Water the tomatoes every morning:\n"),
        ("```\nWater the tomatoes every morning.\n```\n", "```\nWater the tomatoes every morning.\n```\n"),
        ("Water the tomatoes every morning [9?].", "Water the tomatoes every morning [9?]."),
        ("See [this](x). Parrots eat. [", "See [this](x). Parrots eat. ["),
    ],
)  # fmt: skip
def test_citations_are_put_right_however_the_text_is_cut(text, shown):
    for size in (1, 2, 5, 1000):
        # Citations come whole from the parser before.
        assert (size < 1000 and "[" in text) or put_right(text, size)[0] == shown


def test_what_was_done_is_recorded():
    _, matcher = put_right("It evicts the least recently used expert [1]. Water the tomatoes every morning [1].")
    assert [(match.number, match.replaced) for match in matcher.matched] == [(2, (1,))]
    assert matcher.of_model == {1}


def test_text_is_shown_before_its_sentence_is_complete():
    matcher = SentenceMatcher(TEXTS, "")
    assert matcher.feed("It evicts the least ") == "It evicts the least"
    assert matcher.feed("recently") == " recently"
    assert matcher.feed(" used expert in 0.5 s [") == " used expert in 0.5 s"


def test_code_that_ran_ahead_of_its_line_is_shown_once():
    matcher = SentenceMatcher({}, "")
    assert "".join([*map(matcher.feed, ["```", "\n", " ", "a"]), matcher.finish()]) == "```\n a"


@given(st.lists(st.sampled_from(["a", " ", ".", "\n", "。", "[1]", "[", "`", "```", "Water the tomatoes", "词元"]), max_size=25))
def test_nothing_is_lost(pieces):
    matcher = SentenceMatcher({}, "")
    assert "".join([*map(matcher.feed, pieces), matcher.finish()]) == "".join(pieces)
