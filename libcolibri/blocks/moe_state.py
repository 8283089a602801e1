"""Routing state and buffers that the mixture-of-experts layers of a decoder share."""

import numpy as np

from ..arena import allocate
from ..kernels.activations import BLOCK, COLS
from ..recorder import Rows, padded


class RoutingState:
    """Logits of E experts for `max_tok` tokens, and the K choices of each, kept layer by layer (num_layers)."""

    def __init__(self, E: int, K: int, max_tok: int, num_layers: int):
        self.logits = Rows(max_tok, E)
        self.ids = np.zeros((num_layers, max_tok, K), np.int64)
        self.weights = np.zeros((num_layers, max_tok, K), np.float32)


class MoeState(RoutingState):
    """Buffers for `max_tok` tokens with K choices each. counters: hits and misses of each layer, int64 (num_layers, 2).

    D hidden_size, F expert width, E experts; the index arrays are those of kernels/moe.py.
    """

    def __init__(self, D: int, F: int, E: int, K: int, max_tok: int, num_layers: int):
        super().__init__(E, K, max_tok, num_layers)
        n = max_tok * K
        self.slot, self.source = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.count, self.first, self.done = (np.zeros(E, np.int64) for _ in range(3))
        self.ready, self.missing = np.zeros(1 + E, np.int64), np.zeros(1 + E, np.int64)
        self.fresh, self.counters = np.zeros(1, np.int64), np.zeros((num_layers, 2), np.int64)
        self.gathered = allocate(n * row_bytes(D), "activations")
        self.hidden, self.spare, self.outputs = Rows(n, F), Rows(n, F), Rows(n, D)
        self.hidden_panels = allocate(n * (F // COLS * BLOCK), "activations")

    @staticmethod
    def bytes_for(D: int, F: int, E: int, K: int, max_tok: int) -> int:
        """Bytes of the buffers, before they are made (the tables are small)."""
        per_row = row_bytes(D) + (2 * padded(F) + padded(D)) * 4 + F // COLS * BLOCK
        return max_tok * (K * per_row + 4 * padded(E))


def row_bytes(cols: int) -> int:
    """Bytes of a gathered row, float32 or panels, whichever is larger."""
    return max(padded(cols) * 4, cols // COLS * BLOCK)
