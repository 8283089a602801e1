"""What a model family is: how its config is read, and how its tensors are called elsewhere.

A family file holds one `FAMILY` and the function that turns its config into blocks; it has no equations.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..config import ModelConfig
from .config_reader import ConfigReader


@dataclass(frozen=True, slots=True)
class Rule:
    """A tensor of a Hugging Face checkpoint under its canonical name.

    pattern     regular expression for the whole name, general prefixes already taken away
    to          canonical name; \\1 and the like stand for groups of the pattern
    transform   name of what converter/transforms.py does to the values; "" for nothing
    """

    pattern: str
    to: str
    transform: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type.

    parse     config -> ModelConfig; refuses what it has no equations for
    tensors   rules for names that are not canonical already; the first that matches holds
    """

    name: str
    parse: Callable[[ConfigReader], ModelConfig]
    tensors: tuple[Rule, ...] = ()
