"""Random ggml blocks of every tensor type, with scales of a size that weights have."""

import numpy as np

from libcolibri.quant import FORMATS


def random_blocks(name: str, rows: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 (rows, blocks, ggml_block_bytes); nothing in them is NaN or infinite."""
    fmt = FORMATS[name]
    out = rng.integers(0, 256, (rows, blocks, fmt.ggml_block_bytes), dtype=np.uint8)
    for at in fmt.half_scales:
        out[..., at : at + 2] = rng.normal(0, 0.01, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    if name == "mxfp4":
        out[..., 0] = rng.integers(115, 125, (rows, blocks))
    if name in ("f32", "f16", "bf16"):
        out[..., -1] &= 0x3B
    return out
