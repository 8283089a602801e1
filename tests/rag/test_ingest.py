"""Ingest: in step with the files, whatever happens in between."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from colibri_rag import EmbedderMismatchError, IngestError, KnowledgeBase, KnowledgeBaseError
from colibri_rag.discover import discover
from fakes import HashingEmbedder

HERE = str(Path(__file__).parent)


def names(paths):
    return sorted(os.path.basename(path) for path in paths)


def check_consistent(kb):
    """Documents, chunks, vectors, full text and FAISS tell the same."""
    stats = kb.stats()
    assert stats.n_chunks == stats.n_vectors == sum(record.n_chunks for record in kb.documents()) == len(kb._index)
    fts = kb._store._rows("SELECT count(*) FROM chunks_fts")[0][0]
    assert fts == stats.n_chunks
    kb._store._connection.execute("INSERT INTO chunks_fts (chunks_fts) VALUES ('integrity-check')")
    assert kb._store._rows("PRAGMA integrity_check") == [("ok",)]
    assert kb._store._rows("PRAGMA foreign_key_check") == []


def test_added_changed_moved_removed(kb, notes, embedder):
    report = kb.ingest([notes])
    assert names(report.added) == ["cache.md", "garden.txt", "中文.md"] and report.is_complete
    again = kb.ingest([notes])
    assert len(again.unchanged) == 3 and again.n_embedded == 0 and not again.added
    ids = {hit.chunk.id for hit in kb.search("tomatoes")}

    (notes / "sub").mkdir()
    (notes / "garden.txt").rename(notes / "sub" / "beds.txt")
    (notes / "cache.md").write_text((notes / "cache.md").read_text() + "\n## More\n\nIt counts hits.\n")
    (notes / "中文.md").unlink()
    (notes / "new.txt").write_text("Something new about kettles.")
    embedder.n_embedded = 0
    report = kb.ingest([notes])
    assert names(report.changed) == ["cache.md"] and names(report.removed) == ["中文.md"] and names(report.added) == ["new.txt"]
    assert [names(pair) for pair in report.moved] == [["beds.txt", "garden.txt"]]
    assert embedder.n_embedded == 2, "unchanged chunks of a changed document keep their vectors"
    assert {hit.chunk.id for hit in kb.search("tomatoes")} & ids, "a moved document keeps its chunks"
    assert not any("缓存" in hit.chunk.text for hit in kb.search("缓存"))
    check_consistent(kb)


def test_dry_run_changes_nothing(kb, notes):
    report = kb.ingest([notes], dry_run=True)
    assert len(report.added) == 3 and report.dry_run
    assert kb.stats().n_documents == 0


def test_dry_run_foretells_what_is_skipped_and_makes_nothing(tmp_path, notes, embedder):
    (notes / "empty.txt").write_bytes(b"")
    (notes / "blank.md").write_text(" \n\n")
    (notes / "binary.txt").write_bytes(bytes(range(256)) * 4)
    before = sorted(tmp_path.rglob("*"))
    with KnowledgeBase.open(":memory:", embedder) as kb:
        dry = kb.ingest([notes], dry_run=True)
        assert kb.stats().n_documents == 0
    assert sorted(tmp_path.rglob("*")) == before and not os.path.exists(":memory:")
    with KnowledgeBase.open(tmp_path / "kb", embedder) as kb:
        real = kb.ingest([notes])
    assert names(dry.added) == names(real.added) == ["cache.md", "garden.txt", "中文.md"]
    assert sorted(dry.skipped, key=repr) == sorted(real.skipped, key=repr) and len(dry.skipped) == 3


def test_a_knowledge_base_in_memory_works_like_any_other(notes, embedder):
    with KnowledgeBase.open(":memory:", embedder) as kb:
        kb.ingest([notes])
        assert "黑猫" in kb.search("散步")[0].chunk.text and kb.stats().size_bytes > 0
        check_consistent(kb)
        assert names(kb.remove(notes / "garden.txt")) == ["garden.txt"]


def test_a_failed_first_ingest_leaves_nothing(tmp_path, embedder, notes):
    (tmp_path / "empty").mkdir()
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "a.txt").write_bytes(b"")
    with pytest.raises(IngestError), KnowledgeBase.open(tmp_path / "kb", embedder) as kb:
        kb.ingest([tmp_path / "empty"])
    assert not (tmp_path / "kb").exists()
    with KnowledgeBase.open(tmp_path / "kb", embedder) as kb:
        assert kb.ingest([tmp_path / "unreadable"]).skipped
    assert not (tmp_path / "kb").exists()
    (tmp_path / "kb").mkdir()
    (tmp_path / "kb" / "mine").write_text("a file of the user")
    KnowledgeBase.open(tmp_path / "kb", embedder).close()
    assert names((tmp_path / "kb").iterdir()) == ["mine"]
    with KnowledgeBase.open(tmp_path / "kb", embedder) as kb:
        kb.ingest([notes])
        kb.remove(notes)
    assert (tmp_path / "kb" / "kb.sqlite").exists(), "an emptied knowledge base is kept"


def test_a_new_knowledge_base_that_others_have_open_stays(tmp_path, embedder, notes):
    first, second = (KnowledgeBase.open(tmp_path / "kb", embedder) for _ in range(2))
    first.close()
    second.ingest([notes])
    second.close()
    with KnowledgeBase.open(tmp_path / "kb", embedder, create=False) as kb:
        assert kb.stats().n_documents == 3
        check_consistent(kb)


def test_links_to_folders_outside_are_not_followed(tmp_path):
    for path in ("in/sub", "out"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "a.txt").write_text("text")
    (tmp_path / "in" / "up").symlink_to("..")
    (tmp_path / "in" / "away").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "zagain").symlink_to("sub")
    (tmp_path / "in" / "file.txt").symlink_to(tmp_path / "out" / "a.txt")
    found = discover([tmp_path / "in"])
    assert [os.path.relpath(path, tmp_path) for path in found.files] == ["in/file.txt", "in/sub/a.txt"]
    assert names(item.path for item in found.ignored) == ["away", "up"] and "outside" in found.ignored[0].reason
    (tmp_path / "link").symlink_to("in")
    assert len(discover([tmp_path / "link"]).files) == 2, "a link that is given itself is followed"


def test_remove_missing_false_keeps_documents(kb, notes):
    kb.ingest([notes])
    (notes / "garden.txt").unlink()
    assert not kb.ingest([notes], remove_missing=False).removed
    assert kb.stats().n_documents == 3


def test_only_documents_under_the_given_paths_are_removed(kb, notes, tmp_path):
    other = tmp_path / "notes2"
    other.mkdir()
    (other / "x.txt").write_text("other folder")
    kb.ingest([notes, other])
    (notes / "garden.txt").unlink()
    (other / "x.txt").unlink()
    assert names(kb.ingest([notes]).removed) == ["garden.txt"]


def test_a_missing_folder_removes_nothing(kb, notes):
    kb.ingest([notes])
    notes.rename(notes.parent / "away")
    with pytest.raises(IngestError, match=r"does not exist.*remove it by its path"):
        kb.ingest([notes])
    assert kb.stats().n_documents == 3
    assert len(kb.remove(notes)) == 3
    check_consistent(kb)


def test_a_deleted_file_that_is_named_is_removed(kb, notes):
    kb.ingest([notes])
    (notes / "garden.txt").unlink()
    assert names(kb.ingest([notes / "garden.txt"]).removed) == ["garden.txt"]


def test_empty_folder_and_emptied_folder(kb, notes, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(IngestError, match=r"no documents in .*empty.*supported types: .*\.md"):
        kb.ingest([tmp_path / "empty"])
    kb.ingest([notes])
    for file in notes.iterdir():
        file.unlink()
    assert len(kb.ingest([notes]).removed) == 3


def test_skipped_files_have_reasons_and_old_versions_stay(kb, notes):
    kb.ingest([notes])
    (notes / "garden.txt").write_bytes(os.urandom(4000))
    (notes / "empty.txt").write_text("")
    (notes / "picture.png").write_bytes(b"\x89PNG")
    os.mkfifo(notes / "pipe.txt")
    report = kb.ingest([notes])
    assert {os.path.basename(skipped.path): skipped.reason.split()[0] for skipped in report.skipped}.keys() == {"garden.txt", "empty.txt"}
    assert not report.is_complete and not report.changed and not report.removed
    assert names(ignored.path for ignored in report.ignored) == ["picture.png", "pipe.txt"]
    assert any("Water" in hit.chunk.text for hit in kb.search("tomatoes"))


@pytest.mark.parametrize(
    "name", ["new\nline.txt", "quote'\".md", "%like_.txt", "中文 文档.md", "emoji 🦜.txt", "-rf.txt", "x; DROP TABLE documents.txt"]
)
def test_odd_file_names(kb, tmp_path, name):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / name).write_text("A sentence about parrots.")
    kb.ingest([folder])
    hit = kb.search("parrots")[0]
    assert os.path.basename(hit.document.path) == name
    assert kb.remove(folder / name) == [str(folder / name)]


def test_names_that_are_not_utf8_are_reported(tmp_path):
    folder = os.fsencode(tmp_path) + b"/bad"
    os.mkdir(folder)
    with open(folder + b"/\xff.txt", "w") as file:
        file.write("x")
    found = discover([os.fsdecode(folder)])
    assert "UTF-8" in found.skipped[0].reason and not found.files


def test_symbolic_link_loops_end_and_files_are_read_once(kb, notes):
    (notes / "loop").symlink_to(notes)
    (notes / "also.txt").symlink_to(notes / "garden.txt")
    (notes / "dangling.txt").symlink_to(notes / "nowhere")
    report = kb.ingest([notes])
    assert len(report.added) == 3
    assert "same file" in next(ignored.reason for ignored in report.ignored)
    assert [os.path.basename(skipped.path) for skipped in report.skipped] == ["dangling.txt"]


def test_unreadable_files_and_folders(kb, notes, monkeypatch):
    """As root nothing is unreadable, so the system calls are made to refuse."""
    (notes / "locked").mkdir()
    (notes / "locked" / "inside.txt").write_text("kept although the folder cannot be listed")
    kb.ingest([notes])
    real_list, real_open = os.listdir, os.open

    def refuse(call, word):
        def refused(path, *rest, **more):
            if str(path).endswith(word):
                raise PermissionError(13, "Permission denied")
            return call(path, *rest, **more)

        return refused

    monkeypatch.setattr(os, "listdir", refuse(real_list, "locked"))
    monkeypatch.setattr(os, "open", refuse(real_open, "garden.txt"))
    report = kb.ingest([notes])
    assert {os.path.basename(skipped.path) for skipped in report.skipped} == {"locked", "garden.txt"}
    assert all("Permission denied" in skipped.reason for skipped in report.skipped)
    assert not report.removed and kb.stats().n_documents == 4


def test_progress_is_monotonous_and_honest(kb, notes):
    seen = []
    kb.ingest([notes], on_progress=seen.append)
    embed = [progress for progress in seen if progress.phase == "embed"]
    assert [progress.done_bytes for progress in embed] == sorted(progress.done_bytes for progress in embed)
    total = sum(file.stat().st_size for file in notes.iterdir())
    assert {progress.total_bytes for progress in embed} == {total}
    assert embed[-1].done_bytes == total and embed[-1].done_documents == embed[-1].total_documents == 3
    assert embed[-1].n_chunks == kb.stats().n_chunks


def test_cancel_keeps_what_is_committed(kb, notes):
    cancel = threading.Event()

    def on_progress(progress):
        if progress.phase == "embed" and progress.done_documents == 1:
            cancel.set()

    report = kb.ingest([notes], on_progress=on_progress, cancel=cancel)
    assert report.cancelled and not report.is_complete
    assert len(report.added) == kb.stats().n_documents == 1
    assert len(kb.ingest([notes]).added) == 2
    check_consistent(kb)


def test_kill_during_ingest_then_resume(tmp_path, embedder):
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"Document number{number}. " + "It has words about cabinets. " * 40)
    script = f"""
import sys, time
sys.path.insert(0, {HERE!r})
from colibri_rag import KnowledgeBase
from fakes import HashingEmbedder
class Slow(HashingEmbedder):
    def embed_passages(self, passages):
        time.sleep(0.01)
        return super().embed_passages(passages)
with KnowledgeBase.open({str(tmp_path / "kb")!r}, Slow()) as kb:
    kb.ingest([{str(folder)!r}], on_progress=lambda p: print(p.done_documents, flush=True))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    embedding = False
    for line in process.stdout:
        embedding = embedding or line.strip() == "59"  # the last of the comparing phase
        if embedding and line.strip() == "20":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with KnowledgeBase.open(tmp_path / "kb", embedder, create=False) as kb:
        done = kb.stats().n_documents
        assert 20 <= done < 60
        check_consistent(kb)
        report = kb.ingest([folder])
        assert len(report.unchanged) == done and len(report.added) == 60 - done
        check_consistent(kb)
        assert os.path.basename(kb.search("number37")[0].document.path) == "37.txt"


def test_reading_while_another_process_ingests(tmp_path, embedder):
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"Document number{number} about lighthouses.")
    with KnowledgeBase.open(tmp_path / "kb", embedder) as reader:
        script = f"""
import sys
sys.path.insert(0, {HERE!r})
from colibri_rag import KnowledgeBase
from fakes import HashingEmbedder
with KnowledgeBase.open({str(tmp_path / "kb")!r}, HashingEmbedder()) as kb:
    kb.ingest([{str(folder)!r}])
"""
        process = subprocess.Popen([sys.executable, "-c", script])
        seen = 0
        while process.poll() is None:
            hits = reader.search("lighthouses", 50)
            assert all(hit.cosine is not None for hit in hits)
            assert len(hits) >= seen
            seen = len(hits)
            time.sleep(0.005)
        assert process.returncode == 0
        assert len(reader.search("lighthouses", 50)) == 40
        check_consistent(reader)


def test_two_processes_ingest_the_same_folder(tmp_path, embedder, notes):
    script = f"""
import sys
sys.path.insert(0, {HERE!r})
from colibri_rag import KnowledgeBase
from fakes import HashingEmbedder
with KnowledgeBase.open({str(tmp_path / "kb")!r}, HashingEmbedder()) as kb:
    kb.ingest([{str(notes)!r}])
"""
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    with KnowledgeBase.open(tmp_path / "kb", embedder) as kb:
        assert kb.stats().n_documents == 3
        check_consistent(kb)


def test_another_embedder_is_refused(tmp_path, notes):
    with KnowledgeBase.open(tmp_path / "kb", HashingEmbedder(64)) as kb:
        kb.ingest([notes])
    for other in (HashingEmbedder(32), HashingEmbedder(64, name="other"), None):
        with pytest.raises(EmbedderMismatchError, match=r"was made with embedder 'hashing-64'.*new folder"):
            KnowledgeBase.open(tmp_path / "kb", other)


def test_an_embedder_is_named_as_its_user_knows_it(tmp_path, notes):
    first, second = HashingEmbedder(64), HashingEmbedder(32)
    first.name, second.name = "small-model", "large-model"
    with KnowledgeBase.open(tmp_path / "kb", first) as kb:
        kb.ingest([notes])
    with pytest.raises(EmbedderMismatchError, match=r"'small-model' \(64 dim.*now 'large-model' \(32 dim"):
        KnowledgeBase.open(tmp_path / "kb", second)
    second.name = "small-model"
    with pytest.raises(EmbedderMismatchError, match=r"'small-model hashing-' .*'small-model hashing-'"):
        KnowledgeBase.open(tmp_path / "kb", second)


def test_not_a_knowledge_base(tmp_path, embedder):
    with pytest.raises(KnowledgeBaseError, match="does not exist"):
        KnowledgeBase.open(tmp_path / "none", embedder, create=False)
    (tmp_path / "kb.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(KnowledgeBaseError, match="cannot be used"):
        KnowledgeBase.open(tmp_path, embedder)


def test_newer_schema_is_refused(tmp_path, embedder):
    (tmp_path / "a.txt").write_text("A document about kettles.")
    with KnowledgeBase.open(tmp_path, embedder) as kb:
        kb.ingest([tmp_path / "a.txt"])
        kb._store._connection.execute("PRAGMA user_version = 99")
    with pytest.raises(KnowledgeBaseError, match="schema version 99"):
        KnowledgeBase.open(tmp_path, embedder)


def test_changed_tokeniser_indexes_again(tmp_path, embedder, notes):
    with KnowledgeBase.open(tmp_path / "kb", embedder) as kb:
        kb.ingest([notes])
        kb._store._connection.execute("UPDATE facts SET value = 'older' WHERE name = 'text_index'")
    with KnowledgeBase.open(tmp_path / "kb", embedder) as kb:
        assert kb.search("黑猫")[0].lexical_rank == 1
        check_consistent(kb)


def test_without_an_embedder_search_is_lexical(tmp_path, notes):
    with KnowledgeBase.open(tmp_path / "kb", None) as kb:
        kb.ingest([notes])
        hit = kb.search("散步")[0]
        assert "黑猫" in hit.chunk.text and hit.cosine is None and kb.relevant("黑猫散步", [hit]) == [hit]
