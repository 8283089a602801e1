"""GGUF headers: crafted, cut or mutated ones end in a SourceError, never in a crash or a wrong tensor."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from colibri_converter.gguf import read_gguf
from colibri_converter.source import open_source
from hypothesis import given, settings
from hypothesis import strategies as st
from model_dirs import write_gguf

from libcolibri.errors import ColibriError, SourceError

TINY = Path(__file__).parent.parent / "fixtures" / "tiny"


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, payload):
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name="t", dims=(4,), kind=0, offset=0, n_dims=None):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims) if n_dims is None else n_dims, *dims, kind, offset)


def file(path, tensors=(), pairs=(), data=b"", version=3, n_tensors=None, n_pairs=None):
    head = struct.pack(
        "<4sIQQ", b"GGUF", version, len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs
    )
    head += b"".join(pairs) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def test_reads_what_the_gguf_package_writes(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "ü.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "你好", ""])
    writer.add_array("tokenizer.ggml.scores", [1.5, -2.0])
    writer.add_bool("flag", True)
    writer.add_float64("real", 0.25)
    data = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    writer.add_tensor("t", data)
    writer.add_tensor("u", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "ü.gguf")
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "你好", ""]
    assert found.metadata["tokenizer.ggml.scores"].tolist() == [1.5, -2.0]
    assert (found.metadata["flag"], found.metadata["real"]) == (True, 0.25)
    assert found.tensors["t"].shape == (2, 3, 4)
    assert found.raw(found.tensors["t"]).tobytes() == data.tobytes()
    assert found.tensors["u"].type == "f16"


FAULTS = {
    "version 1": {"version": 1},
    "big-endian": {"version": 0x03000000},
    "too many tensors": {"n_tensors": 1 << 62},
    "too many pairs": {"n_pairs": 1 << 63},
    "overflowing product": {"tensors": [tensor(dims=(1 << 33, 1 << 33, 1 << 33, 1 << 33))]},
    "negative as unsigned": {"tensors": [tensor(dims=((1 << 64) - 1,))]},
    "zero": {"tensors": [tensor(dims=(0,))]},
    "five dimensions": {"tensors": [tensor(dims=(1, 1, 1, 1, 1))]},
    "no dimension": {"tensors": [tensor(dims=())]},
    "twice": {"tensors": [tensor(), tensor(offset=32)], "data": bytes(64)},
    "overlap": {"tensors": [tensor(dims=(16,)), tensor("u", dims=(16,), offset=32)], "data": bytes(128)},
    "unaligned": {"tensors": [tensor(offset=4)], "data": bytes(64)},
    "huge offset": {"tensors": [tensor(offset=(1 << 64) - 32)], "data": bytes(64)},
    "data cut short": {"tensors": [tensor(dims=(16,))], "data": bytes(63)},
    "row no multiple of a block": {"tensors": [tensor(dims=(33,), kind=8)], "data": bytes(64)},
    "name beyond the file": {"tensors": [struct.pack("<Q", 1 << 60)], "data": bytes(64)},
    "name not UTF-8": {"tensors": [tensor(b"\xff\xfe")], "data": bytes(64)},
    "string beyond the file": {"pairs": [text("k") + struct.pack("<IQ", 8, 1 << 62)], "data": bytes(64)},
    "array beyond the file": {"pairs": [text("k") + struct.pack("<IIQ", 9, 4, 1 << 62)], "data": bytes(64)},
    "string array beyond the file": {"pairs": [text("k") + struct.pack("<IIQ", 9, 8, 1 << 40)], "data": bytes(64)},
    "nested arrays": {"pairs": [text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50], "data": bytes(64)},
    "unknown value type": {"pairs": [text("k") + struct.pack("<I", 77)], "data": bytes(64)},
    "key twice": {"pairs": [pair("k", 4, bytes(4)), pair("k", 4, bytes(4))]},
    "alignment 0": {"pairs": [pair("general.alignment", 4, bytes(4))]},
    "alignment as text": {"pairs": [pair("general.alignment", 8, text("x"))]},
}


@pytest.mark.parametrize("name", FAULTS)
def test_crafted_headers(tmp_path, name):
    with pytest.raises(SourceError) as error:
        read_gguf(file(tmp_path / "crafted.gguf", **FAULTS[name]))
    assert "crafted.gguf" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "shown"), [(9, "q8_1"), (41, "q1_0"), (42, "q2_0"), (99, "number 99")])
def test_unsupported_types_are_named_with_what_is_supported(tmp_path, kind, shown):
    with pytest.raises(SourceError, match=f"'t' has type {shown}, .*only f32, f16, .*q6_k"):
        read_gguf(file(tmp_path / "x.gguf", [tensor(dims=(256,), kind=kind)], data=bytes(512)))


def test_an_empty_file(tmp_path):
    (tmp_path / "x.gguf").touch()
    with pytest.raises(SourceError, match="empty"):
        read_gguf(tmp_path / "x.gguf")


def test_unsupported_architectures_are_named(tmp_path):
    path = file(tmp_path / "x.gguf", pairs=[pair("general.architecture", 8, text("mamba"))])
    with pytest.raises(SourceError, match="'mamba' is not supported, only bert, deepseek2"):
        open_source(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "sound.gguf", TINY / "qwen3_moe", "Q8_0").read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_files_open_or_give_a_colibri_error(sound, tmp_path_factory, data):
    path, header = tmp_path_factory.getbasetemp() / "fuzz.gguf", 4000
    raw = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(4, header))] = data.draw(st.sampled_from([0, 1, 8, 127, 128, 255]))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    path.write_bytes(raw)
    try:
        source = open_source(path)
    except ColibriError:
        return
    assert all(tensor.blocks.shape[0] == tensor.rows for tensor in source.tensors.values())


def split(folder: Path, *, says=None, total=5) -> list[Path]:
    """Three files by the gguf package, of 2, 2 and 1 tensors; `says` alters what a part says of itself: number -> (no, count)."""
    paths, left = [], [(f"t{i}", np.full((2, 4), i, np.float32)) for i in range(5)]
    for number in range(3):
        paths.append(folder / f"m-{number + 1:05d}-of-00003.gguf")
        writer = gguf.GGUFWriter(paths[-1], "llama")
        no, count = (says or {}).get(number, (number, 3))
        writer.add_uint16("split.no", no)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total)
        if number == 0:
            writer.add_string("general.name", "whole")
        for name, values in left[2 * number : 2 * number + 2]:
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_split_files_are_one(tmp_path):
    paths = split(tmp_path)
    for given_path in paths:
        found = read_gguf(given_path)
        assert found.path == paths[0] and found.metadata["general.name"] == "whole" and list(found.tensors) == [f"t{i}" for i in range(5)]
        for i, entry in enumerate(found.tensors.values()):
            assert (found.raw(entry).view(np.float32) == i).all()
        assert found.nbytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda paths: paths[1].unlink(), r"m-00002-of-00003.gguf: missing, m-00001-of-00003.gguf is one of 3 parts"),
        (lambda paths: paths[0].rename(paths[0].with_name("model.gguf")), "is one of 3 parts, but not called so"),
        (lambda paths: paths[1].write_bytes(paths[2].read_bytes()), "says that it is part 2 of 3, counting from 0, expected 1 of 3"),
    ],
)
def test_split_files_that_are_not_whole(tmp_path, damage, message):
    paths = split(tmp_path)
    damage(paths)
    first = next(path for path in (paths[0], tmp_path / "model.gguf") if path.exists())
    with pytest.raises(SourceError, match=message):
        read_gguf(first)


def test_split_files_of_two_downloads(tmp_path):
    with pytest.raises(SourceError, match="3 parts have 5 tensors, the first says 6"):
        read_gguf(split(tmp_path, total=6)[0])


def test_a_split_count_without_sense(tmp_path):
    with pytest.raises(SourceError, match=r"split\.count is 0"):
        read_gguf(split(tmp_path, says={0: (0, 0)})[0])
