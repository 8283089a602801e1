"""What `colibri run` and the conversation share about one generation: facts of its statistics, as text and as JSON.

In: GenerationStats.  Out: one line for people, one dictionary for programs.
"""

import dataclasses
from typing import Any

from .text import readable_bytes

DERIVED = ("prefill_tok_s", "decode_tok_s", "expert_hit_rate")


def stats_line(stats: Any) -> str:
    """'34 tokens at 5.1/s, first after 0.80 s (120 prompt tokens, 80 reused), expert hit rate 93 %, 4.1 MB read'."""
    if not stats.completion_tok:
        return f"no token written; {stats.prefilled_tok + stats.reused_tok} of {count_text(stats.prompt_tok, 'prompt token')} read"
    # One token has no rate: it comes out of reading the prompt.
    rate = f" at {stats.decode_tok_s:.1f}/s, first" if stats.completion_tok > 1 else ""
    parts = [f"{count_text(stats.completion_tok, 'token')}{rate} after {stats.ttft_s:.2f} s"]
    prompt = count_text(stats.prompt_tok, "prompt token")
    parts[0] += f" ({prompt}, {stats.reused_tok} reused)" if stats.reused_tok else f" ({prompt})"
    if stats.expert_hits + stats.expert_misses:
        parts.append(f"expert hit rate {100 * stats.expert_hit_rate:.0f} %, {readable_bytes(stats.expert_read_bytes)} read")
    return ", ".join(parts)


def stats_table(stats: Any) -> list[tuple[str, str]]:
    """Every number of `stats`, named as in GenerationStats; what there is no number for is left out."""
    numbers = {name: value for name, value in stats_dict(stats).items() if value is not None}
    return [(name, f"{value:.3f}" if isinstance(value, float) else str(value)) for name, value in numbers.items()]


def stats_dict(stats: Any) -> dict[str, Any]:
    """The fields of `stats` and its derived rates; the expert hit rate is None when no expert was asked for, as in a dense model."""
    fields = dataclasses.asdict(stats)
    numbers = {name: value for name, value in fields.items() if isinstance(value, (int, float))}
    numbers |= {name: getattr(stats, name) for name in DERIVED}
    rounded = {name: round(value, 6) for name, value in numbers.items()}
    return rounded if stats.expert_hits + stats.expert_misses else rounded | {"expert_hit_rate": None}


def count_text(count: int, what: str) -> str:
    """'1 token', '2 tokens'."""
    return f"{count} {what}{'' if count == 1 else 's'}"
