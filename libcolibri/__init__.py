"""colibri: run Mixture-of-Experts models bigger than memory.

    from libcolibri import Engine, SamplingParams

    with Engine.open("models/my-model") as engine:
        session = engine.new_session()
        for step in session.generate([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0.7)):
            print(step.text, end="")

The data's way: model directory -> loader -> expert store -> expert cache -> kernels -> decoder -> sampler -> generator -> session.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import ColibriError

if TYPE_CHECKING:
    from .encoder import Encoder
    from .engine import Engine
    from .generator import Step
    from .sampler import SamplingParams
    from .session import Session
    from .stats import GenerationStats

__version__ = "0.2.0"
__all__ = ["ColibriError", "Encoder", "Engine", "GenerationStats", "SamplingParams", "Session", "Step", "__version__"]

# Found when first asked for: importing the engine imports numba, which a program's `--help` should not wait for.
_MODULES = {
    "Encoder": "encoder",
    "Engine": "engine",
    "GenerationStats": "stats",
    "SamplingParams": "sampler",
    "Session": "session",
    "Step": "generator",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
