"""Policies and simulator: orders checked against lists, Belady against every other policy and against exhaustive search."""

import json
from functools import lru_cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.cache_simulator import OPTIMUM, simulate
from libcolibri.errors import ConfigError, FormatError
from libcolibri.eviction import POLICIES, AdaptiveFrequency, DecayedFrequency, LeastRecent, LeastStale, least, make_policy
from libcolibri.expert_trace import Trace, TracedPass, TraceWriter, read_trace

E, SIZE = 4, 4096


def trace_of(passes, layers: int = 2) -> Trace:
    done = tuple(TracedPass(1, tuple(map(tuple, used)), tuple((1,) * len(ids) for ids in used)) for used in passes)
    return Trace(tuple(range(layers)), (SIZE,) * layers, (E,) * layers, done)


used_experts = st.sets(st.integers(0, E - 1), min_size=1, max_size=2).map(sorted)
traces = st.lists(st.lists(used_experts, min_size=2, max_size=2), min_size=1, max_size=7).map(trace_of)


def test_least_recent_is_the_stamp():
    stamps = np.array([[3, 1], [2, 2]])
    assert (LeastRecent(2, 2).values(stamps, 0, 4) == stamps).all()


def test_least_stale_compares_visits_of_the_own_layer():
    policy = LeastStale(3, 1)
    values = policy.values(np.array([[5], [5], [4]]), 1, 5)[:, 0]  # at layer 1 of pass 5: layer 2 was not visited yet
    assert values.argsort().tolist() == [1, 0, 2]  # nobody is stale; layer 1 comes again last, layer 2 next
    values = policy.values(np.array([[5], [5], [3]]), 1, 5)[:, 0]
    assert values.argmin() == 2


def test_decayed_frequency_orders_as_decayed_counts_do():
    policy, counts, rng = DecayedFrequency(1, 5, half_life_tok=8.0), np.zeros(5), np.random.default_rng(0)
    for clock in range(1, 60):
        used = rng.random(5) < [0.1, 0.3, 0.5, 0.7, 0.9]
        policy.begin_pass(1, 3)
        policy.note(0, used.astype(np.int64))
        counts = counts * 0.5 ** (1 / 8) + used
        heat = policy.values(np.zeros((1, 5), np.int64), 0, clock)[0]
        seen = counts > 0
        assert (np.argsort(heat[seen]) == np.argsort(counts[seen])).all()
        assert np.isneginf(heat[~seen]).all()


def test_a_prompt_counts_like_its_tokens_spread_evenly():
    """One pass of many tokens leaves the heat that as many passes leave, each with the average of the uses."""
    at_once, one_by_one = DecayedFrequency(1, 3, half_life_tok=8.0), DecayedFrequency(1, 3, half_life_tok=8.0)
    at_once.begin_pass(40, 2)
    at_once.note(0, np.array([40, 10, 0]))
    scores = np.zeros(3)
    for _ in range(40):
        one_by_one.begin_pass(1, 2)
        scores = scores * 0.5 ** (1 / 8) + [1, 0.25, 0]
    np.testing.assert_allclose(np.exp2(at_once.heat[0] - 40 / 8), scores)


def test_experts_of_layers_to_come_stay_in_a_prompts_pass():
    policy = DecayedFrequency(3, 2, half_life_tok=8.0)
    policy.begin_pass(100, 3)
    policy.note(slice(None), np.array([[90, 10], [80, 0], [70, 4]]))
    policy.begin_pass(50, 3)
    values = policy.values(np.zeros((3, 2), np.int64), 1, 2)
    assert values[2, 0] > values[0, 0] > values[1, 0] and values[2, 1] > values[0, 0]  # 35 and 2 tokens of this pass will want them
    policy.begin_pass(1, 3)
    assert policy.values(np.zeros((3, 2), np.int64), 1, 3).argmax() == 0


@pytest.mark.parametrize("turn", [3, 400])
def test_the_half_life_follows_what_the_text_does(turn):
    """Favourites that change after `turn` tokens: short memory wins where they change soon, long where they stay."""
    rng, policy = np.random.default_rng(1), AdaptiveFrequency(2, 64)
    for clock in range(600):
        if clock % turn == 0:
            favourites = rng.permutation(64)
        policy.begin_pass(1, 32)
        chances = 0.5 ** np.arange(64) if turn == 3 else 1 / (np.arange(64) + 4.0)
        for row in range(2):
            counts = np.zeros(64, np.int64)
            counts[favourites[rng.choice(64, 4, replace=False, p=chances / chances.sum())]] = 1
            policy.note(row, counts)
    assert (policy.chosen.half_life_tok <= 8.0) == (turn == 3)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_least_is_what_sorting_finds(values, data):
    count = data.draw(st.integers(1, len(values)))
    order = np.argsort(np.array(values, float), kind="stable")[:count]
    assert sorted(least(np.array(values, float), count)) == sorted(order)


def test_unknown_policy_is_named():
    with pytest.raises(ConfigError, match="'fifo' is unknown, only adaptive_frequency, lru, least_stale, decayed_frequency"):
        make_policy("fifo", 1, 1)


one_expert = st.integers(0, E - 1).map(lambda e: [e])
one_each = st.lists(st.lists(one_expert, min_size=2, max_size=2), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(one_each.map(trace_of), st.integers(1, 8))
def test_no_policy_reads_less_than_the_optimum(trace, slots):
    optimum = simulate(trace, OPTIMUM, slots * SIZE)
    for name in POLICIES:
        run = simulate(trace, name, slots * SIZE)
        assert run.misses >= optimum.misses and run.hits + run.misses == optimum.hits + optimum.misses
        assert run.read_bytes == run.misses * SIZE


@settings(deadline=None, max_examples=60)
@given(traces, st.integers(1, 5))
def test_optimum_is_what_exhaustive_search_finds(trace, slots):
    """Every choice of whom to evict at every read, the least number of reads."""
    uses = [(row, e) for done in trace.passes for row, used in enumerate(done.experts) for e in used]

    @lru_cache(None)
    def least_reads(at: int, resident: frozenset) -> int:
        if at == len(uses):
            return 0
        if uses[at] in resident:
            return least_reads(at + 1, resident)
        kept = combinations(sorted(resident), slots - 1) if len(resident) == slots else [resident]
        return 1 + min(least_reads(at + 1, frozenset(chosen) | {uses[at]}) for chosen in kept)

    assert simulate(trace, OPTIMUM, slots * SIZE).misses == least_reads(0, frozenset())


def test_everything_fits():
    trace = trace_of([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[1], [3]]])
    for name in (*POLICIES, OPTIMUM):
        run = simulate(trace, name, trace.total_bytes)
        assert (run.misses, run.hits, run.read_bytes) == (4, 6, 4 * SIZE)
        assert simulate(trace, name, trace.total_bytes, warm_up_passes=1).misses == 0


def test_trace_files(tmp_path):
    path = tmp_path / "轨迹.jsonl"
    with TraceWriter(path, {0: SIZE, 2: SIZE}, {0: E, 2: E}) as writer:
        writer.add(2, [np.array([[1, 0], [3, 1]]), np.array([[2, 3], [0, 2]])])
        writer.add(1, [np.array([[1, 0]]), np.array([[3, 2]])])
    trace = read_trace(path)
    passes = TracedPass(2, ((0, 1, 3), (0, 2, 3)), ((1, 2, 1), (1, 2, 1))), TracedPass(1, ((0, 1), (2, 3)), ((1, 1), (1, 1)))
    assert trace == Trace((0, 2), (SIZE, SIZE), (E, E), passes)
    whole = path.read_text("utf-8")
    path.write_text(whole[:-3], "utf-8")  # killed while writing
    assert read_trace(path).passes == trace.passes[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is no JSON"),
        ('{"a": 1}\n', "is no expert trace"),
        ('{"format": "colibri-expert-trace-1", "layers": [0], "expert_bytes": [1, 2], "num_experts": [4]}\n', "damaged"),
        ('{"format": "colibri-expert-trace-1", "layers": ["x"], "expert_bytes": [1], "num_experts": [4]}\n', "layers="),
    ],
)
def test_a_bad_first_line_is_refused(text, message, tmp_path):
    (tmp_path / "t").write_text(text, "utf-8")
    with pytest.raises(FormatError, match=message):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize(
    "line",
    [
        {"n_tok": 1, "experts": [[4]]},
        {"n_tok": 1, "experts": []},
        {"experts": [[1]]},
        {"n_tok": 1, "experts": [1]},
        {"n_tok": 2, "experts": [[1, 2]], "counts": [[3, 1]]},
        {"n_tok": 2, "experts": [[1, 2]], "counts": [[1]]},
    ],
)
def test_a_line_of_another_model_is_refused(line, tmp_path):
    with TraceWriter(tmp_path / "t", {0: SIZE}, {0: E}):
        pass
    with (tmp_path / "t").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(FormatError, match="line 2 does not fit"):
        read_trace(tmp_path / "t")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FormatError, match="cannot be read"):
        read_trace(tmp_path / "none")
