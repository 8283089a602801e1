"""What released GGUF files have that the tiny ones do not: layers that predict further tokens, early spellings, keys of other families."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from colibri_converter.gguf import read_gguf
from colibri_converter.gguf_config import FileMetadata
from colibri_converter.source import open_source

from libcolibri.errors import SourceError
from libcolibri.models.gguf import turning_share, window_types
from libcolibri.models.registry import parse_config
from tests.gguf_delta import unpack
from tests.gguf_edit import rewrite


def edited(name: str, folder: Path, **changes) -> Path:
    return rewrite(unpack(name, folder / "plain.gguf"), folder / "edited.gguf", **changes)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    names = ("blk.4.nextn.eh_proj.weight", "blk.4.attn_q.weight", "blk.4.ffn_gate_exps.weight")
    path = edited("glm4_moe", tmp_path, tensors={name: np.zeros((2, 64)) for name in names})
    assert FileMetadata(read_gguf(path)).size("block_count") == 5
    plain, source = open_source(tmp_path / "plain.gguf"), open_source(path)
    assert source.skipped == names
    assert list(source.tensors) == list(plain.tensors)
    assert len(parse_config(source.config).layers) == 4


def test_numbers_per_layer_may_count_those_layers_or_not(tmp_path):
    for count in (4, 5):
        path = edited("glm4_moe", tmp_path, keys={"attention.head_count_kv": [2] * count})
        assert FileMetadata(read_gguf(path)).by_layer("attention.head_count_kv") == [2] * 4
    with pytest.raises(SourceError, match=r"head_count_kv is .*expected a number or a flag for each of 5 layers"):
        open_source(edited("glm4_moe", tmp_path, keys={"attention.head_count_kv": [2] * 6}))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "attention.scale", 0.5),
        ("qwen3", "final_logit_softcapping", 30.0),
        ("deepseek_v3", "attention.temperature_scale", 0.1),
        ("mixtral", "attention.clamp_kqv", 8.0),
        ("nemotron_h", "moe_latent_size", 16),
        ("gpt_oss", "swiglu_clamp_exp", [7.0] * 4),
    ],
)
def test_a_key_that_the_family_does_not_know_is_refused(name, key, value, tmp_path):
    with pytest.raises(SourceError, match=rf"{key} is .*: models of family {name} have no such number"):
        open_source(edited(name, tmp_path, keys={key: value}))


@pytest.mark.parametrize(("name", "key", "value"), [("llama", "attention.scale", 1.0), ("qwen3", "final_logit_softcapping", 0.0)])
def test_a_key_that_changes_nothing_is_not(name, key, value, tmp_path):
    assert parse_config(open_source(edited(name, tmp_path, keys={key: value})).config).family == name


def test_another_score_of_the_router_is_refused(tmp_path):
    with pytest.raises(SourceError, match="scoring_func='softmax'"):
        open_source(edited("glm4_moe", tmp_path, keys={"expert_gating_func": 1}))


def test_early_files_of_deepseek_do_not_name_the_score(tmp_path):
    for name in ("deepseek_v2", "deepseek_v3"):
        assert open_source(edited(name, tmp_path, without=("expert_gating_func",))).family == name


def test_the_early_key_of_linear_scaling(tmp_path):
    path = edited("qwen2", tmp_path, keys={"rope.scale_linear": 4.0})
    assert open_source(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_scaling_is_for_layers_without_a_window(tmp_path):
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    ropes = open_source(edited("laguna", tmp_path, keys=keys)).config["rope_parameters"]
    assert ropes["full_attention"]["rope_type"] == "yarn"
    assert ropes["sliding_attention"].keys() == {"rope_theta", "partial_rotary_factor"}


def test_a_stated_factor_of_attention(tmp_path):
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 1.5}
    assert open_source(edited("qwen3", tmp_path, keys=keys)).config["rope_scaling"]["attention_factor"] == 1.5


@pytest.mark.parametrize(
    ("pattern", "full_first", "wanted"),
    [(None, False, "ssfs"), (None, True, "fssf"), (2, False, "sfsf"), (1, False, "ffff"), ([True, False, False, True], False, "sffs")],
)
def test_windows_by_period_or_by_layer(pattern, full_first, wanted, tmp_path):
    keys = {} if pattern is None else {"attention.sliding_window_pattern": pattern}
    meta = FileMetadata(read_gguf(edited("llama", tmp_path, keys=keys)))
    assert "".join(kind[0] for kind in window_types(meta, 3, full_first=full_first)) == wanted


@pytest.mark.parametrize(("turning", "head_dim", "share"), [(64, 192, 0.334), (64, 128, 0.5), (32, 128, 0.25), (96, 128, 0.75)])
def test_the_share_of_turning_columns_is_what_a_config_would_say(turning, head_dim, share):
    assert turning_share(turning, head_dim) == share


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="GGUF architecture 'mamba2' is not supported, only bert, deepseek2, dots1"):
        open_source(tmp_path / "m.gguf")
