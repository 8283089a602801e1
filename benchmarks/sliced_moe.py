"""A mixture of experts that speaks: a dense model's feed-forward layers cut into slices, all routed with equal weight.

    python benchmarks/sliced_moe.py DENSE.gguf WORK_FOLDER [--slices 8] [--tokens 64] [--quant f32]

In:  a Llama-architecture GGUF file whose ffn tensors are Q4_1 or Q8_0 (SmolLM2-135M-Instruct)
Out: WORK_FOLDER/sliced.gguf, both model directories, and for every size of the expert cache and setting of prefetch: whether the
     greedy tokens are those of the unlimited cache, and whether they are the dense model's; then the answers. Exit code 1 when tokens
     depend on cache or prefetch

The sum of all slices is the dense layer. A router of zeros gives every slice the weight 1/slices; the slices' down projections are
scaled by `slices`, a power of two, which float16 block scales take exactly. Only the order of the final sum differs, by some 1e-7.
With 8-bit activations (the file's own types) such a difference can flip a rounding and then a nearly tied token; with --quant f32
nothing is rounded and greedy tokens stay the dense model's.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a hummingbird.",
    "List three uses of a paper clip.",
)
SCALE_BYTES = {gguf.GGMLQuantizationType.Q4_1: 4, gguf.GGMLQuantizationType.Q8_0: 2}  # float16 scales at the start of a block


def slice_down(tensor, slices: int) -> np.ndarray:
    """ffn_down (D, F) blocks -> (slices, D, F / slices) blocks, scaled by `slices`."""
    block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    blocks = tensor.data.reshape(tensor.data.shape[0], slices, -1, block_bytes).copy()
    scales = SCALE_BYTES[tensor.tensor_type]
    halves = np.ascontiguousarray(blocks[..., :scales]).view(np.float16) * np.float16(slices)
    blocks[..., :scales] = halves.view(np.uint8)
    return np.ascontiguousarray(blocks.transpose(1, 0, 2, 3)).reshape(slices, tensor.data.shape[0], -1)


def write_sliced(source: str, target: Path, slices: int) -> None:
    """The dense file again, each ffn as `slices` experts."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, value = field.types[0], field.contents()
        if name.endswith(".feed_forward_length"):
            value //= slices
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.add_expert_count(slices)
    writer.add_expert_used_count(slices)
    for tensor in reader.tensors:
        layer, _, part = tensor.name.rpartition(".ffn_")
        if part in ("gate.weight", "up.weight", "down.weight"):
            rows = tensor.data.shape[0]
            data = slice_down(tensor, slices) if part == "down.weight" else tensor.data.reshape(slices, rows // slices, -1)
            writer.add_tensor(f"{layer}.ffn_{part.replace('.', '_exps.')}", data, raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            if part == "norm.weight":
                writer.add_tensor(f"{layer}.ffn_gate_inp.weight", np.zeros((slices, tensor.data.shape[0]), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answers(model: Path, tokens: int, **options) -> tuple[list[list[int]], list[str], object]:
    """Greedy token ids and texts for every prompt, and the expert counters."""
    from libcolibri import Engine

    ids, texts = [], []
    with Engine.open(model, context_length=512, **options) as engine:
        for prompt in PROMPTS:
            steps = list(engine.new_session().generate([{"role": "user", "content": prompt}], max_tokens=tokens))
            ids.append([step.token_id for step in steps if step.token_id is not None])
            texts.append("".join(step.text for step in steps))
        return ids, texts, engine.expert_stats


def make_models(gguf_file: str, folder: Path, slices: int, quant: str | None) -> tuple[Path, Path]:
    """The model directories of the dense and the sliced model, made where they are missing."""
    from colibri_converter import convert

    folder.mkdir(parents=True, exist_ok=True)
    sliced = folder / "sliced.gguf"
    if not sliced.exists():
        write_sliced(gguf_file, sliced, slices)
    dense, moe = (folder / f"{name}-{quant or 'gguf'}" for name in ("dense", "moe"))
    for source, target in ((gguf_file, dense), (sliced, moe)):
        if not target.exists():
            convert(Path(source), target, quant=quant)
    return dense, moe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quant", help="tensor types of both model directories; default: the file's own")
    args = parser.parse_args()
    dense, moe = make_models(args.gguf, args.folder, args.slices, args.quant)
    dense_ids, dense_texts, _ = answers(dense, args.tokens)
    whole, texts, _ = answers(moe, args.tokens, expert_cache=args.slices)
    same = True
    for experts in (1, args.slices // 4, args.slices):
        for prefetch in (True, False, "auto"):
            ids, _, stats = answers(moe, args.tokens, expert_cache=experts, prefetch=prefetch)
            same &= ids == whole
            counts = f"{stats.misses} of {stats.hits + stats.misses} read when asked for, {stats.prefetch_used} of {stats.prefetched} ahead"
            verdict = "same tokens" if ids == whole else "DIFFERENT TOKENS"
            print(f"expert cache {experts} of {args.slices} a layer, prefetch {prefetch}: {verdict}; experts: {counts}", flush=True)
    for prompt, a, b, dense_text, text in zip(PROMPTS, dense_ids, whole, dense_texts, texts, strict=True):
        print(f"- {prompt}\n  {len(a)} tokens, {'those of the dense model' if a == b else 'not those of the dense model'}")
        print(f"  {' '.join(text.split())}" + ("" if a == b else f"\n  dense: {' '.join(dense_text.split())}"))
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
