"""Arithmetic of the statistics, and what the engine writes into them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libcolibri.engine import Engine
from libcolibri.format import read_manifest
from libcolibri.models.decoder import Decoder
from libcolibri.models.state import SequenceState
from libcolibri.stats import ExpertStats, GenerationStats, PhaseStats
from libcolibri.thread_team import Team
from tests.fake_decoder import ScriptSampler, fake_parts
from tests.tiny_model import make_model

counts = st.integers(0, 10**12)
eighths = st.integers(0, 8000).map(lambda n: n / 8)  # sums are exact
LAYERS = 3
COUNTERS = ("read_bytes", "evictions", "shrinks", "prefetched", "prefetch_used", "unused_bytes")


@st.composite
def experts(draw):
    layers = tuple(draw(st.lists(st.tuples(counts, counts), min_size=LAYERS, max_size=LAYERS)))
    hits, misses = (sum(part) for part in zip(*layers, strict=True))
    others = {name: draw(counts) for name in COUNTERS}
    return ExpertStats(hits, misses, **others, wait_s=draw(eighths), reading_s=draw(eighths), capacity_bytes=draw(counts), layers=layers)


@given(experts(), experts())
def test_a_sum_without_its_first_part_is_its_second(first, second):
    capacity = second.capacity_bytes or first.capacity_bytes
    assert (first + second) - first == replace(second, capacity_bytes=capacity)


@given(experts(), experts())
def test_layers_sum_up_and_rates_lie_between_those_of_the_layers(first, second):
    both = first + second
    assert (both.hits, both.misses) == tuple(map(sum, zip(*both.layers, strict=True))) and both.asked == first.asked + second.asked
    rates = both.layer_hit_rates.values()
    assert 0.0 <= both.hit_rate <= 1.0 and (not rates or min(rates) - 1e-9 <= both.hit_rate <= max(rates) + 1e-9)


@given(experts())
def test_counts_of_nobody_are_zeros(found):
    assert ExpertStats() + found == found and found + ExpertStats() == found and found - ExpertStats() == found
    assert 0 <= found.needed_bytes <= found.read_bytes


def test_without_work_there_are_no_rates():
    nothing = PhaseStats()
    assert (nothing.tok_s, nothing.read_bytes_per_tok, nothing.computed_bytes_per_tok, nothing.waited_share) == (0.0, 0.0, 0.0, 0.0)
    assert (ExpertStats().hit_rate, ExpertStats().prefetch_accuracy, ExpertStats().layer_hit_rates) == (1.0, 1.0, {})


@given(st.lists(st.builds(PhaseStats, counts, counts, eighths, counts, experts()), max_size=4))
def test_phases_add_up(phases):
    total = sum(phases, start=PhaseStats())
    for name in ("n_tok", "passes", "seconds", "computed_bytes"):
        assert getattr(total, name) == sum(getattr(phase, name) for phase in phases)
    stats = GenerationStats(prefill=total, decode=total)
    assert stats.expert_hits == 2 * sum(phase.experts.hits for phase in phases)
    assert (stats.prefilled_tok, stats.prefill_s, stats.decode_tok_s) == (total.n_tok, total.seconds, total.tok_s)


# --- the engine


def last_stats(engine: Engine, prompt, sampling=None, **options) -> GenerationStats:
    return list(engine.new_session().generate(prompt, sampling, **options))[-1].stats


def test_prompt_and_answer_are_counted_apart(tmp_path):
    with Engine.open(make_model(tmp_path / "tiny"), parts=fake_parts(), prefill_chunk=4, expert_cache=2) as engine:
        before = engine.expert_stats
        stats = last_stats(engine, list(range(1, 11)), max_tokens=3)
        after = engine.expert_stats
        expert_bytes = engine.manifest.experts[0].expert_bytes
    assert (stats.prefill.n_tok, stats.prefill.passes, stats.decode.n_tok, stats.decode.passes) == (10, 3, 2, 2)
    assert replace(stats.experts, wait_s=0.0, reading_s=0.0) == replace(after - before, wait_s=0.0, reading_s=0.0)
    asked = [sum(counts) for counts in stats.prefill.experts.layers]
    assert asked == [20, 0, 20] and [sum(counts) for counts in stats.decode.experts.layers] == [4, 0, 4]
    # What the fake decoder says of its dense part: 1500 bytes with the head, which the first two chunks do without.
    assert stats.prefill.computed_bytes == 1000 + 1000 + 1500 + 40 * expert_bytes
    assert stats.decode.computed_bytes == 2 * 1500 + 8 * expert_bytes


def test_a_dense_model_has_no_experts(tmp_path):
    folder = make_model(tmp_path / "dense", mlp_only_layers=[0, 1, 2])
    with Engine.open(folder, parts=fake_parts()) as engine:
        stats = last_stats(engine, [1, 2], max_tokens=2)
        assert stats.experts == ExpertStats() and engine.drive_bytes_s == 0.0
        assert stats.decode.computed_bytes == 1500 and engine.roofline(stats.decode).bound == "memory"


@pytest.fixture(scope="module", params=["f32", "q8_0"])
def folder(tmp_path_factory, request):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return make_model(tmp_path_factory.mktemp("models") / "tiny", quant=request.param, **sizes)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_computed_bytes_are_those_of_a_hand_count(folder, prefetch, threads):
    """Each pass goes through all dense tensors but the embeddings, each chosen expert once, and the keys and values up to its end."""
    parts = replace(fake_parts(), decoder=Decoder, state=SequenceState, team=Team)
    manifest = read_manifest(folder)
    dense = sum(entry.nbytes for name, entry in manifest.tensors.items() if name != "model.embed_tokens.weight")
    number = np.dtype(np.float32 if manifest.tensors["lm_head.weight"].type == "f32" else np.float16).itemsize
    position = 3 * 2 * 2 * 16 * number  # layers, keys and values, heads, columns of a head
    prompt = [(11 * i * i + 3 * i) % 47 for i in range(7)]
    with Engine.open(folder, parts=parts, threads=threads, expert_cache=2, prefetch=prefetch, preload=False) as engine:
        routed, end_pass = [], engine.experts.end_pass
        engine.experts.end_pass = lambda found: (routed.append({i: len(np.unique(ids)) for i, ids in found.items()}), end_pass(found))
        stats = last_stats(engine, prompt, ScriptSampler([1, 2, 3, 4]), max_tokens=4)
    assert len(routed) == 4
    chosen = [sum(manifest.experts[layer].expert_bytes * n for layer, n in found.items()) for found in routed]
    assert stats.prefill.computed_bytes == dense + 7 * position + chosen[0]
    assert stats.decode.computed_bytes == 3 * dense + (8 + 9 + 10) * position + sum(chosen[1:])
    for phase, passes in ((stats.prefill, routed[:1]), (stats.decode, routed[1:])):
        assert [sum(counts) for counts in phase.experts.layers] == [sum(found.get(layer, 0) for found in passes) for layer in range(3)]
        assert (phase.experts.hits, phase.experts.misses) == tuple(map(sum, zip(*phase.experts.layers, strict=True)))
    assert stats.experts.prefetch_used <= stats.experts.prefetched and (prefetch or not stats.experts.prefetched)
