"""Tiny GGUF files kept as differences from the checkpoints they were made of: both hold the same random weights, which nothing compresses.

In:  tests/fixtures/tiny/NAME (safetensors), tests/fixtures/gguf/NAME.npz
Out: the GGUF file, to the byte as llama.cpp's converter wrote it
"""

import hashlib
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
KEY_BYTES = 32  # 16 random bf16 weights are found in one place only
NAMES = tuple(sorted(path.stem for path in (FIXTURES / "gguf").glob("*.npz")))


def checkpoint_bytes(name: str) -> np.ndarray:
    """uint16 (n,): all weight files of a checkpoint end to end, a last odd byte dropped."""
    raw = b"".join(path.read_bytes() for path in sorted((FIXTURES / "tiny" / name).glob("*.safetensors")))
    return np.frombuffer(raw[: len(raw) // 2 * 2], np.uint16)


def pack(name: str, gguf: bytes) -> None:
    """Writes NAME.npz: runs (start in the checkpoint, or -1 for what follows in `literal`; words) of 16-bit words."""
    base, target = checkpoint_bytes(name), np.frombuffer(gguf, np.uint16)
    words = KEY_BYTES // 2
    places = {base[at : at + words].tobytes(): at for at in range(len(base) - words)}
    runs: list[list[int]] = []
    literal, at = [], 0
    while at < len(target):
        start = places.get(target[at : at + words].tobytes(), -1)
        if start < 0:
            if not runs or runs[-1][0] >= 0:
                runs.append([-1, 0])
            runs[-1][1] += 1
            literal.append(target[at])
            at += 1
            continue
        shared = min(len(base) - start, len(target) - at)
        differ = np.flatnonzero(base[start : start + shared] != target[at : at + shared])
        runs.append([start, int(differ[0]) if len(differ) else shared])
        at += runs[-1][1]
    np.savez_compressed(
        FIXTURES / "gguf" / f"{name}.npz",
        runs=np.array(runs, np.int32), literal=np.array(literal, np.uint16), sha256=hashlib.sha256(gguf).hexdigest(),
    )  # fmt: skip


def unpack(name: str, path: Path) -> Path:
    """Writes the GGUF file `path`; returns it."""
    base = checkpoint_bytes(name)
    with np.load(FIXTURES / "gguf" / f"{name}.npz") as delta:
        runs, literal, digest = delta["runs"], delta["literal"], str(delta["sha256"])
    parts, used = [], 0
    for start, words in runs:
        if start < 0:
            parts.append(literal[used : used + words])
            used += words
        else:
            parts.append(base[start : start + words])
    gguf = np.concatenate(parts).tobytes()
    assert hashlib.sha256(gguf).hexdigest() == digest, f"{name}: the checkpoint changed: run tests/fixtures/make_tiny_gguf.py"
    path.write_bytes(gguf)
    return path
