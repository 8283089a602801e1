"""A checkpoint and the GGUF file that llama.cpp's converter makes of it: the same model, tensor by tensor.

The GGUF files are kept as differences from the checkpoints (tests/gguf_delta.py); tests/fixtures/make_tiny_gguf.py made them.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from colibri_converter.source import open_source

from libcolibri.models.registry import FAMILIES, parse_config, text_config
from tests.gguf_delta import NAMES, unpack

TINY = Path(__file__).parents[1] / "fixtures" / "tiny"


def registered() -> list[str]:
    """Files whose checkpoint's family is registered."""
    types = {name: text_config(json.loads((TINY / name / "config.json").read_text("utf-8")))["model_type"] for name in NAMES}
    return [name for name, model_type in types.items() if model_type.removesuffix("_text") in FAMILIES]


# What llama.cpp's converter does not keep, since llama.cpp has it as a constant: keys of the config, and what a file stands for instead.
LOST = {
    "dots1": {"sliding_window": None, "layer_types": None},
    "gpt_oss": {"swiglu_limit": 7.0},
    "gpt_oss_mxfp4": {"swiglu_limit": 7.0},
    "granitemoehybrid": {"max_position_embeddings": 1 << 20},
    "laguna": {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192},
    # 8 of 24 columns turn either way: of a real head's 192 columns 64 do, and the file stands for 0.334 again.
    "mimo_v2_flash": {"rope_parameters": {kind: {"partial_rotary_factor": 0.34} for kind in ("full_attention", "sliding_attention")}},
    "mistral": {"sliding_window": None, "layer_types": None},
    "nemotron_h": {"max_position_embeddings": 1 << 20},
    "olmoe": {"rms_norm_eps": 1e-5, "norm_eps": 1e-5},
    "phimoe": {"rope_parameters": {"short_mscale": None, "long_mscale": None}},
    "phimoe_long": {"rope_parameters": {"short_mscale": None, "long_mscale": None}},
}


def kept(config: dict, lost: dict) -> dict:
    """`config` without what is lost, also inside objects."""
    return config | {key: kept(config[key], value) if isinstance(value, dict) else value for key, value in lost.items()}


@pytest.mark.parametrize("name", registered())
def test_both_routes_give_the_same_model(name, tmp_path):
    checkpoint, file = open_source(TINY / name), open_source(unpack(name, tmp_path / f"{name}.gguf"))
    wanted, found = parse_config(kept(checkpoint.config, LOST.get(name, {}))), parse_config(file.config)
    assert replace(found, family=wanted.family) == wanted  # several families share an architecture
    assert list(file.tensors) == list(checkpoint.tensors)
    for canonical, tensor in checkpoint.tensors.items():
        got, expected = file.tensors[canonical].read(), tensor.read()
        if canonical.endswith(".A"):  # -exp(A_log) by another library's exp
            np.testing.assert_allclose(got, expected, rtol=2e-7, err_msg=canonical)
        else:
            np.testing.assert_array_equal(got, expected, err_msg=canonical)
