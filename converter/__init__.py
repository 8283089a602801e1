"""From checkpoints to model directories: convert() is the whole interface."""

from .convert import ConversionReport, convert
from .plan import RECIPES

__all__ = ["RECIPES", "ConversionReport", "convert"]
