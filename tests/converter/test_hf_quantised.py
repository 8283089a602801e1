"""FP8 and MXFP4 tensors against a plain reading of their definitions."""

from pathlib import Path

import numpy as np
import pytest
from colibri_converter.hf_tensors import Quantization, read_quantization, stored_tensors

from libcolibri.errors import SourceError
from libcolibri.safetensors_header import build_header, read_header

_RNG = np.random.default_rng(0)
CODES = (_RNG.integers(0, 127, 4096) + 128 * _RNG.integers(0, 2, 4096)).astype(np.uint8)  # no NaN


def read(path, tensors, quantization):
    """What stored_tensors makes of a file of these (name, dtype, array)."""
    header = build_header(((name, dtype, array.shape) for name, dtype, array in tensors), 64)
    path.write_bytes(header + b"".join(np.ascontiguousarray(array).tobytes() for _, _, array in tensors))
    return stored_tensors({name: (path, slot) for name, slot in read_header(path).items()}, quantization)


def e4m3(code):
    """One number by the definition of the type."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp8(tmp_path, shape, scale_shape, block, suffix="_scale_inv"):
    codes, scales = CODES[: np.prod(shape)].reshape(shape), np.random.default_rng(2).random(scale_shape, np.float32)
    files = [("w.weight", "F8_E4M3", codes), (f"w.weight{suffix}", "F32", scales), ("w.input_scale", "F32", np.ones(1, np.float32))]
    found = read(tmp_path / "a.safetensors", files, Quantization("fp8", block))
    assert found.keys() == {"w.weight"}
    return found["w.weight"], np.array([e4m3(code) for code in codes.reshape(-1).tolist()], np.float32).reshape(shape), scales


@pytest.mark.parametrize(("shape", "block"), [((40, 64), (32, 32)), ((33, 70), (16, 32)), ((3, 20, 24), (8, 8)), ((576, 7), (128, 128))])
def test_ragged_blocks_of_fp8(tmp_path, shape, block):
    grid = tuple(-(-n // b) for n, b in zip(shape[-2:], block, strict=True))
    tensor, values, scales = fp8(tmp_path, shape, (*shape[:-2], *grid), block)
    wanted = values * np.repeat(np.repeat(scales, block[0], -2), block[1], -1)[..., : shape[-2], : shape[-1]]
    assert tensor.shape == shape
    assert np.array_equal(tensor.read(), wanted.reshape(-1, shape[-1]))
    assert np.array_equal(tensor.read(5, 17), wanted.reshape(-1, shape[-1])[5:17])


@pytest.mark.parametrize("scale_shape", [(), (1,), (12, 1), (12,)])
def test_one_scale_for_a_tensor_or_for_each_row_of_fp8(tmp_path, scale_shape):
    tensor, values, scales = fp8(tmp_path, (12, 20), scale_shape, None, "_scale")
    assert np.array_equal(tensor.read(), values * (scales.reshape(12, 1) if scales.size == 12 else scales.reshape(())))


def test_scales_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(SourceError, match=r"scales of shape \(2, 3\), weight_block_size \(32, 32\) says \(2, 2\)"):
        fp8(tmp_path, (40, 64), (2, 3), (32, 32))
    with pytest.raises(SourceError, match="no weight_block_size"):
        fp8(tmp_path, (40, 64), (2, 2), None)
    with pytest.raises(SourceError, match="without scales"):
        read(tmp_path / "b.safetensors", [("w.weight", "F8_E4M3", CODES[:64].reshape(8, 8))], Quantization("fp8", (8, 8)))


def test_mxfp4_changes_its_order_and_nothing_else(tmp_path):
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
    packed, exponents = CODES[:1280].reshape(2, 8, 5, 16), np.arange(100, 180, dtype=np.uint8).reshape(2, 8, 5)
    files = [("e.down_proj_blocks", "U8", packed), ("e.down_proj_scales", "U8", exponents), ("e.norm", "F32", np.ones(3, np.float32))]
    found = read(tmp_path / "a.safetensors", files, Quantization("mxfp4"))
    assert found.keys() == {"e.down_proj_blocks", "e.norm"}
    tensor = found["e.down_proj_blocks"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(2, 8, 5, 32)
    wanted = np.ldexp(np.array(values, np.float32)[codes], exponents[..., None].astype(int) - 127)
    assert (tensor.type, tensor.shape) == ("mxfp4", (2, 8, 160))
    assert np.array_equal(tensor.read(), wanted.reshape(16, 160))
    assert np.array_equal(tensor.part(8, 16).reordered(np.array([3, 1])).read(), wanted[1, [3, 1]].reshape(2, 160))
    with pytest.raises(SourceError, match="no down_proj_scales"):
        read(tmp_path / "b.safetensors", files[:1], Quantization("mxfp4"))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, Quantization("")),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Quantization("fp8", (128, 128))),
        ({"quant_method": "fbgemm_fp8"}, Quantization("fbgemm_fp8")),
        ({"quant_method": "mxfp4"}, Quantization("mxfp4")),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
            },
            Quantization("compressed-tensors"),
        ),
    ],
)
def test_methods_that_are_read(stated, expected):
    assert read_quantization({"quantization_config": stated}, Path("m")) == expected


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ],
)
def test_methods_that_are_refused_by_name(stated):
    with pytest.raises(SourceError, match=f"{stated['quant_method']}.*give the 16-bit checkpoint or a GGUF file"):
        read_quantization({"quantization_config": stated}, Path("m"))
