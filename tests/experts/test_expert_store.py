"""Reading experts: exact bytes in parallel; faults retried once, then named."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from libcolibri.arena import allocate
from libcolibri.drive_probe import DriveSettings
from libcolibri.errors import ExpertReadError, FormatError
from libcolibri.expert_store import ExpertStore
from libcolibri.file_reader import FileReader, ShortReadError
from libcolibri.format import expert_offsets, read_manifest
from tests.tiny_model import make_model


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "modèle 模型", seed=1, expert_quant={2: "q8_0"}, moe_intermediate_size=32)


def expected_bytes(folder, layer: int, expert: int) -> bytes:
    manifest = read_manifest(folder)
    start = expert_offsets(folder, manifest, layer)[expert]
    return (folder / manifest.experts[layer].file).read_bytes()[start : start + manifest.experts[layer].expert_bytes]


def read(store: ExpertStore, layer: int, experts: list[int]) -> list[bytes]:
    targets = allocate(len(experts) * store.expert_bytes[layer], "test").reshape(len(experts), -1)
    store.read(layer, experts, list(targets))
    return [target.tobytes() for target in targets]


@pytest.mark.parametrize("drop", [False, True])
def test_reads_exact_bytes(folder, drop):
    store = ExpertStore(folder, read_manifest(folder), drop_page_cache=drop)
    for layer in (0, 2):
        assert read(store, layer, [5, 0, 3]) == [expected_bytes(folder, layer, e) for e in (5, 0, 3)]
    assert store.expert_bytes[0] > store.expert_bytes[2] and store.total_bytes == 6 * sum(store.expert_bytes.values())
    store.close()


def test_direct_reads_where_the_drive_knows_them(folder, tmp_path):
    """A drive without direct access is read as any other; a file that ends between two aligned places is called too short."""
    entry = read_manifest(folder).experts[0]
    direct, plain = FileReader(folder / entry.file, direct=True), FileReader(folder / entry.file)
    start, target = expert_offsets(folder, read_manifest(folder), 0)[2], allocate(entry.expert_bytes, "test")
    for reader in (direct, plain):
        target[:] = 0
        reader.read_into(memoryview(target), start)
        assert target.tobytes() == expected_bytes(folder, 0, 2)
    assert not plain.direct
    if Path("/dev/shm").is_dir():
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as memory:
            memory.write((folder / entry.file).read_bytes())
            memory.flush()
            reader = FileReader(Path(memory.name), direct=True)
            reader.read_into(memoryview(target), start)
            assert target.tobytes() == expected_bytes(folder, 0, 2)
    cut = tmp_path / "cut"
    cut.write_bytes((folder / entry.file).read_bytes()[: start + entry.expert_bytes - 100])
    with pytest.raises(ShortReadError, match="too early"):
        FileReader(cut, direct=True).read_into(memoryview(target), start)


def test_pieces_of_a_large_expert(folder):
    store = ExpertStore(folder, read_manifest(folder), settings_for=lambda folder: DriveSettings(piece_bytes=1000))
    assert read(store, 0, [1, 2]) == [expected_bytes(folder, 0, e) for e in (1, 2)]


def test_short_reads_are_continued(folder, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:777]], offset))
    assert read(ExpertStore(folder, read_manifest(folder)), 0, [4]) == [expected_bytes(folder, 0, 4)]


def test_without_positioned_reads(folder, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "posix_fadvise")
    store = ExpertStore(folder, read_manifest(folder), drop_page_cache=True)
    assert read(store, 0, list(range(6))) == [expected_bytes(folder, 0, e) for e in range(6)]


def failing(monkeypatch, failures: int, error: OSError):
    """Let the first `failures` reads raise `error`; returns the list of attempts."""
    original, attempts = FileReader.read_into, []

    def read_into(self, target, offset):
        attempts.append(offset)
        if len(attempts) <= failures:
            raise error
        original(self, target, offset)

    monkeypatch.setattr(FileReader, "read_into", read_into)
    return attempts


def test_a_fault_is_retried_once(folder, monkeypatch):
    attempts = failing(monkeypatch, 1, OSError(errno.EIO, "Input/output error"))
    assert read(ExpertStore(folder, read_manifest(folder)), 2, [1]) == [expected_bytes(folder, 2, 1)]
    assert len(attempts) == 2


def test_a_lasting_fault_names_file_layer_and_expert(folder, monkeypatch):
    attempts = failing(monkeypatch, 99, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(ExpertReadError, match=r"experts-00002.safetensors: layer 2 expert 1 cannot be read .*Input/output error"):
        read(ExpertStore(folder, read_manifest(folder)), 2, [1])
    assert len(attempts) == 2


def test_a_file_cut_short_after_opening(folder):
    store = ExpertStore(folder, read_manifest(folder))
    path = folder / "experts-00000.safetensors"
    whole = expected_bytes(folder, 0, 4)
    os.truncate(path, path.stat().st_size - 1)
    assert read(store, 0, [4]) == [whole]
    with pytest.raises(ExpertReadError, match=r"layer 0 expert 5 cannot be read .*1 bytes too early"):
        read(store, 0, [5])
    with pytest.raises(FormatError, match="cut short"):
        ExpertStore(folder, read_manifest(folder))


def overwrite(path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_wrong_bytes_are_noticed_where_experts_are_verified(folder):
    manifest = read_manifest(folder)
    path, right = folder / manifest.experts[2].file, expected_bytes(folder, 2, 1)
    overwrite(path, expert_offsets(folder, manifest, 2)[1] + 7, bytes([right[7] ^ 1]))
    plain, careful = ExpertStore(folder, manifest), ExpertStore(folder, manifest, verify=True, drop_page_cache=True)
    assert read(plain, 2, [1]) != [right]  # a damaged file that was so when it was opened
    assert read(careful, 2, [0, 2]) == [expected_bytes(folder, 2, e) for e in (0, 2)]
    with pytest.raises(ExpertReadError, match=r"layer 2 expert 1 has wrong bytes \(checksum \w+, expected \w+\)") as caught:
        read(careful, 2, [0, 1, 2])
    assert "colibri verify" in str(caught.value) and "\n" not in str(caught.value)
    overwrite(path, expert_offsets(folder, manifest, 2)[1] + 7, right[7:8])
    assert read(careful, 2, [1]) == [right]


def test_wrong_bytes_are_read_once_more(folder, monkeypatch):
    """A flipped bit on the way, as a cable or a faulty memory makes, is not in the file."""
    original, attempts = FileReader.read_into, []

    def flip_once(self, target, offset):
        original(self, target, offset)
        attempts.append(offset)
        if len(attempts) == 1:
            target[100] ^= 4

    monkeypatch.setattr(FileReader, "read_into", flip_once)
    store = ExpertStore(folder, read_manifest(folder), verify=True)
    assert read(store, 0, [3]) == [expected_bytes(folder, 0, 3)] and len(attempts) == 2


def test_a_file_that_changes_while_it_is_open_is_compared_with_its_checksums(folder):
    """Only what is still the model's is used; nobody asked for verification."""
    manifest = read_manifest(folder)
    path, offsets = folder / manifest.experts[0].file, expert_offsets(folder, manifest, 0)
    store, right = ExpertStore(folder, manifest), [expected_bytes(folder, 0, e) for e in range(6)]
    overwrite(path, offsets[4], bytes(100))
    assert read(store, 0, [0, 1, 2, 3, 5]) == [*right[:4], right[5]]
    with pytest.raises(ExpertReadError, match=r"layer 0 expert 4 has wrong bytes .*changed while the model was open"):
        read(store, 0, [4])


@pytest.mark.parametrize("happening", ["deleted", "replaced", "folder renamed"])
def test_what_happens_to_names_does_not_matter_to_open_files(folder, happening):
    store, right = ExpertStore(folder, read_manifest(folder)), expected_bytes(folder, 0, 4)
    path = folder / "experts-00000.safetensors"
    if happening == "deleted":
        path.unlink()
    elif happening == "replaced":
        (folder / "other").write_bytes(bytes(path.stat().st_size))
        (folder / "other").replace(path)
    else:
        folder.rename(folder.with_name("elsewhere"))
    assert read(store, 0, [4]) == [right]


def test_wrong_target_is_our_own_bug(folder):
    store = ExpertStore(folder, read_manifest(folder))
    with pytest.raises(ValueError, match="a target of 5 bytes"):
        store.read(0, [0], [np.zeros(5, np.uint8)])
