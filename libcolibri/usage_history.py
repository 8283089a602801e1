"""How often a model's experts were used, over all runs on this machine: a small file, so that the next start knows what to read first.

In:  a file, the model's fingerprint, the routing of forward passes
Out: decayed uses by layer and expert; the file, brought up to date now and then and at the end

The file holds expert numbers only: no tokens, no text. Format 1 is a JSON object:

    format       "colibri-usage-1"
    model        the engine's fingerprint: uses of other weights mean nothing
    tokens       tokens recorded so far
    weight       the same, decayed: what `uses` is relative to
    layers       routed layers
    uses         for each of them, the decayed uses of its experts

It is a help, never needed: a file that is damaged or another model's is replaced, one that cannot be written goes unwritten, and a file
that is no usage history at all is left alone. `remarks` and `notices` say so.
"""

import glob
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .atomic_file import write_atomically
from .errors import FormatError
from .expert_usage import ExpertUsage

USAGE_FORMAT = "colibri-usage-1"
# After so many tokens a use counts half: about a hundred questions with their answers. What is hot in the conversation at hand is the
# eviction policy's business, with a half-life of passes; this is what the next one begins with, and should be an average over many
# subjects, yet follow within days when a user's subjects change. With 8 of 128 experts for each token, an average expert is known by 6,000
# uses, to within 1.5 %.
HALF_LIFE_TOK = 65_536
SAVE_EVERY_S = 60.0  # what a crash can lose; a write takes some 10 ms
_START = b'{"format":"colibri-usage-'
_LARGEST_FILE = 64 << 20


class _Foreign(FormatError):
    """A file that nobody would call a usage history."""


class UsageHistory:
    """The uses that a file knew, and those of this run.

    num_experts   by layer
    clock         seconds, for saving now and then

    Never raises for what the file is, or that it cannot be written. Several processes may keep one file: each adds what it saw since
    it wrote last to what the file holds then; of two that write in the same instant, the last one wins. One thread at a time.
    """

    def __init__(
        self, path: str | Path, fingerprint: str, num_experts: Mapping[int, int], *, clock: Callable[[], float] = time.monotonic
    ):  # fmt: skip
        self.path, self._fingerprint, self._num_experts, self._clock = Path(path), fingerprint, dict(sorted(num_experts.items())), clock
        self._remarks: list[str] = []
        self._offsets = dict(zip(self._num_experts, np.cumsum([0, *self._num_experts.values()]).tolist(), strict=False))
        self._writable = True
        self._past = self._read()
        folder = next(parent for parent in self.path.absolute().parents if parent.exists())
        if self._writable and not os.access(folder, os.W_OK):
            self._writable = False
            self._remark(f"usage history {self.path}: {folder} cannot be written to; what is used is not remembered")
        self._new, self._new_weight, self._new_tok = np.zeros(sum(self._num_experts.values())), 0.0, 0
        self._saved_s, self._n_opening = clock(), len(self._remarks)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know about the file as it was found, a sentence each."""
        return tuple(self._remarks[: self._n_opening])

    @property
    def notices(self) -> tuple[str, ...]:
        """The same about what happened to it since then."""
        return tuple(self._remarks[self._n_opening :])

    @property
    def tokens(self) -> int:
        """Tokens recorded so far, in all runs."""
        return self._past[0] + self._new_tok

    @property
    def usage(self) -> ExpertUsage:
        """Everything up to now."""
        fade = _fade(self._new_tok)
        return ExpertUsage(self._by_layer(self._past[2] * fade + self._new), self._past[1] * fade + self._new_weight)

    def rates(self) -> dict[int, np.ndarray]:
        """By layer float64 (E,): how likely a token is to use each expert."""
        return self.usage.rates()

    def note_pass(self, routed: Mapping[int, np.ndarray]) -> None:
        """A forward pass has ended. routed: by layer, the experts of each token, int64 (T, K). Saves now and then."""
        n_tok = len(next(iter(routed.values())))
        fade = _fade(n_tok)
        places = np.concatenate([ids.reshape(-1) for ids in routed.values()])
        places += np.repeat([self._offsets[layer] for layer in routed], [ids.size for ids in routed.values()])
        self._new *= fade
        self._new += np.bincount(places, minlength=len(self._new))
        self._new_weight, self._new_tok = self._new_weight * fade + n_tok, self._new_tok + n_tok
        if self._clock() - self._saved_s >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Add this run's uses to what the file holds now."""
        self._saved_s = self._clock()
        if not self._new_tok or not self._writable:
            return
        tokens, weight, uses = self._read()
        if not self._writable:  # somebody put another file there
            return
        fade = _fade(self._new_tok)
        merged = tokens + self._new_tok, weight * fade + self._new_weight, uses * fade + self._new
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self._text_of(*merged).encode())
        except OSError as error:
            self._remark(f"usage history {self.path}: cannot be written ({error.strerror}); what was used is not remembered")
            return
        self._past, self._new_weight, self._new_tok = merged, 0.0, 0
        self._new[:] = 0.0

    def _text_of(self, tokens: int, weight: float, uses: np.ndarray) -> str:
        rows = {layer: [float(f"{n:.5g}") for n in row.tolist()] for layer, row in self._by_layer(uses).items()}
        facts: dict[str, Any] = {"format": USAGE_FORMAT, "model": self._fingerprint, "tokens": tokens, "weight": weight}
        return json.dumps(facts | {"layers": list(rows), "uses": list(rows.values())}, separators=(",", ":")) + "\n"

    def _read(self) -> tuple[int, float, np.ndarray]:
        """(tokens, weight, uses) of the file; zeros where there is nothing to be had of it."""
        nothing = 0, 0.0, np.zeros(sum(self._num_experts.values()))
        try:
            found = _load(self.path, self._fingerprint, self._num_experts)
        except FormatError as error:
            self._writable = not isinstance(error, _Foreign)
            self._remark(f"{error}; " + ("it is begun anew" if self._writable else "it is left alone, and nothing is remembered"))
            return nothing
        if found is None:
            return nothing
        tokens, usage = found
        return tokens, usage.weight, np.concatenate(list(usage.uses.values()))

    def _by_layer(self, uses: np.ndarray) -> dict[int, np.ndarray]:
        return {layer: uses[self._offsets[layer] : self._offsets[layer] + count] for layer, count in self._num_experts.items()}

    def _remark(self, text: str) -> None:
        if text not in self._remarks:
            self._remarks.append(text)


def history_file(path: str | Path, fingerprint: str) -> Path:
    """The history that `path` means for a model: the file itself, or the model's file in a folder that is there."""
    return Path(path) / f"{fingerprint[:32]}.json" if Path(path).is_dir() else Path(path)


def read_usage(path: Path, fingerprint: str, num_experts: Mapping[int, int]) -> tuple[int, ExpertUsage] | None:
    """Tokens recorded, and the uses, for a model with so many experts by layer; None where there is no file.

    Raises FormatError for a file that is damaged, of another model, or no usage history.
    """
    return _load(path, fingerprint, dict(sorted(num_experts.items())))


def _load(path: Path, fingerprint: str, num_experts: Mapping[int, int]) -> tuple[int, ExpertUsage] | None:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _Foreign(f"usage history {path}: cannot be read ({error.strerror})") from error
    # A beginning of ours, nothing or zeros are what a power failure leaves of a history.
    if data.strip(b"\0") and not data.startswith(_START[: len(data)]):
        raise _Foreign(f"{path}: is no usage history")
    try:
        facts = json.loads(data)
        if facts["format"] != USAGE_FORMAT:
            raise FormatError(f"usage history {path}: has format {str(facts['format'])[:40]!r}, expected {USAGE_FORMAT!r}")
        if facts["model"] != fingerprint:
            raise FormatError(f"usage history {path}: is another model's")
        return _check(facts, num_experts)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"usage history {path}: is damaged") from error


def _check(facts: dict[str, Any], num_experts: Mapping[int, int]) -> tuple[int, ExpertUsage]:
    """What `facts` say; ValueError, KeyError or TypeError where they do not fit the model or are no uses."""
    tokens, weight = facts["tokens"], facts["weight"]
    uses = {layer: np.array(row, np.float64) for layer, row in zip(facts["layers"], facts["uses"], strict=True)}
    if {layer: row.shape for layer, row in uses.items()} != {layer: (count,) for layer, count in num_experts.items()}:
        raise ValueError("other layers or experts")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0 or not math.isfinite(weight) or weight < 0.0:
        raise ValueError("no count of tokens")
    # No expert is used more often than once by a token; the digits that were cut off allow for a little more.
    if not all(((row >= 0.0) & (row <= weight * 1.001)).all() for row in uses.values()):
        raise ValueError("no counts of uses")
    return tokens, ExpertUsage({layer: uses[layer] for layer in num_experts}, float(weight))


def _fade(n_tok: int) -> float:
    """What a use counts after `n_tok` more tokens."""
    return 0.5 ** (n_tok / HALF_LIFE_TOK)


def forget(path: Path) -> bool:
    """Remove a usage history, and what a process that was killed left beside it; whether there was one. OSError where not allowed."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        partial.unlink(missing_ok=True)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
