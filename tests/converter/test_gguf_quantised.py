"""Quantised GGUF files of every family: blocks go into the model directory as they are, whatever rows llama.cpp had reordered."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from colibri_converter import convert
from colibri_converter.source import open_source

from libcolibri.format import dense_slots, expert_offsets, read_manifest
from tests.gguf_delta import NAMES, unpack
from tests.gguf_edit import rewrite

TINY = Path(__file__).parents[1] / "fixtures" / "tiny"
Q8_0, Q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


def quantised(name, kind, folder):
    """The family's file with every 16-bit matrix as `kind` where its rows are whole blocks, as llama.cpp's quantiser leaves it."""

    def kind_of(tensor):
        fits = tensor.tensor_type == gguf.GGMLQuantizationType.BF16 and tensor.shape[0] % 32 == 0
        return kind if fits else tensor.tensor_type

    return rewrite(unpack(name, folder / "plain.gguf"), folder / f"{name}.gguf", kind_of=kind_of)


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_another_order_are_the_same_blocks(name, tmp_path):
    path = quantised(name, Q4_0, tmp_path)
    plain, found = open_source(tmp_path / "plain.gguf"), open_source(path)
    assert (found.config, list(found.tensors)) == (plain.config, list(plain.tensors))
    kept = 0
    for canonical, tensor in found.tensors.items():
        exact = plain.tensors[canonical].read()
        if tensor.type != plain.tensors[canonical].type:  # rounding looks at 32 columns of a row: the order of rows does not matter to it
            exact = gguf.quants.dequantize(gguf.quants.quantize(exact, Q4_0), Q4_0)
            assert tensor.type == "q4_0", canonical
            kept += 1
        np.testing.assert_array_equal(tensor.read(), exact, err_msg=canonical)
    assert kept > 15  # every family has wide enough rows somewhere


@pytest.mark.parametrize("name", NAMES)
def test_the_file_and_the_checkpoint_become_the_same_q8_0(name, tmp_path):
    report = convert(quantised(name, Q8_0, tmp_path), tmp_path / "file", tokenizer=False)
    assert (report.recipe, report.fallbacks) == ("gguf", ())
    convert(TINY / name, tmp_path / "checkpoint", quant="q8_0", tokenizer=False)
    found, wanted = stored(tmp_path / "file"), stored(tmp_path / "checkpoint")
    assert found.keys() == wanted.keys()
    # Rows of no whole blocks are f16 from a checkpoint, and stay bf16 from a file; what is always f32 had its blocks in the file.
    same = [part for part in wanted if (found[part][0], wanted[part][0]) == ("q8_0", "q8_0")]
    assert len(same) > 8
    for part in same:
        np.testing.assert_array_equal(found[part][1], wanted[part][1], err_msg=str(part))


def stored(folder):
    """Tensor, or layer and part of all experts -> (type, bytes)."""
    manifest, raw = read_manifest(folder), np.fromfile(folder / "dense.safetensors", np.uint8)
    result = {name: (manifest.tensors[name].type, raw[slot.start : slot.end]) for name, slot in dense_slots(folder, manifest).items()}
    for layer, entry in manifest.experts.items():
        raw, starts = np.fromfile(folder / entry.file, np.uint8), expert_offsets(folder, manifest, layer)
        for name, part in entry.parts.items():
            experts = [raw[start + part.offset : start + part.offset + part.bytes] for start in starts]
            result[layer, name] = part.type, np.concatenate(experts)
    return result
