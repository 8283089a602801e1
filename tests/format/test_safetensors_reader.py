"""Files are read as the library safetensors reads them, and a damaged one is refused by name."""

import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from libcolibri.errors import FormatError
from libcolibri.safetensors_reader import DTYPES, read_arrays


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {kind: rng.integers(0, 2, (3, 5)).astype(dtype) for kind, dtype in DTYPES.items()}
    save_file(arrays | {"empty": np.zeros((0, 4), np.float32), "one": np.array(7, np.int64)}, tmp_path / "f", {"a": "b"})
    return tmp_path / "f"


def test_every_type_and_shape(path):
    arrays, metadata = read_arrays(path)
    expected = load_file(path)
    assert metadata == {"a": "b"} and arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype and array.flags.writeable
        np.testing.assert_array_equal(array, expected[name])


def test_a_file_that_becomes_shorter_while_it_is_read(path, monkeypatch):
    from libcolibri import safetensors_reader

    header = safetensors_reader.read_header

    def cut_after(where):
        slots = header(where)
        os.truncate(where, where.stat().st_size - 9)
        return slots

    monkeypatch.setattr(safetensors_reader, "read_header", cut_after)
    with pytest.raises(FormatError, match=r"/f: cannot be read \(ends at byte \d+, \d bytes too early\): copy it again"):
        read_arrays(path)


def test_metadata_that_is_none(tmp_path):
    header = b'{"__metadata__":{"a":1}}'
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(FormatError, match="no table of strings"):
        read_arrays(tmp_path / "f")
