"""GGUF files written anew with other tensor types, metadata or tensors, by the gguf package.

In:  a GGUF file
Out: another one
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def rewrite(
    source: Path,
    target: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    kind_of: Callable[[gguf.ReaderTensor], gguf.GGMLQuantizationType] = lambda tensor: tensor.tensor_type,
) -> Path:
    """`source` as `target`.

    keys      metadata to add or to replace, below the architecture: numbers, flags, texts, or lists of flags
    without   metadata and tensors to leave out
    tensors   float32 tensors to add
    kind_of   the type of each tensor; other types than its own are quantised from its values
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    changed = {f"{architecture}.{key}": value for key, value in (keys or {}).items()}
    left_out = {f"{architecture}.{key}" for key in without} | set(changed) | {"general.architecture"}
    for key, field in reader.fields.items():
        if key not in left_out and not key.startswith("GGUF."):
            kinds = field.types
            writer.add_key_value(key, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for key, value in changed.items():
        inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), inner)
    for tensor in reader.tensors:
        if tensor.name not in without:
            _add(writer, tensor, kind_of(tensor))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, np.ascontiguousarray(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: gguf.GGUFWriter, tensor: gguf.ReaderTensor, kind: gguf.GGMLQuantizationType) -> None:
    data = tensor.data
    if kind != tensor.tensor_type:
        data = gguf.quants.quantize(gguf.quants.dequantize(data, tensor.tensor_type), kind)
    writer.add_tensor(tensor.name, data, raw_dtype=kind)
