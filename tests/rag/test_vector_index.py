"""The FAISS file is a cache: whatever happens to it, searches are right."""

import json
import os

import pytest
from colibri_rag import KnowledgeBase
from fakes import HashingEmbedder


@pytest.fixture
def folder(tmp_path, notes):
    """A closed knowledge base on a path that is not ASCII."""
    path = tmp_path / "知识库 ü"
    with KnowledgeBase.open(path, HashingEmbedder()) as kb:
        kb.ingest([notes])
    return path


def open_and_search(folder):
    with KnowledgeBase.open(folder, HashingEmbedder()) as kb:
        hits = kb.search("tomatoes sun water")
        return kb._index.rebuilt_because, [(hit.document.title, hit.vector_rank, round(hit.cosine, 3)) for hit in hits]


def test_a_good_file_is_used(folder):
    assert open_and_search(folder)[0] is None


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "noise", "other generation", "other fingerprint", "header list"])
def test_a_bad_file_is_rebuilt(folder, damage):
    good = open_and_search(folder)[1]
    path = folder / "kb.faiss"
    data = path.read_bytes()
    header, payload = data.split(b"\n", 1)
    facts = json.loads(header)
    if damage == "missing":
        path.unlink()
    else:
        changed = {
            "empty": b"",
            "cut": data[:-20],
            "flipped": data[:-30] + bytes([data[-30] ^ 1]) + data[-29:],
            "noise": os.urandom(1000),
            "other generation": json.dumps(facts | {"generation": 1}).encode() + b"\n" + payload,
            "other fingerprint": json.dumps(facts | {"fingerprint": "x"}).encode() + b"\n" + payload,
            "header list": b"[]\n" + payload,
        }
        path.write_bytes(changed[damage])
    reason, hits = open_and_search(folder)
    assert reason and hits == good


def test_no_temporary_files_stay(folder, notes):
    with KnowledgeBase.open(folder, HashingEmbedder()) as kb:
        kb.remove(notes / "garden.txt")
        (notes / "cache.md").write_text("changed")
        kb.ingest([notes / "cache.md"])
    assert sorted(os.listdir(folder)) == ["kb.faiss", "kb.sqlite"]
    assert open_and_search(folder)[0] is None


def test_removed_vectors_are_not_found(folder, notes):
    with KnowledgeBase.open(folder, HashingEmbedder()) as kb:
        assert any(hit.vector_rank for hit in kb.search("tomatoes"))
        kb.remove(notes / "garden.txt")
        assert not any(hit.document.title == "garden" for hit in kb.search("tomatoes"))
        assert len(kb._index) == kb.stats().n_chunks


def test_open_readers_follow_other_connections(folder, notes):
    with KnowledgeBase.open(folder, HashingEmbedder()) as reader, KnowledgeBase.open(folder, HashingEmbedder()) as writer:
        reader.search("tomatoes")
        writer.remove(notes / "garden.txt")
        (notes / "kettle.txt").write_text("The kettle boils.")
        writer.ingest([notes / "kettle.txt"])
        hits = reader.search("kettle")
        assert hits[0].vector_rank == 1 and hits[0].document.title == "kettle"
        assert not any(hit.document.title == "garden" for hit in reader.search("tomatoes"))
