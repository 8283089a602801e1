"""Loading a model directory: every byte where its field says, everything else refused."""

import numpy as np
import pytest

from libcolibri.errors import FormatError
from libcolibri.format import DENSE_NAME, read_manifest
from libcolibri.loader import dense_bytes, load_weights
from libcolibri.models.registry import parse_config
from libcolibri.quant import FORMATS
from tests.tiny_model import edit_manifest, make_model


def load(folder, on_progress=None):
    manifest = read_manifest(folder)
    return load_weights(folder, manifest, parse_config(manifest.config), on_progress)


def test_binds_what_was_written(tmp_path):
    weights = load(make_model(tmp_path / "model", seed=3))
    values = np.random.default_rng(3).normal(0.0, 1.0, (48, 32)).astype(np.float32)  # embed_tokens comes first
    np.testing.assert_array_equal(FORMATS["f32"].dequantize(weights.embed_tokens.tiles, 48, 32), values)
    assert [layer.sublayers[1].experts is None for layer in weights.layers] == [False, True, False]
    attention, moe = weights.layers[0].sublayers
    router, gate = moe.fields["router"], moe.fields["shared_gate"]
    assert (router.rows, router.type, gate.rows, moe.fields["mlp.shared_expert.gate_proj"].rows) == (6, "f32", 1, 40)
    assert moe.experts.num_experts == 6 and (moe.experts.parts["down_proj"].rows, moe.experts.parts["down_proj"].cols) == (32, 24)
    assert attention.fields["q_bias"].dtype == np.float32 and attention.fields["q_bias"].shape == (32,)
    assert not {"o_bias", "q_norm"} & set(attention.fields)


def test_arrays_are_aligned_and_read_only(tmp_path):
    weights = load(make_model(tmp_path / "model"))
    for array in (weights.embed_tokens.tiles, weights.norm.weight, weights.layers[2].sublayers[0].fields["k_bias"], weights.lm_head.tiles):
        assert array.ctypes.data % 64 == 0 and not array.flags.writeable and array.flags.c_contiguous


@pytest.mark.parametrize("family", ["llama", "mixtral", "olmoe", "qwen3_moe"])
def test_families(tmp_path, family):
    weights = load(
        make_model(tmp_path / "模型", model_type=family, quant="q8_0", shared_expert_intermediate_size=None, **FAMILY_KEYS[family])
    )
    assert weights.embed_tokens.type == "q8_0" and len(weights.layers) == 3
    norms = {"llama": None, "mixtral": None, "olmoe": (32,), "qwen3_moe": (16,)}[family]
    q_norm = weights.layers[0].sublayers[0].fields.get("q_norm")
    assert q_norm is None if norms is None else q_norm.shape == norms


NO_ROUTER = {"num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None, "mlp_only_layers": None}
FAMILY_KEYS = {
    "llama": {**NO_ROUTER, "intermediate_size": 64},
    "mixtral": {**NO_ROUTER, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "olmoe": {**NO_ROUTER, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 64, "intermediate_size": 64},
}


def test_tied_head_is_the_embedding(tmp_path):
    weights = load(make_model(tmp_path / "model", tie_word_embeddings=True))
    assert weights.lm_head is weights.embed_tokens


def test_progress_ends_at_the_total(tmp_path):
    folder, seen = make_model(tmp_path / "model"), []
    load(folder, lambda *facts: seen.append(facts))
    assert seen[-1][0] == "weights" and seen[-1][1] == seen[-1][2] <= dense_bytes(read_manifest(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": True}, "lm_head.weight has no place"),
        ({"qkv_bias": False}, r"k_proj.bias \(and 8 more\) has no place"),
        ({"hidden_size": 64}, r"embed_tokens.weight has shape \(48, 32\), the config calls for \(48, 64\)"),
        ({"num_hidden_layers": 4}, "experts for layers"),
        ({"mlp_only_layers": []}, "experts for layers"),
        ({"num_experts": 7}, "layer 0 has experts of"),
        ({"shared_expert_intermediate_size": 41}, "shared_expert.gate_proj.weight has shape"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, change, message):
    folder = make_model(tmp_path / "model")
    edit_manifest(folder, lambda data: data["config"].update(change))
    with pytest.raises(FormatError, match=message):
        load(folder)


def test_missing_tensor(tmp_path):
    folder = make_model(tmp_path / "model")
    edit_manifest(folder, lambda data: data["config"].update(model_type="qwen3_moe", qkv_bias=None, shared_expert_intermediate_size=None))
    edit_manifest(folder, lambda data: [data["config"].pop(key) for key in ("qkv_bias", "shared_expert_intermediate_size")])
    with pytest.raises(FormatError, match=r"q_norm.weight is missing, expected shape \(16,\)"):
        load(folder)


def test_cut_short_file(tmp_path):
    folder = make_model(tmp_path / "model")
    data = (folder / DENSE_NAME).read_bytes()
    (folder / DENSE_NAME).write_bytes(data[:-100])
    with pytest.raises(FormatError, match="cut short"):
        load(folder)
