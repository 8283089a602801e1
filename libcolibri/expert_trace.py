"""Which experts each forward pass used: recorded while a model runs, read by the simulator.

In:  a file, the routing of forward passes
Out: JSON lines: first the facts of the model, then one line per pass with the experts of each routed layer

The file holds expert numbers only: no tokens, no text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from .errors import FormatError

TRACE_FORMAT = "colibri-expert-trace-1"


class TraceWriter:
    """Appends a line for each pass to a new file; a line that was cut short by a crash is ignored by the reader.

    A drive that takes no more ends the recording, not the run that is recorded: `error` says why, `passes` how many lines there are.
    """

    def __init__(self, path: Path, expert_bytes: Mapping[int, int], num_experts: Mapping[int, int]):
        self.path, self.passes = path, 0
        self.error: OSError | None = None
        self._file = path.open("w", encoding="utf-8", buffering=1)  # whole lines reach the file, whatever ends the process
        layers = sorted(expert_bytes)
        facts = {
            "format": TRACE_FORMAT,
            "layers": layers,
            "expert_bytes": [expert_bytes[layer] for layer in layers],
            "num_experts": [num_experts[layer] for layer in layers],
        }
        self._file.write(json.dumps(facts) + "\n")

    def add(self, n_tok: int, experts: Sequence[np.ndarray]) -> None:
        """One pass over `n_tok` tokens: the experts of each routed layer, an entry for every token that uses one, in any order."""
        if self.error is not None:
            return
        found = [np.unique(used, return_counts=True) for used in experts]
        line: dict[str, Any] = {"n_tok": n_tok, "experts": [used.tolist() for used, _ in found]}
        if n_tok > 1:
            line["counts"] = [counts.tolist() for _, counts in found]
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self.passes += 1
        except OSError as error:
            self.error = error

    @property
    def remark(self) -> str | None:
        """A sentence about a recording that ended early; None for one that is whole."""
        if self.error is None:
            return None
        return f"trace {self.path}: recording ended after {self.passes} passes ({self.error.strerror}): give a path on a drive with room"

    def close(self) -> None:
        """Nothing is written any more. What a full drive did not take is given up."""
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TracedPass(NamedTuple):
    """A forward pass over `n_tok` tokens: layer by layer the experts used, each once, and how many tokens used each."""

    n_tok: int
    experts: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Trace:
    """Facts by routed layer, and the passes."""

    layers: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    num_experts: tuple[int, ...]
    passes: tuple[TracedPass, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(size * count for size, count in zip(self.expert_bytes, self.num_experts, strict=True))


def read_trace(path: Path) -> Trace:
    """The trace in `path`. Raises FormatError for a file that is none, or a line that does not fit its first one."""
    try:
        with path.open(encoding="utf-8") as file:
            facts = _parse(path, 1, next(file, ""))
            if facts.get("format") != TRACE_FORMAT:
                raise FormatError(f"{path}: is no expert trace (format {facts.get('format')!r}, expected {TRACE_FORMAT!r})")
            layers, sizes, counts = (_numbers(path, facts, key) for key in ("layers", "expert_bytes", "num_experts"))
            if not len(layers) == len(sizes) == len(counts):
                raise FormatError(f"{path}: line 1 has {len(layers)} layers, {len(sizes)} sizes and {len(counts)} counts: it is damaged")
            return Trace(layers, sizes, counts, tuple(_passes(path, file, counts)))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}); record one with --trace") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is no expert trace; record one with --trace") from error


def _passes(path: Path, lines: Iterator[str], num_experts: Sequence[int]) -> Iterator[TracedPass]:
    for number, text in enumerate(lines, 2):
        if not text.endswith("\n"):  # the last line of a run that was killed
            return
        line = _parse(path, number, text)
        experts, n_tok, counts = line.get("experts"), line.get("n_tok"), line.get("counts")
        if not _fits(n_tok, experts, counts, num_experts):
            raise FormatError(f"{path}: line {number} does not fit the model of line 1: record the trace again")
        assert isinstance(experts, list) and isinstance(n_tok, int)
        counts = counts or [[1] * len(used) for used in experts]  # older recordings have none
        yield TracedPass(n_tok, tuple(tuple(used) for used in experts), tuple(tuple(layer) for layer in counts))


def _fits(n_tok: Any, experts: Any, counts: Any, num_experts: Sequence[int]) -> bool:
    if not isinstance(n_tok, int) or n_tok < 1 or not isinstance(experts, list) or len(experts) != len(num_experts):
        return False
    if not all(_valid(used, count) for used, count in zip(experts, num_experts, strict=True)):
        return False
    if counts is None:
        return True
    if not isinstance(counts, list) or len(counts) != len(experts):
        return False
    return all(_valid(layer, n_tok + 1) and len(layer) == len(used) for layer, used in zip(counts, experts, strict=True))


def _valid(used: Any, count: int) -> bool:
    return isinstance(used, list) and all(isinstance(e, int) and not isinstance(e, bool) and 0 <= e < count for e in used)


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise FormatError(f"{path}: line {number} is no JSON: it is no expert trace") from error
    if not isinstance(line, dict):
        raise FormatError(f"{path}: line {number} is no JSON object: it is no expert trace")
    return line


def _numbers(path: Path, facts: dict[str, Any], key: str) -> tuple[int, ...]:
    found = facts.get(key)
    if not isinstance(found, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in found):
        raise FormatError(f"{path}: line 1 has {key}={str(found)[:40]}, expected a list of numbers: it is damaged")
    return tuple(found)
