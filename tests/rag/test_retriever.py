"""Search: fusion, scopes, repetitions, and whether there is an answer at all."""

import pytest
from colibri_rag import Scope, ScopeError
from colibri_rag.retriever import Relevance, fuse, is_answerable


def test_fuse_is_reciprocal_rank():
    scores = fuse([[1, 2, 3], [3, 4]])
    assert list(scores) == [3, 1, 2, 4]
    assert scores[3] == pytest.approx(1 / 63 + 1 / 61) and scores[1] == pytest.approx(1 / 61)
    assert list(fuse([[7], [5]])) == [5, 7], "ties by id"


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
    assert len(hits) == 2 and len(hits[0].repeated_in) == 4


@pytest.mark.parametrize("query", ["", "   ", "?!", "\0", '"', "🦜", "NEAR(", "a" * 100_000, "词" * 10_000])
def test_any_query(kb, notes, query):
    kb.ingest([notes])
    kb.search(query)
    assert kb.search("tomatoes", 0) == []


def test_answerable_needs_one_strong_or_two_fair_signs():
    r = Relevance(sure_cosine=0.86, least_cosine=0.79, sure_coverage=0.75, least_coverage=0.35)
    assert is_answerable(0.9, 0.0, r) and is_answerable(0.5, 0.8, r) and is_answerable(0.80, 0.4, r)
    assert not is_answerable(0.80, 0.1, r) and not is_answerable(0.7, 0.5, r)
    assert is_answerable(None, 0.5, r) and not is_answerable(None, 0.1, r)
