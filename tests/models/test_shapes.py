"""Sizes and switches that the fixtures do not have, against the float64 oracle: odd widths, biases, one KV head, windows."""

import numpy as np
import pytest

from libcolibri.format import DENSE_NAME, read_manifest
from libcolibri.quant import FORMATS
from libcolibri.safetensors_header import read_header
from tests.models.test_oracle import Running, same_bits
from tests.oracle.decoder import logits
from tests.tiny_model import make_model

BASE = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "moe_intermediate_size": None, "shared_expert_intermediate_size": None, "num_experts": None, "num_experts_per_tok": None,
    "mlp_only_layers": None, "num_hidden_layers": 2, "vocab_size": 50,
}  # fmt: skip
CASES = {
    "odd widths": {"hidden_size": 40, "intermediate_size": 52, "vocab_size": 37},
    "biases": {"attention_bias": True},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 80},
    "one kv head for seven": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 48},
    "eleven heads each": {"num_attention_heads": 11, "num_key_value_heads": 11},
    "window": {"model_type": "mistral", "sliding_window": 9},
    "window of one": {"model_type": "mistral", "sliding_window": 1},
}


def tensors_of(folder) -> dict[str, np.ndarray]:
    """What a model directory's dense tensors stand for, float64."""
    manifest, data = read_manifest(folder), (folder / DENSE_NAME).read_bytes()
    found = {}
    for name, slot in read_header(folder / DENSE_NAME).items():
        entry, raw = manifest.tensors[name], np.frombuffer(data[slot.start : slot.end], np.uint8)
        if len(entry.shape) == 1:
            found[name] = raw.view(np.float32).astype(np.float64)
        else:
            found[name] = FORMATS[entry.type].dequantize(raw.reshape(entry.stored_shape), *entry.shape).astype(np.float64)
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_float64(case, tmp_path):
    changes = {**BASE, **CASES[case]}
    folder = make_model(tmp_path / "model", **changes)
    ids = np.random.default_rng(0).integers(0, changes["vocab_size"], 43)
    expected = logits(read_manifest(folder).config, tensors_of(folder), ids, changes.get("sliding_window"))
    with Running(folder, threads=2) as running:
        got = running.logits(ids)
        np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)
        assert same_bits(running.logits(ids, 1), got)
        assert same_bits(running.logits(ids, 10), got)


@pytest.mark.parametrize(
    "types", [("f16", "f16", "f16"), ("f32", "f16", "f32"), ("f16", "f32", "f16"), ("q8_0", "f32", "f32"), ("f32", "q8_0", "q8_0")]
)
def test_experts_whose_parts_have_different_types(types, tmp_path):
    """Gate, up and down of one expert stored apart: where the values are exact in every type the bits are those of one type."""
    ids = np.random.default_rng(1).integers(0, 48, 21)
    size = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    results = []
    for name, chosen in (("mixed", types), ("plain", ("f32", "f32", "f32"))):
        layers = {i: dict(zip(("gate_proj", "up_proj", "down_proj"), chosen, strict=True)) for i in (0, 2)}
        folder = make_model(tmp_path / name, expert_quant=layers, **size)
        with Running(folder, threads=2, expert_slots=2) as small, Running(folder) as large:
            got = large.logits(ids)
            assert same_bits(small.logits(ids), got)
            assert same_bits(small.logits(ids, 1), got)
            results.append(got)
    if "q8_0" in types:
        assert np.abs(results[0] - results[1]).max() < 0.05 * np.ptp(results[1])
    else:
        assert same_bits(*results)
