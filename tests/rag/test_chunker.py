"""Chunks are exact slices, small enough, in order, and lose nothing."""

import time
from itertools import pairwise

import pytest
from colibri_rag.chunker import ChunkConfig, chunk_document
from colibri_rag.documents import parse_document
from hypothesis import given, settings
from hypothesis import strategies as st


def count_tok(text):
    """Like a subword tokenizer: two per word or so, one per wide character; parts may count more than the whole."""
    return 2 + sum(1 if c >= "\u2e80" else 0.3 for c in text).__ceil__() if text else 0


def chunks_of(text, suffix=".md", **config):
    document = parse_document("a" + suffix, text.encode("utf-8", "ignore"))
    return document, chunk_document(document, count_tok, ChunkConfig(**config))


def check(document, chunks, max_tok):
    covered = set()
    for chunk in chunks:
        assert document.text[chunk.start : chunk.end] == chunk.text
        assert chunk.text and chunk.text == chunk.text.strip()
        assert chunk.n_tok == count_tok(chunk.text)
        assert chunk.n_tok <= max(max_tok, 3) or len(chunk.text) == 1
        assert chunk.line >= 1
        covered.update(range(chunk.start, chunk.end))
    starts = [chunk.start for chunk in chunks]
    assert starts == sorted(set(starts))
    for block in document.blocks:
        if block.kind != "heading":
            for offset in range(block.start, block.end):
                assert offset in covered or document.text[offset].isspace()


def test_structure_is_followed():
    text = "# A\n\nFirst. Second.\n\n## B\n\nThird.\n\n```\ncode\n\nmore\n```\n\n# C\n\nFourth.\n"
    _, chunks = chunks_of(text)
    assert [chunk.heading_path for chunk in chunks] == [("A",), ("A", "B"), ("C",)]
    assert chunks[1].text == "## B\n\nThird.\n\n```\ncode\n\nmore\n```"
    assert [chunk.line for chunk in chunks] == [1, 5, 15]


def test_chinese_sentences_and_overlap():
    text = "第一句话说的是缓存。第二句话说的是内存！第三句话说的是专家？第四句话结束了；第五句在这里。" * 3
    document, chunks = chunks_of(text, ".txt", max_tok=60, overlap_sentences=1, overlap_share=0.5)
    check(document, chunks, 60)
    assert len(chunks) > 2
    assert all(chunk.text[-1] in "。！？；" for chunk in chunks)
    for before, after in pairwise(chunks):
        assert before.start < after.start < before.end  # one sentence is in both


def test_code_blocks_and_tables_are_kept_whole_when_they_fit():
    table = "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 10
    code = "```\n" + "x = 1\n\n" * 8 + "```\n"
    _, chunks = chunks_of("Intro sentence here. " * 8 + "\n\n" + table + "\n" + "Words and words. " * 8 + "\n\n" + code, max_tok=90)
    for whole in (table.strip(), code.strip()):
        assert any(whole in chunk.text for chunk in chunks)


def test_abbreviations_do_not_end_sentences():
    _, chunks = chunks_of("Use tools, e.g. apt. Then go. " * 20, ".txt", max_tok=20, overlap_sentences=0)
    assert not any(chunk.text.endswith("e.g.") for chunk in chunks)


def test_heading_without_text_is_only_a_path_but_a_lone_one_is_kept():
    _, chunks = chunks_of("# Book\n\n## Part\n\nText.\n\n## Empty end\n")
    assert [chunk.text for chunk in chunks] == ["## Part\n\nText.", "## Empty end"]
    assert chunks[0].heading_path == ("Book", "Part")


@pytest.mark.parametrize(
    "text",
    ["." * 99_999, "!? " * 33_333, "line\n" * 60_000, "x" * 99_999, "词" * 99_999, "👩‍👩‍👧‍👦" * 5_000, "word " * 60_000, "a\u0301" * 9_999],
    ids=["dots", "marks", "lines", "letters", "han", "emoji", "words", "accents"],
)
def test_huge_lines(text):
    started = time.perf_counter()
    _, chunks = chunks_of(text, ".txt", overlap_sentences=0)
    assert time.perf_counter() - started < 5
    assert all(chunk.n_tok <= 256 for chunk in chunks)
    assert "".join("".join(chunk.text.split()) for chunk in chunks) == "".join(text.split())
    assert [chunk.line for chunk in chunks] == [text.count("\n", 0, chunk.start) + 1 for chunk in chunks]
    assert not any(chunk.text[0] in "\u0301\u200d" for chunk in chunks)


TEXT = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=400),
    st.lists(
        st.sampled_from(
            ["# H\n", "## Two\n\n", "Sentence one. ", "第二句。", "\n\n", "```\n", "f(x)\n", "| a | b |\n", "|--|--|\n", "- i\n", "长" * 70]
        ),
        max_size=60,
    ).map("".join),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(TEXT, st.sampled_from([".md", ".txt", ".html", ".py"]), st.integers(4, 60), st.integers(0, 3), st.sampled_from([0.0, 0.2, 0.9]))
def test_chunks_reproduce_the_text(text, suffix, max_tok, overlap, share):
    document, chunks = chunks_of(text, suffix, max_tok=max_tok, overlap_sentences=overlap, overlap_share=share)
    check(document, chunks, max_tok)
