"""What a model family is: how its config is read, and how its tensors are called elsewhere.

A family file holds one `FAMILY` and the function that turns its config into blocks; it has no equations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..config import LayerConfig, ModelConfig
from .config_reader import ConfigReader

if TYPE_CHECKING:
    from .gguf import Gguf

Order = Callable[[LayerConfig], Sequence[int] | np.ndarray]


@dataclass(frozen=True, slots=True)
class Rule:
    """A tensor of a Hugging Face checkpoint under its canonical name.

    pattern     regular expression for the whole name, general prefixes already taken away
    to          canonical name; \\1 and the like stand for groups of the pattern. Several names, with spaces between, where the tensor is
                cut up; {} in them for the number of an expert where the tensor holds all of them
    transform   steps of converter/transforms.py, with spaces between; "" for nothing
    order       of a layer's config: which stored row is row 0, 1, ... of the tensor that the steps get; for a vector, which element
    columns     of a layer's config: which stored column is column 0, 1, ... of it
    """

    pattern: str
    to: str
    transform: str = ""
    order: Order | None = None
    columns: Order | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type.

    parse     config -> ModelConfig; refuses what it has no equations for
    tensors   rules for names that are not canonical already; the first that matches holds
    skipped   regular expression for canonical names of tensors that are left out
    gguf      the family in llama.cpp's files
    """

    name: str
    parse: Callable[[ConfigReader], ModelConfig]
    tensors: tuple[Rule, ...] = ()
    skipped: str = ""
    gguf: "tuple[Gguf, ...]" = ()
