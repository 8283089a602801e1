"""When experts are read before a layer asks for them, and which.

In:  what the next layer would choose for the residual stream as it is before this layer's experts; how long passes took
Out: the experts most likely to be needed; whether looking ahead pays

While a layer waits for the drive, the next layer's router is applied to the residual stream. A token's best choices of it come true more
often than its last ones (A. Eliseev, D. Mazur, arXiv 2312.17238, found the same), so the upper half counts.
"""

import numpy as np

PROMPT_TOK = 8  # a pass over fewer tokens than this reads as carefully as one over a single token
STEP_EXPERTS = 1  # the drive is idle for less than one expert's time between two layers' waits
TRIAL_TOK, EVERY_TOK = 4, 64  # of every 64 single tokens, 4 try the other way
PROFIT = 0.99  # looking ahead must take less than this share of the time without
_MEMORY_TOK = 32.0  # a duration counts a third after so many tokens of its kind


class Prefetch:
    """Decides pass by pass. mode: "on", "off" or "auto", which compares durations of single tokens with and without."""

    def __init__(self, mode: str):
        self.mode = mode
        self._tokens = 0
        self._seconds: dict[bool, float] = {}  # decaying mean of a token's duration, with and without looking ahead

    def wanted(self, n_tok: int) -> bool:
        """Whether the next pass, over n_tok tokens, should look ahead. For prompts always: they use nearly every expert."""
        if self.mode != "auto" or n_tok > 1:
            return self.mode != "off"
        place = self._tokens % EVERY_TOK
        if len(self._seconds) < 2 or place >= EVERY_TOK - TRIAL_TOK:
            return not self.pays if len(self._seconds) == 2 else place % (2 * TRIAL_TOK) < TRIAL_TOK
        return self.pays

    @property
    def pays(self) -> bool:
        """Whether single tokens have been faster with it than without."""
        with_it, without = self._seconds.get(True), self._seconds.get(False)
        return with_it is None or without is None or with_it < PROFIT * without

    def most(self, n_tok: int) -> int:
        """How many experts of the next layer to read at most."""
        return STEP_EXPERTS if n_tok < PROMPT_TOK else 1 << 30

    def note(self, n_tok: int, looked_ahead: bool, seconds: float) -> None:
        """A pass over n_tok tokens took so long."""
        if n_tok == 1:
            self._tokens += 1
            before = self._seconds.get(looked_ahead, seconds)
            self._seconds[looked_ahead] = before + (seconds - before) / _MEMORY_TOK


def most_likely(ids: np.ndarray) -> list[int]:
    """Experts by falling likelihood. ids: int64 (T, K), each token's choices, best first."""
    upper = ids[:, : -(-ids.shape[1] // 2)]
    experts, places, counts = np.unique(upper.T.ravel(), return_index=True, return_counts=True)
    return [int(e) for e in experts[np.lexsort((places, -counts))]]
