"""How far quantised kernels are from float32 arithmetic on the same weights: KL divergence and top-1 agreement.

    python benchmarks/quality.py MODEL.gguf MODEL_DIR TEXT [--tokens 512] [--peer-python PYTHON]

In:  a Qwen2 GGUF file, the model directory made from it, a text file
Out: one line per engine: mean KL(reference || engine) over all positions but the first, the first position's KL, top-1 agreement

The reference dequantises the file with the `gguf` package and computes in float32 with numpy; the KV cache is float32. --peer-python
names a Python that has llama-cpp-python, whose logits are then measured the same way on the same tokens.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np

PEER = """
import sys, numpy as np
from llama_cpp import Llama
ids = np.load(sys.argv[2])
model = Llama(sys.argv[1], n_ctx=len(ids) + 8, n_batch=len(ids), n_threads=2, n_threads_batch=2, logits_all=True, verbose=False)
model.eval([int(i) for i in ids])
np.save(sys.argv[3], model.scores[: len(ids)])
"""


class Reference:
    """A Qwen2 decoder in float32 numpy, weights from gguf's own dequantisation, one matrix in memory at a time."""

    def __init__(self, path: str):
        reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in reader.tensors}
        field = {k: v.contents() for k, v in reader.fields.items() if k.startswith("qwen2.")}
        self.layers, self.heads = field["qwen2.block_count"], field["qwen2.attention.head_count"]
        self.kv_heads, self.theta = field["qwen2.attention.head_count_kv"], field["qwen2.rope.freq_base"]
        self.epsilon = np.float32(field["qwen2.attention.layer_norm_rms_epsilon"])

    def weight(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.weight(name)

    def rope(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None, None] * self.theta ** (-np.arange(half) / half)
        a, b, c, s = x[..., :half], x[..., half:], np.cos(angles), np.sin(angles)
        return np.concatenate([a * c - b * s, b * c + a * s], -1).astype(np.float32)

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        n = len(q)
        q, k, v = (x.reshape(n, heads, -1) for x, heads in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads)))
        q, k = self.rope(q), np.repeat(self.rope(k), self.heads // self.kv_heads, 1)
        v = np.repeat(v, self.heads // self.kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(q.shape[-1] ** 0.5) + np.triu(np.full((n, n), -np.inf, np.float32), 1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """float32 (T, V)."""
        x = self.weight("token_embd.weight")[ids]
        for i in range(self.layers):
            at = f"blk.{i}."
            h = self.norm(x, at + "attn_norm.weight")
            q, k, v = (h @ self.weight(f"{at}attn_{n}.weight").T + self.weight(f"{at}attn_{n}.bias") for n in "qkv")
            x = x + self.attention(q, k, v) @ self.weight(at + "attn_output.weight").T
            h = self.norm(x, at + "ffn_norm.weight")
            gate = h @ self.weight(at + "ffn_gate.weight").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ self.weight(at + "ffn_up.weight").T)) @ self.weight(at + "ffn_down.weight").T
        head = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        return self.norm(x, "output_norm.weight") @ self.weight(head).T


def divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(softmax(reference) || softmax(other)) per position, float64 (T,)."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    result = []
    for r, o in zip(reference, other, strict=True):
        p, q = log_softmax(r), log_softmax(o)
        result.append((np.exp(p) * (p - q)).sum())
    return np.array(result)


def report(name: str, reference: np.ndarray, other: np.ndarray) -> None:
    kl = divergence(reference, other)
    agreement = (reference.argmax(-1) == other.argmax(-1)).mean()
    print(f"{name}: mean KL {kl[1:].mean():.6f} without the first position ({kl[0]:.6f}), top-1 agreement {agreement:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--peer-python")
    args = parser.parse_args()
    from libcolibri import Engine

    with Engine.open(args.model, context_length=args.tokens + 16) as engine:
        ids = np.array(engine.tokenizer.encode(pathlib.Path(args.text).read_text("utf-8"))[: args.tokens], np.int64)
        ours = engine.new_session().logits(ids)
    print(f"{len(ids)} tokens of {args.text}")
    reference = Reference(args.gguf).logits(ids)
    report("colibri", reference, ours)
    if args.peer_python:
        with tempfile.TemporaryDirectory() as folder:
            tokens, out = f"{folder}/ids.npy", f"{folder}/logits.npy"
            np.save(tokens, ids)
            subprocess.run([args.peer_python, "-c", PEER, args.gguf, tokens, out], check=True, stdout=sys.stderr)
            report("llama.cpp", reference, np.load(out))


if __name__ == "__main__":
    main()
