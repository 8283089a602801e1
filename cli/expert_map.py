"""The map of a model's experts: layers by experts, how hot each is, who is in memory.

In:  recorded uses, who would be resident, who is pinned; a rich Console
Out: rows of characters or coloured cells as wide as the screen, and the facts below them; or the same as one JSON object
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from .text import one_line, readable_bytes

if TYPE_CHECKING:
    from libcolibri.expert_usage import ExpertUsage

LEVELS = 10  # of heat: never used, a fifth of the layer's average or less, ..., five times the average or more
RAMP = " .:-=+*#%@"  # plain ASCII: what a terminal in East Asia draws two columns wide would break the rows
COLOURS = ("#1c1c1c", "#1b1044", "#3b0f70", "#641a80", "#8c2981", "#b73779", "#de4968", "#f7705c", "#fe9f6d", "#fcfdbf")
DARK_LEVELS = 6  # below this, marks are drawn in white
PINNED, RESIDENT, PARTLY = "P", "x", "o"
WIDEST_CELL = 3
FACTS_COLUMNS = 27
NARROW_COLUMNS = 64  # a narrower screen is left to the map


@dataclass(frozen=True)
class ExpertMap:
    """What is drawn.

    name, source   of the model or the recording; how much was recorded, in words
    budget_bytes   of the expert cache that `resident` belongs to; None: residents are not marked
    resident       (layer, expert) that it would hold
    """

    name: str
    source: str
    usage: "ExpertUsage"
    pinned: frozenset[tuple[int, int]] = frozenset()
    budget_bytes: int | None = None
    resident: frozenset[tuple[int, int]] = frozenset()

    @property
    def resident_share(self) -> float:
        """Share of the uses, 0 to 1, that go to residents."""
        shares = self.usage.shares()
        total = sum(row.sum() for row in shares.values())
        return float(sum(shares[layer][expert] for layer, expert in self.resident) / total) if total else 0.0

    def levels(self, layer: int, bin_size: int = 1) -> np.ndarray:
        """int64 (ceil(E / bin_size),): how hot each bin of neighbours is against the layer's average, 0 (never used) to 9."""
        shares = self.usage.shares()[layer]
        bins = [shares[at : at + bin_size] for at in range(0, len(shares), bin_size)]
        means = np.array([part.mean() for part in bins]) * len(shares)
        steps = np.floor(5.5 + 1.5 * np.log2(np.maximum(means, 1e-9)))
        return np.where(means > 0.0, np.clip(steps, 1, LEVELS - 1), 0).astype(np.int64)

    def marks(self, layer: int, bin_size: int = 1) -> str:
        """A character for each bin: P a pinned expert in it, x all in memory, o some in memory."""
        experts = [(layer, expert) for expert in range(len(self.usage.uses[layer]))]
        bins = [set(experts[at : at + bin_size]) for at in range(0, len(experts), bin_size)]
        return "".join(
            PINNED if part & self.pinned else RESIDENT if part <= self.resident else PARTLY if part & self.resident else " "
            for part in bins
        )  # fmt: skip

    def lines(self) -> list[str]:
        """The facts, a sentence each."""
        facts, layers = self.usage.overall(), len(self.usage.uses)
        most = max(self.usage.num_experts.values())
        per_layer = f"{most} experts" if len(set(self.usage.num_experts.values())) == 1 else f"up to {most} experts"
        count = f"{layers} layer{'' if layers == 1 else 's'}"
        lines = [f"{one_line(self.name)}: {count} of {per_layer}, {self.source}"]
        lines.append(
            f"the hottest quarter of a layer's experts has {100 * facts.hottest_quarter:.0f} % of its uses; "
            f"entropy {facts.entropy_bits:.2f} of {np.log2(most):.2f} bits; {facts.unused} of {facts.experts} experts were never used"
        )
        if self.budget_bytes is not None:
            lines.append(
                f"an expert cache of {readable_bytes(self.budget_bytes)} begins with {len(self.resident)} of {facts.experts} experts "
                f"({100 * len(self.resident) / facts.experts:.0f} %), which had {100 * self.resident_share:.0f} % of the uses"
            )
        if self.pinned:
            lines.append(f"{len(self.pinned)} pinned")
        return lines


def draw(console: Console, shown: ExpertMap) -> None:
    """Print the map as wide as the console, with colours where it has at least 256 of them, and the facts."""
    layout = _Layout(console.width, shown)
    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    for row in _rows(layout, shown, coloured):
        console.print(row, no_wrap=True, crop=True, soft_wrap=False)
    for line in (*_legend(layout, shown, coloured), *(Text(line) for line in shown.lines())):
        console.print(line, soft_wrap=True)


class _Layout:
    """How the screen's columns are used: cells of `width` columns or bins of `bin_size` experts."""

    def __init__(self, columns: int, shown: ExpertMap):
        self.label = max(len("layer"), *(len(str(layer)) for layer in shown.usage.uses))
        self.facts = columns >= NARROW_COLUMNS
        room = max(8, columns - self.label - 1 - (FACTS_COLUMNS if self.facts else 0))
        experts = max(shown.usage.num_experts.values())
        self.bin_size = -(-experts // room)
        self.cells = -(-experts // self.bin_size)
        self.width = min(WIDEST_CELL, room // self.cells) if self.bin_size == 1 else 1

    def ruler(self) -> str:
        """Numbers of experts over their cells."""
        line, every = "", next(step for step in _round_steps() if step * self.width >= 6 * self.bin_size)
        for expert in range(0, self.cells * self.bin_size, every):
            line = line.ljust(expert // self.bin_size * self.width)
            # A number that would run into the next one, or beyond the map, is left out.
            if len(line) == expert // self.bin_size * self.width and len(line) + len(str(expert)) <= self.cells * self.width:
                line += str(expert)
        return line.ljust(self.cells * self.width)


def _round_steps() -> Iterator[int]:
    step = 1
    while True:
        yield from (step, 2 * step, 5 * step)
        step *= 10


def _rows(layout: _Layout, shown: ExpertMap, coloured: bool) -> Iterator[Text]:
    heading = f"{'layer':>{layout.label}} {layout.ruler()}"
    yield Text(heading + (f"{'quarter':>10}{'entropy':>9}{'unused':>8}" if layout.facts else ""))
    facts = shown.usage.facts()
    for layer in shown.usage.uses:
        row = Text(f"{layer:>{layout.label}} ")
        levels, marks = shown.levels(layer, layout.bin_size), shown.marks(layer, layout.bin_size)
        for level, mark in zip(levels.tolist(), marks, strict=True):
            if coloured:
                row.append(mark.ljust(layout.width), style=f"{'white' if level < DARK_LEVELS else 'black'} on {COLOURS[level]}")
            else:
                row.append(RAMP[level] * layout.width)
        row.append(" " * ((layout.cells - len(levels)) * layout.width))
        if layout.facts:
            found = facts[layer]
            row.append(f"{100 * found.hottest_quarter:>8.0f} %{found.entropy_bits:>9.2f}{found.unused:>8}")
        yield row
        if not coloured and marks.strip():  # a cell has one character, and heat took it
            yield Text(" " * (layout.label + 1) + "".join(mark.ljust(layout.width) for mark in marks).rstrip())


def _legend(layout: _Layout, shown: ExpertMap, coloured: bool) -> list[Text]:
    cell = "a cell is an expert" if layout.bin_size == 1 else f"a cell is {layout.bin_size} experts"
    line = Text(f"{cell}; use against the layer's average: ")
    for level, words in ((0, "never"), (1, "1/5 or less"), (3, ""), (5, "average"), (7, ""), (9, "5 times or more")):
        line.append("  " if coloured else f"'{RAMP[level]}'", style=f"on {COLOURS[level]}" if coloured else "")
        line.append(f" {words}  " if words else " ")
    line.rstrip()
    lines = [line]
    if shown.budget_bytes is not None or shown.pinned:
        some = f", {PARTLY} some of the cell's experts" if layout.bin_size > 1 else ""
        lines.append(Text(f"{RESIDENT} in memory{some}, {PINNED} pinned"))
    return lines


def as_json(shown: ExpertMap) -> dict[str, Any]:
    """The map's numbers; shares of uses are rounded to six digits."""
    overall, facts = shown.usage.overall(), shown.usage.facts()
    layers = []
    for layer, shares in shown.usage.shares().items():
        entry: dict[str, Any] = {"layer": layer, "shares": [round(share, 6) for share in shares.tolist()]}
        entry |= {
            "hottest_quarter": round(facts[layer].hottest_quarter, 6),
            "entropy_bits": round(facts[layer].entropy_bits, 6),
            "unused": facts[layer].unused,
        }
        if shown.budget_bytes is not None:
            entry["resident"] = sorted(expert for at, expert in shown.resident if at == layer)
        if shown.pinned:
            entry["pinned"] = sorted(expert for at, expert in shown.pinned if at == layer)
        layers.append(entry)
    result: dict[str, Any] = {
        "name": shown.name,
        "experts": overall.experts,
        "hottest_quarter": round(overall.hottest_quarter, 6),
        "entropy_bits": round(overall.entropy_bits, 6),
        "unused": overall.unused,
    }
    if shown.budget_bytes is not None:
        result |= {"expert_cache_bytes": shown.budget_bytes, "resident": len(shown.resident)}
        result["resident_share"] = round(shown.resident_share, 6)
    return result | {"layers": layers}
