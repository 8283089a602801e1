"""What `colibri run` and the conversation share about one generation: facts of its statistics, as text and as JSON.

In: GenerationStats.  Out: one line for people, one dictionary for programs.
"""

import dataclasses
from typing import Any

from .text import readable_bytes

DERIVED = ("prefill_tok_s", "decode_tok_s", "expert_hit_rate")


def stats_line(stats: Any) -> str:
    """'34 tokens at 5.1/s, first after 0.80 s (120 prompt tokens, 80 reused), experts 93 % in memory'."""
    if not stats.completion_tok:
        return f"no token written; {stats.prefilled_tok + stats.reused_tok} of {stats.prompt_tok} prompt tokens read"
    parts = [f"{stats.completion_tok} tokens at {stats.decode_tok_s:.1f}/s, first after {stats.ttft_s:.2f} s"]
    prompt = f"{stats.prompt_tok} prompt tokens"
    parts[0] += f" ({prompt}, {stats.reused_tok} reused)" if stats.reused_tok else f" ({prompt})"
    if stats.expert_hits + stats.expert_misses:
        parts.append(f"experts {100 * stats.expert_hit_rate:.0f} % in memory, {readable_bytes(stats.expert_read_bytes)} read")
    return ", ".join(parts)


def stats_table(stats: Any) -> list[tuple[str, str]]:
    """Every number of `stats`, named as in GenerationStats."""
    return [(name, f"{value:.3f}" if isinstance(value, float) else str(value)) for name, value in stats_dict(stats).items()]


def stats_dict(stats: Any) -> dict[str, Any]:
    """The fields of `stats` and its derived rates."""
    fields = dataclasses.asdict(stats)
    numbers = {name: value for name, value in fields.items() if isinstance(value, (int, float))}
    numbers |= {name: getattr(stats, name) for name in DERIVED}
    return {name: round(value, 6) for name, value in numbers.items()}
