"""What `colibri run` and the conversation share about one generation: facts of its statistics, as text and as JSON.

In: GenerationStats, and the engine that knows what drive and memory could give.  Out: lines for people, one dictionary for programs.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from .text import readable_bytes

NUMBERS = (
    "prompt_tok", "reused_tok", "completion_tok", "ttft_s", "prefilled_tok", "prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s",
    "expert_hits", "expert_misses", "expert_read_bytes", "expert_shrinks", "expert_capacity_bytes", "expert_hit_rate",
)  # fmt: skip


# --- for people


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


def stats_lines(stats: Any, engine: Any) -> list[str]:
    """Prompt and answer apart, a few lines each; what there is nothing to say about is left out."""
    lines = [f"prompt      {_prompt_text(stats)}", *_phase_lines(stats.prefill, engine)]
    return [*lines, f"answer      {_answer_text(stats)}", *_phase_lines(stats.decode, engine)]


def _prompt_text(stats: Any) -> str:
    phase, missing = stats.prefill, stats.prompt_tok - stats.reused_tok - stats.prefill.n_tok
    text = f"{count_text(phase.n_tok, 'token')} read"
    if phase.seconds > 0.0:
        text += f" in {phase.seconds:.2f} s, {_number(phase.tok_s)} tokens/s"
    text += f"; {stats.reused_tok} more were known from before" if stats.reused_tok else ""
    return text + (f"; {missing} not read" if missing else "")


def _answer_text(stats: Any) -> str:
    if not stats.completion_tok:
        return "no token written"
    text = f"{count_text(stats.completion_tok, 'token')}, the first after {stats.ttft_s:.2f} s"
    if not stats.decode.n_tok:
        return text
    count = "the other" if stats.decode.n_tok == 1 else f"the other {stats.decode.n_tok}"
    return f"{text}, {count} in {stats.decode.seconds:.2f} s, {_number(stats.decode.tok_s)} tokens/s"


def _phase_lines(phase: Any, engine: Any) -> Iterator[str]:
    if not phase.passes:
        return
    experts = phase.experts
    if experts.asked:
        yield f"  experts   {_hits_text(experts)}"
        if experts.read_bytes:
            yield f"  drive     {_drive_text(phase)}"
        if experts.prefetched:
            yield f"  ahead     {_ahead_text(experts)}"
    yield f"  possible  {_roofline_text(engine.roofline(phase))}"


def _hits_text(experts: Any) -> str:
    text = f"{experts.hits} of {experts.asked} were in memory, hit rate {_percent(experts.hit_rate)}"
    rates = experts.layer_hit_rates
    if len(rates) < 2 or not experts.misses:
        return text
    worst, best = (choose(rates, key=rates.__getitem__) for choose in (min, max))
    return f"{text}; worst layer {worst} with {_percent(rates[worst])}, best layer {best} with {_percent(rates[best])}"


def _drive_text(phase: Any) -> str:
    experts = phase.experts
    rate = f" at {readable_bytes(experts.read_bytes / experts.reading_s)}/s" if experts.reading_s > 0.0 else ""
    read = f"{readable_bytes(experts.read_bytes)} read{rate}, {readable_bytes(phase.read_bytes_per_tok)} a token"
    return f"{read}; {experts.wait_s:.2f} s spent waiting, {_percent(phase.waited_share)} of the time"


def _ahead_text(experts: Any) -> str:
    text = f"{count_text(experts.prefetched, 'expert')} read before a layer asked, {_percent(experts.prefetch_accuracy)} of them needed"
    return f"{text}; {readable_bytes(experts.unused_bytes)} for nothing" if experts.unused_bytes else text


def _roofline_text(roofline: Any) -> str:
    if roofline.bound == "arithmetic":
        return "not known: limited by arithmetic, as the tokens of a prompt share the reading of weights"
    if roofline.share is None or not roofline.needed_s:
        return "not known"
    if roofline.bound == "drive":
        work, speed, whose = f"reading {readable_bytes(roofline.phase.experts.needed_bytes)}", roofline.drive_bytes_s, "the drive's best"
    else:
        work, speed, whose = f"going through {readable_bytes(roofline.phase.computed_bytes)}", roofline.memory_bytes_s, "memory's best"
    return f"{_percent(roofline.share)} reached: {work} at {readable_bytes(speed)}/s, {whose}, takes {roofline.needed_s:.2f} s"


def _percent(share: float) -> str:
    """'12 %'; '99.4 %' where whole percents would hide the difference."""
    percent = 100 * share
    return f"{percent:.1f} %" if 0.0 < percent < 1.0 or 99.0 < percent < 100.0 else f"{percent:.0f} %"


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate >= 1.0 else f"{rate:.3f}"


# --- for programs


def stats_dict(stats: Any, engine: Any = None) -> dict[str, Any]:
    """The numbers of `stats`, then `prefill` and `decode` by themselves, with `roofline` where there is an engine.

    Expert hit rates are None when no expert was asked for, as in a dense model.
    """
    numbers = {name: round(getattr(stats, name), 6) for name in NUMBERS}
    if not stats.experts.asked:
        numbers["expert_hit_rate"] = None
    return numbers | {"prefill": _phase_dict(stats.prefill, engine), "decode": _phase_dict(stats.decode, engine)}


def _phase_dict(phase: Any, engine: Any) -> dict[str, Any]:
    derived = {name: getattr(phase, name) for name in ("tok_s", "read_bytes_per_tok", "computed_bytes_per_tok", "waited_share")}
    facts = dataclasses.asdict(phase) | derived | {"experts": _experts_dict(phase.experts)}
    return _rounded(facts) | ({} if engine is None else {"roofline": _roofline_dict(engine.roofline(phase))})


def _experts_dict(experts: Any) -> dict[str, Any]:
    layers = [
        {"layer": layer, "hits": hits, "misses": misses, "hit_rate": round(hits / (hits + misses), 6)}
        for layer, (hits, misses) in enumerate(experts.layers)
        if hits + misses
    ]
    rates = {"hit_rate": experts.hit_rate if experts.asked else None}
    rates["prefetch_accuracy"] = experts.prefetch_accuracy if experts.prefetched else None
    return _rounded(dataclasses.asdict(experts) | rates | {"layers": layers})


def _roofline_dict(roofline: Any) -> dict[str, Any]:
    names = ("bound", "share", "needed_s", "drive_s", "memory_s", "drive_bytes_s", "memory_bytes_s")
    return _rounded({name: getattr(roofline, name) for name in names})


def _rounded(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in facts.items()}


def count_text(count: int, what: str) -> str:
    """'1 token', '2 tokens'."""
    return f"{count} {what}{'' if count == 1 else 's'}"
