"""What share of the possible a phase of a generation reached: the roofline of drive and memory.

In: bytes read and computed, what they took, how fast drive and memory are at best. Out: the time that was needed, and by what
"""

from dataclasses import dataclass

from .stats import PhaseStats

ARITHMETIC_TOK = 8  # tokens of a pass from which multiplying takes longer than fetching the weights that they share


@dataclass(frozen=True, slots=True)
class Roofline:
    """A phase beside the least time in which drive and memory could have delivered its bytes, both at once and without a pause.

    phase            what was done
    drive_bytes_s    bytes/s of the drive at best; 0: nothing was read yet
    memory_bytes_s   bytes/s of memory at best
    """

    phase: PhaseStats
    drive_bytes_s: float
    memory_bytes_s: float

    @property
    def drive_s(self) -> float:
        """Seconds that reading the experts that were needed takes the drive at best."""
        return self.phase.experts.needed_bytes / self.drive_bytes_s if self.drive_bytes_s > 0.0 else 0.0

    @property
    def memory_s(self) -> float:
        """Seconds that going through weights, keys and values takes memory at best."""
        return self.phase.computed_bytes / self.memory_bytes_s if self.memory_bytes_s > 0.0 else 0.0

    @property
    def bound(self) -> str:
        """What needs the most time: "drive", "memory", or "arithmetic", where many tokens share a pass over weights that are in memory.

        How fast the arithmetic could be is not measured.
        """
        if self.drive_s > self.memory_s:
            return "drive"
        shared = self.phase.passes and self.phase.n_tok / self.phase.passes >= ARITHMETIC_TOK
        return "arithmetic" if shared else "memory"

    @property
    def needed_s(self) -> float | None:
        """Seconds that the bound takes at best; None where it is not known."""
        return None if self.bound == "arithmetic" else max(self.drive_s, self.memory_s)

    @property
    def share(self) -> float | None:
        """Share of the possible speed that was reached; None where it is not known, and without any pass.

        About 0 to 1: more is an error of measurement, such as a drive that was faster once than ever since.
        """
        needed = self.needed_s
        return needed / self.phase.seconds if needed is not None and self.phase.seconds > 0.0 else None
