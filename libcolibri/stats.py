"""Plain facts about work done: counters and times, nothing else.

In: numbers. Out: frozen records; whoever shows them does the formatting.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Counters of an expert cache; a difference of two is what happened between them.

    shrinks         how often the cache gave memory back because the process was short of it
    prefetched      experts that were read before a layer asked for them, prefetch_used of them experts that it did ask for
    wait_s          time in which a pass did nothing but wait for the drive
    capacity_bytes  no counter: bytes of its slots at the end
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    evictions: int = 0
    shrinks: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    wait_s: float = 0.0
    capacity_bytes: int = 0

    def __sub__(self, earlier: "ExpertStats") -> "ExpertStats":
        changed = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        return ExpertStats(**changed | {"capacity_bytes": self.capacity_bytes})

    def __add__(self, other: "ExpertStats") -> "ExpertStats":
        changed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return ExpertStats(**changed | {"capacity_bytes": other.capacity_bytes})

    @property
    def prefetch_accuracy(self) -> float:
        """Share of the experts read ahead that were asked for, 0 to 1; 1 when none was read."""
        return self.prefetch_used / self.prefetched if self.prefetched else 1.0

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were in memory, 0 to 1; 1 when none was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """One generation, up to the step that carries this record.

    prompt_tok      tokens of the prompt, reused_tok of them taken from the session, prefilled_tok of them computed so far
    completion_tok  tokens generated so far, an end-of-sequence token included
    prefill_s       time in the forward passes over the prompt, waiting for other sessions not included
    decode_s        time in the forward passes and sampling after the first token
    ttft_s          from the call to the first token, waiting included; 0 before it
    expert_shrinks         how often the expert cache gave memory back
    expert_capacity_bytes  the expert cache's size at the end
    """

    prompt_tok: int = 0
    reused_tok: int = 0
    prefilled_tok: int = 0
    completion_tok: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_read_bytes: int = 0
    expert_shrinks: int = 0
    expert_capacity_bytes: int = 0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens computed per second; 0 when none was."""
        return self.prefilled_tok / self.prefill_s if self.prefill_s > 0.0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first, which comes out of prefill; 0 until there is a second."""
        return (self.completion_tok - 1) / self.decode_s if self.completion_tok > 1 and self.decode_s > 0.0 else 0.0

    @property
    def expert_hit_rate(self) -> float:
        """Share of the experts asked for that were in memory, 0 to 1; 1 for a dense model."""
        return ExpertStats(self.expert_hits, self.expert_misses).hit_rate
