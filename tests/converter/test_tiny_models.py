"""Every tiny model, converted and read back: nothing lost, nothing renamed wrongly, nothing forgotten."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from colibri_converter import convert
from colibri_converter.source import open_source
from model_dirs import read_model, source_tensors, write_gguf

from libcolibri.format import read_manifest, verify
from libcolibri.models.registry import parse_config
from libcolibri.quant import FORMATS

TINY = Path(__file__).parent.parent / "fixtures" / "tiny"
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "bert")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def without_llama3(folder, target):
    """The tiny llama with plain rotary frequencies: GGUF's metadata cannot state its unusual original context."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 500000.0, "rope_type": "default"}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_holds_the_source_exactly(family, tmp_path):
    report = convert(TINY / family, tmp_path / "Modell 模型", quant="f32", tokenizer=False)
    wanted, found = source_tensors(TINY / family), read_model(tmp_path / "Modell 模型")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    manifest = verify(tmp_path / "Modell 模型")
    assert (report.family, manifest.family, manifest.kind) == (family, family, "encoder" if family == "bert" else "decoder")
    assert [path.name for path in tmp_path.iterdir()] == ["Modell 模型"]


@pytest.mark.parametrize("quant", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_models_are_close_and_keep_small_tensors(family, quant, tmp_path):
    report = convert(TINY / family, tmp_path / "m", quant=quant, tokenizer=False)
    wanted, found, manifest = source_tensors(TINY / family), read_model(tmp_path / "m"), read_manifest(tmp_path / "m")
    loosest = FORMATS["q5_0" if quant == "q4_k_m" else "q8_0"]  # 64 columns are no multiple of 256
    for name, weights in wanted.items():
        if weights.ndim == 1 or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            assert np.array_equal(found[name], weights), name
            assert manifest.tensors[name].type == "f32"
        elif weights.shape[1] % 32 == 0:
            assert (np.abs(found[name] - weights) <= loosest.error_bound(weights)).all(), name
    assert sum(report.types.values()) == len(wanted)
    assert report.output_bytes == sum(path.stat().st_size for path in (tmp_path / "m").iterdir() if path.name != "colibri.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_files_give_the_same_model_as_the_folder(family, tmp_path):
    folder = without_llama3(TINY / family, tmp_path / "hf") if family == "llama" else TINY / family
    path = write_gguf(tmp_path / "model.gguf", folder)
    convert(path, tmp_path / "m", tokenizer=False)
    wanted, found = source_tensors(TINY / family), read_model(tmp_path / "m")
    assert found.keys() == {name for name in wanted if "pooler" not in name}
    assert all(np.array_equal(found[name], wanted[name]) for name in found)
    if family != "bert":
        ours, theirs = parse_config(read_manifest(tmp_path / "m").config), parse_config(open_source(folder).config)
        assert (ours.layers, ours.norm, ours.vocab_size) == (theirs.layers, theirs.norm, theirs.vocab_size)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "F16", "BF16"])
def test_gguf_blocks_are_kept_bit_for_bit(kind, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", TINY / "mixtral", kind)
    report = convert(path, tmp_path / "m", tokenizer=False)
    assert (report.recipe, kind.lower() in report.types) == ("gguf", True)
    source, found = open_source(path), read_model(tmp_path / "m")
    assert found.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        assert np.array_equal(found[name], tensor.read().reshape(tensor.shape)), name


def test_gguf_can_be_quantised_again(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", TINY / "qwen3_moe", "BF16")
    assert convert(path, tmp_path / "m", quant="q8_0", tokenizer=False).types.get("bf16") is None


def test_llama3_scaling_is_recovered_from_its_frequencies(tmp_path):
    wavelength = 2 * np.pi * 500000.0 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    path = write_gguf(
        tmp_path / "model.gguf",
        TINY / "llama",
        edit=lambda writer: writer.add_tensor("rope_freqs.weight", (1 / (smooth + (1 - smooth) / 8)).astype(np.float32)),
    )
    source = open_source(path)
    assert source.config["rope_scaling"] == LLAMA3 | {"rope_type": "llama3"}
    assert source.skipped == ("rope_freqs.weight",)


def test_fused_experts_of_a_folder_are_split(tmp_path):
    from safetensors.numpy import save_file

    tensors = source_tensors(TINY / "qwen3_moe")
    fused = {name: data for name, data in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up = [np.concatenate([tensors[f"{prefix}{e}.gate_proj.weight"], tensors[f"{prefix}{e}.up_proj.weight"]]) for e in range(8)]
        fused[f"{prefix}gate_up_proj"] = np.stack(gate_up)
        fused[f"{prefix}down_proj"] = np.stack([tensors[f"{prefix}{e}.down_proj.weight"] for e in range(8)])
    (tmp_path / "hf").mkdir()
    shutil.copy(TINY / "qwen3_moe" / "config.json", tmp_path / "hf")
    save_file(fused, tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "m", quant="f32", tokenizer=False)
    found = read_model(tmp_path / "m")
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


def test_expert_files_are_aligned_and_one_per_routed_layer(tmp_path):
    convert(TINY / "qwen2_moe", tmp_path / "m", tokenizer=False)
    manifest = read_manifest(tmp_path / "m")
    assert sorted(manifest.experts) == [0, 2, 3]
    assert all(entry.expert_bytes % 4096 == 0 for entry in manifest.experts.values())


def test_xlm_roberta_positions_of_a_gguf_file_count_from_two(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", TINY / "bert", edit=lambda writer: writer.add_tokenizer_model("t5"))
    source, wanted = open_source(path), source_tensors(TINY / "bert")["embeddings.position_embeddings.weight"]
    positions = source.tensors["embeddings.position_embeddings.weight"].read()
    assert (source.family, source.config["max_position_embeddings"]) == ("xlm-roberta", len(wanted) + 2)
    assert np.array_equal(positions[2:], wanted)
    assert source.config["encoder"]["max_tok"] == len(wanted)
