"""A dense model cut into experts that are all chosen: the dense model's tokens, whatever the expert cache holds and whatever is read ahead.

benchmarks/sliced_moe.py does the same to a model that speaks.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from colibri_converter import convert
from safetensors.numpy import save_file

from libcolibri.engine import Engine
from tests.encoder.tiny_bert import read_tensors

TINY = Path(__file__).resolve().parents[1] / "fixtures" / "tiny"
SLICES, MAX_TOKENS = 4, 16
PROMPT = [(11 * i * i + 3 * i) % 300 for i in range(24)]
NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
SETTINGS = list(product((1, 2, SLICES, "auto"), (True, False, "auto")))


def slices_of(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """A feed-forward matrix as a part of every expert; each expert's output is scaled up by what its routing weight scales it down."""
    layer, part = name.removesuffix(".weight").split(".mlp.")
    axis, factor = (1, SLICES) if part == "down_proj" else (0, 1)
    pieces = np.split(tensor * np.float32(factor), SLICES, axis)
    return {f"{layer}.block_sparse_moe.experts.{e}.{NAMES[part]}.weight": np.ascontiguousarray(piece) for e, piece in enumerate(pieces)}


def write_folders(folder: Path, routers: np.ndarray, per_token: int) -> None:
    """folder/dense and folder/sliced as Hugging Face folders. routers (layers, SLICES, D)."""
    config = json.loads((TINY / "llama" / "config.json").read_text())
    rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    moe = json.loads((TINY / "mixtral" / "config.json").read_text()) | rope
    moe |= {"num_local_experts": SLICES, "num_experts_per_tok": per_token, "intermediate_size": config["intermediate_size"] // SLICES}
    dense = read_tensors(TINY / "llama")
    sliced = {f"model.layers.{i}.block_sparse_moe.gate.weight": router for i, router in enumerate(routers)}
    for name, tensor in dense.items():
        sliced |= slices_of(name, tensor) if ".mlp." in name else {name: tensor}
    for name, settings, tensors in (("dense", config | rope, dense), ("sliced", moe, sliced)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / name / "model.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """dense and sliced, in float32; and routed, the sliced one with routers that choose half of the experts, in q8_0."""
    folder, routed = tmp_path_factory.mktemp("sliced"), tmp_path_factory.mktemp("routed")
    shape = (4, SLICES, 64)
    write_folders(folder, np.zeros(shape, np.float32), SLICES)
    write_folders(routed, np.random.default_rng(5).normal(0, 0.2, shape).astype(np.float32), SLICES // 2)
    for source, name, quant in ((folder, "dense", "f32"), (folder, "sliced", "f32"), (routed, "sliced", "q8_0")):
        convert(source / name, source / f"{name}-model", quant=quant, tokenizer=False)
    return {"dense": folder / "dense-model", "sliced": folder / "sliced-model", "routed": routed / "sliced-model"}


def answer(model: Path, **options) -> tuple[list[int], bytes]:
    """Greedy tokens, and the bits of the logits behind the whole text, evaluated again."""
    with Engine.open(model, threads=1, **options) as engine:
        steps = engine.new_session().generate(PROMPT, max_tokens=MAX_TOKENS)
        tokens = [step.token_id for step in steps if step.token_id is not None]
        return tokens, engine.new_session().logits(PROMPT + tokens).tobytes()


def test_tokens_are_the_dense_models_for_every_cache_and_prefetch(models):
    dense, _ = answer(models["dense"])
    answers = {setting: answer(models["sliced"], expert_cache=setting[0], prefetch=setting[1]) for setting in SETTINGS}
    assert {setting: tokens for setting, (tokens, _) in answers.items()} == dict.fromkeys(SETTINGS, dense)
    assert len({bits for _, bits in answers.values()}) == 1


def test_the_same_where_a_router_chooses(models):
    """Experts come and go, in an order that depends on the setting; not a bit of the logits does."""
    answers = {setting: answer(models["routed"], expert_cache=setting[0], prefetch=setting[1]) for setting in SETTINGS}
    assert len({(tuple(tokens), bits) for tokens, bits in answers.values()}) == 1
