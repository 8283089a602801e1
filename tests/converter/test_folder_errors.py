"""Folders that cannot be converted: one line that names the file or tensor, and nothing written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from colibri_converter import convert
from colibri_converter.source import open_source
from model_dirs import source_tensors
from safetensors.numpy import save_file

from libcolibri.errors import ColibriError, ConfigError, QuantError, SourceError

TINY = Path(__file__).parent.parent / "fixtures" / "tiny"


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "Quelle 源"
    shutil.copytree(TINY / "qwen3_moe", target)
    return target


def set_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder, edit):
    tensors = source_tensors(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, match, error=SourceError, **options):
    options.setdefault("tokenizer", False)
    with pytest.raises(error, match=match) as caught:
        convert(folder, folder.parent / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (folder.parent / "out").exists()
    assert isinstance(caught.value, ColibriError)


def test_an_unsupported_family(folder):
    set_config(folder, model_type="gemma9")
    refused(folder, "'gemma9' is not supported, only .*llama")


def test_a_value_without_equations(folder):
    set_config(folder, hidden_act="relu")
    refused(folder, "hidden_act", ConfigError)


def test_a_quantised_checkpoint(folder):
    set_config(folder, quantization_config={"quant_method": "awq"})
    refused(folder, "'awq' are not supported")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, r"config\.json: missing")


def test_a_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "not valid JSON")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no safetensors weights")


def test_pickled_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pickled")


def test_a_shard_cut_short(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-100])
    refused(folder, r"model\.safetensors: tensor .* cut short")


def test_a_missing_tensor(folder):
    rewrite(folder, lambda t: t.pop("model.layers.2.mlp.experts.5.up_proj.weight"))
    refused(folder, r"'model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight' is missing")


def test_an_unknown_tensor(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.mystery.weight": np.zeros((2, 2), np.float32)}))
    refused(folder, r"'model\.layers\.0\.mystery\.weight' is unknown")


def test_a_tensor_of_another_shape(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.zeros(65, np.float32)}))
    refused(folder, r"'model\.norm\.weight' has shape \(65,\), the config says \(64,\)")


def test_an_integer_tensor(folder):
    rewrite(folder, lambda t: t.update({"lm_head.weight": np.zeros((320, 64), np.int8)}))
    refused(folder, r"'lm_head\.weight' has type I8")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"])
def test_nan_in_the_weights(folder, name):
    def spoil(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[7] = np.nan

    rewrite(folder, spoil)
    shown = name if "experts" not in name else "layer 1, expert 3, up_proj"
    refused(folder, f"{shown}.*NaN", QuantError)


def test_layers_beyond_the_model_and_buffers_are_left_out_and_reported(folder):
    extra = {"model.layers.4.self_attn.q_proj.weight": np.zeros((2, 2), np.float32), "model.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    rewrite(folder, lambda t: t.update(extra))
    assert set(open_source(folder).skipped) == set(extra)


def test_a_tied_head_is_left_out(folder):
    set_config(folder, tie_word_embeddings=True)
    assert "lm_head.weight" in open_source(folder).skipped


def shard(folder, edit_index=lambda index: None):
    tensors = source_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {"weight_map": {}}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
        index["weight_map"] |= dict.fromkeys(part, f"model-{number}.safetensors")
    edit_index(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_read_through_their_index(folder):
    shard(folder)
    assert len(open_source(folder).tensors) == 135


def test_a_missing_shard(folder):
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    refused(folder, r"model-1\.safetensors: missing")


def test_shards_without_an_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "download the index")


def test_an_index_that_climbs_out_of_the_folder(folder):
    shard(folder, lambda index: index["weight_map"].update({"lm_head.weight": "../../x.safetensors"}))
    refused(folder, "no plain file name")


def test_an_index_of_another_download(folder):
    shard(
        folder,
        lambda index: index["weight_map"].update({"model.embed_tokens.weight": "model-0.safetensors"}),
    )
    refused(folder, "files of two downloads are mixed")


def test_no_tokenizer(folder):
    refused(folder, "--no-tokenizer", tokenizer=True)


@pytest.mark.parametrize(("path", "match"), [("https://example.org/model", "downloads nothing"), ("nowhere", "no such file")])
def test_paths_that_are_not_there(tmp_path, path, match):
    with pytest.raises(SourceError, match=match):
        convert(path, tmp_path / "out")


def test_a_file_of_another_kind(folder):
    with pytest.raises(SourceError, match="give the folder that holds it"):
        open_source(folder / "model.safetensors")


def test_an_unknown_recipe(folder):
    refused(folder, "--quant q3_k_s is unknown, only f32", QuantError, quant="q3_k_s")
