"""Feed-forward nonlinearities in float64: numpy only."""

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def activated(name: str, gate: np.ndarray, up: np.ndarray | None, limit: float) -> np.ndarray:
    """What a block's down_proj multiplies; up None: there is no such matrix."""
    if name == "silu":
        opened = gate * sigmoid(gate)
    elif name == "gelu_tanh":
        opened = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    elif name == "relu2":
        opened = np.maximum(gate, 0) ** 2
    else:
        gate = np.minimum(gate, limit)
        opened = gate * sigmoid(1.702 * gate)
        up = None if up is None else np.clip(up, -limit, limit) + 1
    return opened if up is None else opened * up
