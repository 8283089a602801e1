"""The steps of converter/transforms.py against plain numpy, on stored and on computed tensors."""

import numpy as np
import pytest
from colibri_converter.source import SourceTensor, computed, tensor_from_bytes
from colibri_converter.transforms import GENERAL_RULES, Transformer

from libcolibri.errors import SourceError
from libcolibri.models.family import Rule
from libcolibri.models.registry import parse_config
from tests.random_blocks import random_blocks


def stored(values: np.ndarray) -> SourceTensor:
    values = np.ascontiguousarray(values, np.float32)
    return tensor_from_bytes("f32", values.shape, values.reshape(-1).view(np.uint8))


def lazy(values: np.ndarray) -> SourceTensor:
    rows = values.reshape(-1, values.shape[-1])
    return computed(values.shape, lambda index: rows[index])


def apply(values, to: str, transform: str, shapes=None, make=stored, order=None) -> list[np.ndarray]:
    rule = Rule("source", to, transform, order)
    made = Transformer((rule,), None, shapes or {}).apply("source", make(values))
    return [tensor.read().reshape(tensor.shape) for tensor in made.values()]


W = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
E = np.random.default_rng(1).standard_normal((3, 6, 4)).astype(np.float32)

LLAMA = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8,
    "max_position_embeddings": 8, "rms_norm_eps": 1e-5, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.mark.parametrize("make", [stored, lazy])
def test_steps_on_one_tensor(make):
    assert np.array_equal(apply(W, "a", "plus_one", make=make)[0], W + 1)
    assert np.array_equal(apply(W[0], "a", "neg_exp", make=make)[0], -np.exp(W[0]))
    assert np.array_equal(apply(W, "a", "deinterleave", make=make)[0], W[[0, 2, 4, 1, 3, 5]])
    assert np.array_equal(apply(W[:, None], "a", "conv", make=make)[0], W.T.reshape(-1))
    assert np.array_equal(apply(W.reshape(1, 1, 24, 1), "a", "flatten plus_one", make=make)[0], W.reshape(-1) + 1)


@pytest.mark.parametrize("make", [stored, lazy])
@pytest.mark.parametrize("values", [W, W[:, 0]])
def test_split_follows_the_shapes_of_the_names(make, values):
    a, b, c = apply(values, "a b c", "split", {"a": (1,), "b": (3,), "c": (2,)}, make)
    assert all(np.array_equal(got, wanted) for got, wanted in ((a, values[:1]), (b, values[1:4]), (c, values[4:])))
    with pytest.raises(SourceError, match=r"'source' has shape .*1 \+ 3 rows"):
        apply(values, "a b", "split", {"a": (1,), "b": (3,)}, make)


def test_experts_of_every_layout():
    gate, up = E[:, :3], E[:, 3:]
    interleaved = np.stack([gate, up], axis=2).reshape(3, 6, 4)
    names = "{}.gate {}.up"
    for values, steps in (
        (E, "halves"),
        (E.swapaxes(1, 2), "transpose halves"),
        (interleaved, "deinterleave halves"),
        (interleaved.swapaxes(1, 2), "transpose deinterleave halves"),
    ):
        got = apply(values, names, steps)
        for expert in range(3):
            assert np.array_equal(got[2 * expert], gate[expert]) and np.array_equal(got[2 * expert + 1], up[expert]), steps


def test_biases_of_interleaved_experts():
    bias = np.arange(24, dtype=np.float32).reshape(3, 8)
    gate, up = apply(bias, "gate up", "transpose deinterleave halves transpose flatten")
    assert np.array_equal(gate, bias[:, ::2].reshape(-1)) and np.array_equal(up, bias[:, 1::2].reshape(-1))


def test_fused_experts_need_no_rule_of_the_family():
    made = Transformer(GENERAL_RULES, None, {}).apply("model.layers.3.mlp.experts.gate_up_proj", stored(E))
    assert np.array_equal(made["model.layers.3.mlp.experts.2.up_proj.weight"].read(), E[2, 3:])


def test_an_order_depends_on_the_layer():
    config = parse_config(LLAMA)
    reverse = Rule(r"(.*)\.w", r"\1.v", "", lambda layer: range(5, -1, -1) if layer is config.layers[1] else range(6))
    transformer = Transformer((reverse,), config, {})
    for values in (W, W[:, 0]):
        made = transformer.apply("model.layers.1.w", stored(values))["model.layers.1.v"]
        assert np.array_equal(made.read().reshape(values.shape), values[::-1])
    with pytest.raises(SourceError, match="says 6 rows"):
        transformer.apply("model.layers.1.w", stored(W[:5]))


def test_columns_in_another_order():
    config = parse_config(LLAMA)
    transformer = Transformer((Rule(r"(.*)\.w", r"\1.v", columns=lambda layer: [1, 0, 3, 2]),), config, {})
    for make in (stored, lazy):
        made = transformer.apply("model.layers.1.w", make(W))["model.layers.1.v"]
        assert np.array_equal(made.read(1, 4), W[1:4, [1, 0, 3, 2]])
    with pytest.raises(SourceError, match="says 4 columns"):
        transformer.apply("model.layers.1.w", stored(W[:, :3]))


def test_blocks_stay_blocks_where_only_rows_move():
    blocks = random_blocks("q4_k", 6, 2, np.random.default_rng(2))
    tensor = SourceTensor("q4_k", (6, 512), blocks)
    a, b = Transformer((Rule("s", "a b", "deinterleave halves"),), None, {}).apply("s", tensor).values()
    assert a.type == b.type == "q4_k"
    assert np.array_equal(a.blocks_of(1, 3), blocks[[2, 4]]) and np.array_equal(b.blocks_of(0, 3), blocks[1::2])
    with pytest.raises(SourceError, match="cannot be transposed"):
        Transformer((Rule("s", "a", "transpose"),), None, {}).apply("s", tensor)
