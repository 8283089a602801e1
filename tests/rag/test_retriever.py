"""Search: fusion, scopes, repetitions, and whether there is an answer at all."""

from dataclasses import replace

import pytest
from colibri_rag import Scope, ScopeError
from colibri_rag.relevance import is_answerable, shares_words
from colibri_rag.retriever import LEXICAL_WEIGHT, fuse, lexical_weight


def test_fuse_is_reciprocal_rank():
    scores = fuse([[1, 2, 3], [3, 4]])
    assert list(scores) == [3, 1, 2, 4]
    assert scores[3] == pytest.approx(1 / 63 + 1 / 61) and scores[1] == pytest.approx(1 / 61)
    assert list(fuse([[7], [5]])) == [5, 7], "ties by id"
    assert fuse([[1], [1]], weights=(0.5, 1.0))[1] == pytest.approx(1.5 / 61)


def test_hits_tell_every_stage(kb, notes):
    kb.ingest([notes])
    hit = kb.search("expert_cache evicts")[0]
    assert hit.lexical_rank == 1 and hit.bm25 > 0 and hit.vector_rank and hit.cosine > 0 and hit.coverage == 1
    assert hit.chunk.heading_path == ("Expert cache", "Size") and hit.chunk.line == 5
    assert hit.document.path.endswith("cache.md")


def test_chinese_and_identifiers(kb, notes):
    kb.ingest([notes])
    assert kb.search("猫")[0].chunk.heading_path == ("猫",)
    assert "最近使用" in kb.search("缓存大小由什么决定？")[0].chunk.text
    assert "q4_k_m" in kb.search("--quant")[0].chunk.text


def test_scope_is_applied_inside_both_searches(kb, tmp_path):
    big, small = tmp_path / "big", tmp_path / "big2"
    for folder, count in ((big, 150), (small, 1)):
        folder.mkdir()
        for number in range(count):
            (folder / f"{number}.txt").write_text(f"Lighthouse number {number} stands on a rock near port{number}.")
    kb.ingest([big])
    kb.ingest([small], collection="few")
    for scope in (Scope(path_prefix=str(small)), Scope(collection="few"), Scope(path_prefix=str(small / "0.txt"), kind="text")):
        hits = kb.search("lighthouse", 5, scope)
        assert len(hits) == 1 and hits[0].lexical_rank == hits[0].vector_rank == 1
    assert kb.search("lighthouse", 5, Scope(kind="html")) == []
    assert kb.search("lighthouse", 5, Scope(modified_before_s=1.0)) == []
    assert len(kb.search("lighthouse", 5, Scope(modified_after_s=1.0, path_prefix=str(big) + "/"))) == 5
    with pytest.raises(ScopeError, match="'pdf' does not exist"):
        Scope(kind="pdf")


def test_near_copies_are_named_not_repeated(kb, tmp_path):
    text = "The reading room closes at eight in the evening, except on Fridays, when it stays open until ten for members of the club. "
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(text + f"Notice {number}.")
    (tmp_path / "other.txt").write_text("The reading lamp is broken.")
    kb.ingest([tmp_path])
    hits = kb.search("When does the reading room close?", 8)
    assert sorted(len(hit.repeated_in) for hit in hits) == [0, 4]


@pytest.mark.parametrize("query", ["", "   ", "?!", "\0", '"', "🦜", "NEAR(", "a" * 100_000, "词" * 10_000])
def test_any_query(kb, notes, query):
    kb.ingest([notes])
    kb.search(query)
    assert kb.search("tomatoes", 0) == []


@pytest.mark.parametrize(
    ("question", "text", "cosine", "coverage", "yes"),
    [
        ("How large is the cache?", "The cache has 8 GB.", 0.85, 0.0, True),
        ("How large is the cache?", "The cache has 8 GB.", 0.83, 0.2, False),
        ("How large is the cache?", "The cache has 8 GB.", 0.82, 0.9, True),
        ("How large is the cache?", "The cache has 8 GB.", 0.80, 1.0, False),
        ("缓存有多大？", "缓存有 8 GB。", 0.85, 0.0, False),
        ("缓存有多大？", "缓存有 8 GB。", 0.88, 0.0, True),
        ("缓存有多大？", "The cache has 8 GB.", 0.82, 0.0, True),
        ("How large is the cache?", "缓存有 8 GB。", 0.80, 0.0, False),
        ("How large is the cache?", "The cache has 8 GB.", None, 0.5, True),
        ("How large is the cache?", "The cache has 8 GB.", None, 0.1, False),
    ],
)
def test_answerable_depends_on_scripts(question, text, cosine, coverage, yes):
    assert is_answerable(question, text, cosine, coverage) is yes


def test_identifiers_and_rare_words_weigh_more_in_full_text():
    frequencies = {"cach": 500, "expert_cache": 300, "konqueror": 4, "缓存": 1}
    assert lexical_weight(["cach"], frequencies, 5000) == LEXICAL_WEIGHT
    assert lexical_weight(["缓存"], frequencies, 5000) == LEXICAL_WEIGHT
    assert lexical_weight(["cach", "expert_cache"], frequencies, 5000) == 1
    assert lexical_weight(["cach", "konqueror"], frequencies, 5000) == 1
    assert lexical_weight(["cach", "absent_name"], frequencies, 5000) == LEXICAL_WEIGHT


def test_a_question_must_share_words_with_a_passage_in_its_script():
    assert shares_words("How much does it cost?", [("The price is 5.", 0.08), ("Free.", 0.0)])
    assert not shares_words("How much does it cost?", [("The price is 5.", 0.07), ("价格是五元。", 0.9)])
    assert not shares_words("多少钱？", [("价格是五元。", 0.02)])
    assert not shares_words("多少钱？", [])


def test_a_shared_name_is_not_enough_but_another_script_may_answer(kb, notes):
    kb.ingest([notes])
    hits = kb.search("expert_cache", 3)
    near = [replace(hit, cosine=0.99, coverage=0.05) for hit in hits]
    assert kb.relevant("Who drew the expert_cache?", near) == [hit for hit in near if "缓存" in hit.chunk.text]
