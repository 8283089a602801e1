"""Headers of safetensors files: what ours and safetensors' own writer produce is read, everything else is a FormatError."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from libcolibri.errors import FormatError
from libcolibri.safetensors_header import build_header, read_header, strict_json


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_safetensors_writes(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(5, np.int8), "c": np.ones((2, 1), np.float16)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    slots = read_header(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert {name: slot.shape for name, slot in slots.items()} == {name: array.shape for name, array in arrays.items()}
    assert all(raw[slots[name].start : slots[name].end] == array.tobytes() for name, array in arrays.items())


def test_safetensors_reads_what_we_write(tmp_path):
    path = tmp_path / "ü.safetensors"
    header = build_header([("experts.0", "U8", (4096,)), ("experts.1", "U8", (4096,))], 4096)
    path.write_bytes(header + bytes(4096) + b"\1" * 4096)
    assert len(header) % 4096 == 0
    assert load_file(path)["experts.1"].tolist() == [1] * 4096


FAULTS = {
    "overlap": ({"a": entry(), "b": entry(offsets=(2, 6))}, 6),
    "hole": ({"a": entry(), "b": entry(offsets=(8, 12))}, 12),
    "short": ({"a": entry()}, 3),
    "long": ({"a": entry()}, 5),
    "past the end": ({"a": entry(shape=(1 << 40,), offsets=(0, 1 << 40))}, 4),
    "overflowing shape": ({"a": entry(shape=(1 << 62, 4, 1 << 62, 4), offsets=(0, 0))}, 0),
    "wrong size": ({"a": entry("F32")}, 4),
    "unknown type": ({"a": entry("F4")}, 4),
    "negative": ({"a": entry(shape=(-4,), offsets=(0, -4))}, 4),
    "backwards": ({"a": entry(offsets=(4, 0))}, 4),
    "boolean": ({"a": entry(shape=(True,), offsets=(0, 1))}, 1),
    "no object": ({"a": [1, 2]}, 4),
    "list": ([1, 2], 0),
    "extra key": ({"a": entry() | {"x": 1}}, 4),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_headers(tmp_path, name):
    header, size = FAULTS[name]
    with pytest.raises(FormatError) as error:
        read_header(write(tmp_path / "m.safetensors", header, bytes(size)))
    assert "m.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


RAW_FAULTS = [
    b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":NaN}', b"1" * 5000,
    b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
]  # fmt: skip


@pytest.mark.parametrize("header", RAW_FAULTS)
def test_headers_that_are_no_json_object(tmp_path, header):
    with pytest.raises(FormatError):
        read_header(write(tmp_path / "m.safetensors", header))


@pytest.mark.parametrize("raw", [b"", b"\0" * 7, struct.pack("<Q", 1 << 63), struct.pack("<Q", 9) + b"{}"])
def test_files_shorter_than_their_header(tmp_path, raw):
    (tmp_path / "m.safetensors").write_bytes(raw)
    with pytest.raises(FormatError):
        read_header(tmp_path / "m.safetensors")


def test_missing_file(tmp_path):
    with pytest.raises(FormatError, match="No such file"):
        read_header(tmp_path / "m.safetensors")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_files_give_a_result_or_a_format_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    raw = bytearray(build_header([("model.a", "F32", (3, 2)), ("model.b", "U8", (16,))], 64) + bytes(40))
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        slots = read_header(path)
    except FormatError:
        return
    assert all(8 <= slot.start <= slot.end <= len(raw) for slot in slots.values())


def test_constants_that_are_no_json_are_read_on_request_only():
    raw = b'{"limits": [0.0, Infinity]}'
    assert strict_json(raw, "config.json", bare_constants=True) == {"limits": [0.0, {"__float__": "Infinity"}]}
    with pytest.raises(FormatError, match="Infinity is not JSON"):
        strict_json(raw, "the header")
