"""Every family at the widths that its models are published with: random weights in few layers, converted, run, compared.

    python benchmarks/published_shapes.py [FAMILY ...] [--quant q4_k_m q8_0] [--work FOLDER]

In:  configs of tests/fixtures/tiny (four to eight layers, eight experts), whose widths are replaced by published ones
Out: a line per family and recipe: size, seconds of conversion and of the tokens, and what is wrong: numbers that are not finite, or
     prefill and token-by-token decode that differ in a bit. The exit status is 1 when something is wrong.

Tiny fixtures prove equations. Widths of 704, 2880 or 576 columns prove block types and their fallbacks, tiles with rows left over,
heads of 192 or 256 columns, and vocabularies of 262144 tokens.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from colibri_converter import convert
from safetensors.numpy import save_file

from libcolibri.config import ModelConfig
from libcolibri.engine import Engine
from libcolibri.models.registry import FAMILIES, parse_config

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "tiny"
PREFILL_TOK, DECODE_TOK = 40, 8
VOCAB = 4096  # for all but one: embeddings are plain matrices

TAPS = ("linear_conv_kernel_dim", "conv_L_cache", "conv_kernel", "mamba_d_conv")  # keys of the size of a convolution
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def sizes(hidden: int, heads: int, kv_heads: int, ffn: int | None, **others: Any) -> dict[str, Any]:
    """Config keys that nearly all families have."""
    common = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn}
    return {"vocab_size": VOCAB, **common, **others}


# Fixture -> what replaces its widths, as the model named beside it has them.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": sizes(576, 9, 3, 1536, head_dim=64),  # SmolLM2 135M
    "mistral": sizes(5120, 32, 8, 14336, head_dim=128, num_hidden_layers=2),  # Nemo 12B
    "qwen2": sizes(896, 14, 2, 4864),  # 0.5B
    "qwen3": sizes(1024, 16, 8, 3072, head_dim=128),  # 0.6B
    "phi3": sizes(3072, 32, 32, 8192),  # mini
    "olmo2": sizes(2048, 16, 16, 8192),  # 1B
    "smollm3": sizes(2048, 16, 4, 11008),  # 3B
    "granite": sizes(2048, 32, 8, 8192),  # 3.3 2B
    "lfm2": sizes(1024, 16, 8, 6656),  # 350M
    "gemma2": sizes(2304, 8, 4, 9216, head_dim=256, query_pre_attn_scalar=256),  # 2B
    "gemma3": sizes(640, 4, 1, 2048, head_dim=256, query_pre_attn_scalar=256, vocab_size=262144),  # 270M
    "qwen3_5": sizes(2560, 16, 4, 9216, head_dim=256, **DELTA),  # 4B
    "mixtral": sizes(4096, 32, 8, 14336, head_dim=128, num_hidden_layers=1),  # 8x7B
    "olmoe": sizes(2048, 16, 16, 1024),  # 1B-7B
    "qwen2_moe": sizes(2048, 16, 16, 5632, moe_intermediate_size=1408, shared_expert_intermediate_size=5632),  # A2.7B
    "qwen3_moe": sizes(2048, 32, 4, 6144, head_dim=128, moe_intermediate_size=768),  # 30B-A3B
    "qwen3_next": sizes(2048, 16, 2, 5120, head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512, **DELTA),  # 80B
    "gpt_oss": sizes(2880, 64, 8, 2880, head_dim=64, sliding_window=128),  # 20b
    "glm4_moe": sizes(4096, 96, 8, 10944, head_dim=128, moe_intermediate_size=1408, num_hidden_layers=2),  # 4.5-Air
    "glm4_moe_lite": sizes(
        2048, 20, 20, 10240, moe_intermediate_size=1536, q_lora_rank=768, **MLA | {"qk_nope_head_dim": 192, "v_head_dim": 256}
    ),  # 4.7-Flash
    "deepseek_v2": sizes(2048, 16, 16, 10944, moe_intermediate_size=1408, **MLA),  # V2-Lite
    "deepseek_v3": sizes(7168, 128, 128, 18432, moe_intermediate_size=2048, q_lora_rank=1536, **MLA, num_hidden_layers=2),  # V3
    "lfm2_moe": sizes(2048, 32, 8, 7168, moe_intermediate_size=1792),  # 8B-A1B
    "granitemoe": sizes(1536, 24, 8, 512),  # 3.1 3B-A800M
    "granitemoehybrid": sizes(
        1536, 12, 4, 512, shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128
    ),  # 4.0 H-Tiny
    "nemotron_h": sizes(
        2688, 32, 2, 1856, head_dim=128, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, mamba_num_heads=64,
        mamba_head_dim=64, n_groups=8, ssm_state_size=128,
    ),  # 3 Nano
    "phimoe": sizes(
        4096, 32, 8, 6400, num_hidden_layers=2,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64,
            "long_factor": [2.0] * 64,
        },
    ),  # 3.5-MoE
    "ernie4_5_moe": sizes(2560, 20, 4, 12288, head_dim=128, moe_intermediate_size=1536, num_hidden_layers=2),  # 21B-A3B
    "hunyuan_v1_moe": sizes(4096, 32, 8, 3072, head_dim=128, num_hidden_layers=2),  # A13B
    "minimax_m2": sizes(3072, 48, 8, 1536, head_dim=128, num_hidden_layers=2),  # M2
    "llama4": sizes(5120, 40, 8, 8192, head_dim=128, intermediate_size_mlp=16384, num_hidden_layers=2),  # Scout
    "mellum": sizes(2304, 32, 4, 7168, head_dim=128, moe_intermediate_size=896),  # 12B-A2.5B
    "hy_v3": sizes(4096, 64, 8, 13312, head_dim=128, moe_intermediate_size=1536, num_hidden_layers=2),  # Hy3
    "dots1": sizes(4096, 32, 32, 10944, head_dim=128, moe_intermediate_size=1408, num_hidden_layers=2),  # dots.llm1
    "qwen3_5_moe": sizes(2048, 16, 2, None, head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512, **DELTA),  # 35B
    "gemma4_moe": sizes(
        2816, 16, 8, 2112, head_dim=256, moe_intermediate_size=704, sliding_window=1024, vocab_size=262144,
        per_layer_config={"5": {"head_dim": 512, "num_key_value_heads": 2}},
    ),  # 26B-A4B
    "gemma4": sizes(
        1536, 8, 1, 6144, head_dim=256, sliding_window=512, hidden_size_per_layer_input=256, vocab_size_per_layer_input=VOCAB,
        per_layer_config={"3": {"head_dim": 512}, "7": {"head_dim": 512}},
    ),  # E2B
    "glm_moe_dsa": sizes(
        6144, 64, 64, 12288, moe_intermediate_size=2048, q_lora_rank=2048, index_topk=2048, num_hidden_layers=2,
        **MLA | {"qk_nope_head_dim": 192, "v_head_dim": 256},
    ),  # GLM-5
    "kimi_linear": sizes(2304, 32, 32, 9216, moe_intermediate_size=1024, linear_num_heads=32, linear_head_dim=128, **MLA),  # 48B-A3B
    "laguna": sizes(
        2048, 48, 8, 8192, head_dim=128, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_attention_heads_per_layer=[48, 64, 64, 48], sliding_window=512,
    ),  # XS
    "mimo_v2_flash": sizes(
        4096, 64, 4, 16384, head_dim=192, v_head_dim=128, moe_intermediate_size=2048, sliding_window=128, num_hidden_layers=2,
    ),  # 309B
    "granitemoeshared": sizes(1536, 24, 8, 512, shared_intermediate_size=1024),  # 3
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """The fixture's config with published widths; lists of one entry per layer are cut where there are fewer layers."""
    config = json.loads((FIXTURES / name / "config.json").read_text(encoding="utf-8"))
    before, shape = config.get("num_hidden_layers"), SHAPES[name]
    after = shape.get("num_hidden_layers", before)
    config.pop("qk_head_dim", None)  # follows from the others
    cut = {key: value[:after] for key, value in config.items() if isinstance(value, list) and len(value) == before}
    return {key: value for key, value in (config | cut | shape).items() if value is not None}


def source_shape(name: str, shape: tuple[int, ...], family: str, raw: dict[str, Any]) -> tuple[int, ...]:
    """Shape in a checkpoint of a tensor under its canonical name. A convolution kernel is a vector here, (channels, 1, taps) there."""
    rule = next((rule for rule in FAMILIES[family].tensors if re.fullmatch(rule.pattern, name)), None)
    if rule is None or rule.transform != "conv":
        return shape
    taps = next(raw[key] for key in TAPS if key in raw)
    return shape[0] // taps, 1, taps


def write_checkpoint(folder: Path, raw: dict[str, Any], config: ModelConfig) -> None:
    """config.json, and float16 weights that keep activations near 1, under canonical names."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(1 << 22).astype(np.float16)
    tensors = {}
    for name, spec in config.tensors().items():
        shape, count = source_shape(name, spec.shape, config.family, raw), int(np.prod(spec.shape))
        if len(spec.shape) == 1:
            # A norm's weights are near 1; so are decays, which are negative, while a bias of 1 does no harm.
            sign = -1.0 if name.endswith(".A") else 1.0
            values = (sign * rng.uniform(0.5, 1.5, count)).astype(np.float32)
        else:
            values = np.resize(np.roll(pool, int(rng.integers(1 << 22))), count) * np.float16(spec.shape[1] ** -0.5)
        tensors[name] = values.reshape(shape)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def check(folder: Path) -> tuple[str, list[str]]:
    """Speed in words, and what is wrong."""
    with Engine.open(folder, context_length=64, prefill_chunk=PREFILL_TOK) as engine:
        ids = np.random.default_rng(1).integers(0, engine.config.vocab_size, PREFILL_TOK + DECODE_TOK).tolist()
        whole, single, faults = engine.new_session(), engine.new_session(), []
        with whole.using(), single.using():
            for session in (whole, single):  # compiles
                session.extend(ids[:2])
                session.extend(ids[2:3])
        whole.reset()
        single.reset()
        started = time.perf_counter()
        with whole.using():
            prefill = np.concatenate([whole.extend(ids[at : at + 20], "all").logits for at in range(0, PREFILL_TOK, 20)])
            middle = time.perf_counter()
            decode = [whole.extend([i], "all").logits for i in ids[PREFILL_TOK:]]
        ended = time.perf_counter()
        with single.using():
            stepwise = np.concatenate([single.extend([i], "all").logits for i in ids])
        got = np.concatenate([prefill, *decode])
        if not np.isfinite(got).all():
            faults.append("logits are not finite")
        if (got.view(np.uint32) != stepwise.view(np.uint32)).any():
            faults.append(f"prefill and decode differ by {np.abs(got - stepwise).max():.1e}")
        if np.abs(got - got[0]).max() < 1e-3:
            faults.append("logits do not depend on the tokens")
    return f"prefill {PREFILL_TOK / (middle - started):7.1f} tok/s, decode {DECODE_TOK / (ended - middle):6.1f} tok/s", faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=[name for name in SHAPES if name in FAMILIES], metavar="FAMILY")
    parser.add_argument("--quant", nargs="+", default=["q4_k_m", "q8_0"])
    parser.add_argument("--work", type=Path, default=None, help="where checkpoints and model directories are made (and removed)")
    options = parser.parse_args()
    wrong = 0
    for name in options.families:
        raw = config_of(name)
        config = parse_config(raw)
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            source = Path(work) / "source"
            source.mkdir()
            write_checkpoint(source, raw, config)
            for quant in options.quant:
                started = time.perf_counter()
                convert(source, Path(work) / quant, quant=quant, tokenizer=False)
                seconds = time.perf_counter() - started
                speed, faults = check(Path(work) / quant)
                wrong += bool(faults)
                size = sum(path.stat().st_size for path in (Path(work) / quant).iterdir()) / 1e6
                print(f"{name:18} {quant:7} {size:7.0f} MB in {seconds:5.1f} s; {speed}; {'; '.join(faults) or 'same bits'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
