"""Tensor types and their tiles.

In:  names ("q4_k") or GGUF type ids
Out: Format objects; FORMATS is the whole list
"""

from .base import TILE_ROWS, Format
from .floats import BF16, F16, F32
from .q4_0 import Q4_0
from .q4_1 import Q4_1
from .q4_k import Q4_K
from .q5_0 import Q5_0
from .q6_k import Q6_K
from .q8_0 import Q8_0

FORMATS: dict[str, Format] = {f.name: f for f in (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q6_K)}

__all__ = ["FORMATS", "TILE_ROWS", "Format"]
