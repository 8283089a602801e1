"""Plain facts about work done: counters and times, nothing else.

In: numbers. Out: frozen records; whoever shows them does the formatting.
"""

from dataclasses import dataclass, fields

LayerCounts = tuple[tuple[int, int], ...]  # hits and misses of every layer of a model; (0, 0) for a layer without experts


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Counters of an expert cache; a difference of two is what happened between them.

    hits, misses    experts that were, or were not, in memory when a layer asked for them; once for each layer and pass
    read_bytes      of the experts that came into memory
    shrinks         how often the cache gave memory back because the process was short of it
    prefetched      experts that were read before a layer asked for them, prefetch_used of them experts that it did ask for in that pass
    unused_bytes    of those that it did not ask for in that pass
    wait_s          time in which a pass did nothing but wait for the drive
    reading_s       time in which at least one read was under way
    capacity_bytes  no counter: bytes of its slots at the end
    layers          hits and misses by layer; their sums are `hits` and `misses`. Empty where nobody counted
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    evictions: int = 0
    shrinks: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    unused_bytes: int = 0
    wait_s: float = 0.0
    reading_s: float = 0.0
    capacity_bytes: int = 0
    layers: LayerCounts = ()

    def __sub__(self, earlier: "ExpertStats") -> "ExpertStats":
        changed = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS}
        return ExpertStats(**changed, capacity_bytes=self.capacity_bytes, layers=_combined(self.layers, earlier.layers, -1))

    def __add__(self, later: "ExpertStats") -> "ExpertStats":
        changed = {name: getattr(self, name) + getattr(later, name) for name in _COUNTERS}
        capacity = later.capacity_bytes or self.capacity_bytes
        return ExpertStats(**changed, capacity_bytes=capacity, layers=_combined(self.layers, later.layers, 1))

    @property
    def asked(self) -> int:
        """How often a layer asked for an expert."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were in memory, 0 to 1; 1 when none was asked for."""
        return self.hits / self.asked if self.asked else 1.0

    @property
    def layer_hit_rates(self) -> dict[int, float]:
        """Hit rate of each layer that was asked for experts."""
        return {layer: hits / (hits + misses) for layer, (hits, misses) in enumerate(self.layers) if hits + misses}

    @property
    def needed_bytes(self) -> int:
        """Bytes of the experts that had to be read: of all that were, but those read ahead for nothing."""
        return max(0, self.read_bytes - self.unused_bytes)

    @property
    def prefetch_accuracy(self) -> float:
        """Share of the experts read ahead that were asked for, 0 to 1; 1 when none was read."""
        return self.prefetch_used / self.prefetched if self.prefetched else 1.0


_COUNTERS = tuple(field.name for field in fields(ExpertStats) if field.name not in ("capacity_bytes", "layers"))


def _combined(first: LayerCounts, second: LayerCounts, sign: int) -> LayerCounts:
    """first + sign * second, layer by layer; nobody's counts are zeros."""
    if not first or not second:
        return first or tuple((sign * hits, sign * misses) for hits, misses in second)
    return tuple((a + sign * c, b + sign * d) for (a, b), (c, d) in zip(first, second, strict=True))


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """The forward passes of one phase of a generation.

    n_tok           tokens evaluated, in so many passes
    seconds         in the passes, and in sampling where it is counted; waiting for other sessions not included
    computed_bytes  that the passes had to go through, each once in a pass: the weights that every token needs, the experts that
                    were chosen, keys and values of the positions that are seen
    experts         what the expert cache did in the passes
    """

    n_tok: int = 0
    passes: int = 0
    seconds: float = 0.0
    computed_bytes: int = 0
    experts: ExpertStats = ExpertStats()

    def __add__(self, later: "PhaseStats") -> "PhaseStats":
        return PhaseStats(*(getattr(self, field.name) + getattr(later, field.name) for field in fields(self)))

    @property
    def tok_s(self) -> float:
        """Tokens per second; 0 when there was none."""
        return self.n_tok / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def read_bytes_per_tok(self) -> float:
        """Bytes of experts read per token; 0 when there was none."""
        return self.experts.read_bytes / self.n_tok if self.n_tok else 0.0

    @property
    def computed_bytes_per_tok(self) -> float:
        """Bytes gone through per token; 0 when there was none. Few in a prompt, whose tokens share a pass."""
        return self.computed_bytes / self.n_tok if self.n_tok else 0.0

    @property
    def waited_share(self) -> float:
        """Share of the time in which nothing was done but wait for the drive, 0 to 1."""
        return self.experts.wait_s / self.seconds if self.seconds > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """One generation, up to the step that carries this record.

    prompt_tok      tokens of the prompt, reused_tok of them taken from the session
    completion_tok  tokens generated so far, an end-of-sequence token included
    ttft_s          from the call to the first token, waiting included; 0 before it
    prefill         the passes over the prompt, so far
    decode          the passes and the sampling after the first token, which comes out of prefill: one token less than was generated
    """

    prompt_tok: int = 0
    reused_tok: int = 0
    completion_tok: int = 0
    ttft_s: float = 0.0
    prefill: PhaseStats = PhaseStats()
    decode: PhaseStats = PhaseStats()

    @property
    def experts(self) -> ExpertStats:
        """What the expert cache did in both phases."""
        return self.prefill.experts + self.decode.experts

    @property
    def prefilled_tok(self) -> int:
        """Prompt tokens computed so far."""
        return self.prefill.n_tok

    @property
    def prefill_s(self) -> float:
        """Seconds in the passes over the prompt."""
        return self.prefill.seconds

    @property
    def decode_s(self) -> float:
        """Seconds in the passes and the sampling after the first token."""
        return self.decode.seconds

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens computed per second; 0 when none was."""
        return self.prefill.tok_s

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first; 0 until there is a second."""
        return self.decode.tok_s

    @property
    def expert_hits(self) -> int:
        """Of both phases, like the next five."""
        return self.experts.hits

    @property
    def expert_misses(self) -> int:
        return self.experts.misses

    @property
    def expert_read_bytes(self) -> int:
        return self.experts.read_bytes

    @property
    def expert_shrinks(self) -> int:
        return self.experts.shrinks

    @property
    def expert_capacity_bytes(self) -> int:
        return self.experts.capacity_bytes

    @property
    def expert_hit_rate(self) -> float:
        return self.experts.hit_rate
