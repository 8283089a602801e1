"""Sampling against plain numpy in float64, validation and reproducibility."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.errors import ColibriError, ConfigError
from libcolibri.sampler import Sampler, SamplingParams

LOGITS = st.lists(st.integers(-1900, 1900), min_size=1, max_size=50).map(lambda values: np.array(values, dtype=np.float32) / 64)


def allowed(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """id -> probability, by sorting everything, in float64."""
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    order = np.argsort(-logits, kind="stable")[: params.top_k or None]
    weights = np.exp(scaled[order])
    if params.top_p < 1.0:
        count = int(np.searchsorted(np.cumsum(weights) / weights.sum(), params.top_p)) + 1
        order, weights = order[:count], weights[:count]
    keep = weights >= params.min_p * weights[0]
    return dict(zip(order[keep].tolist(), weights[keep] / weights[keep].sum(), strict=True))


@given(
    logits=LOGITS,
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_only_allowed_tokens(logits, temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(temperature, top_k, top_p, min_p, seed=seed)
    sampler, expected = Sampler(params), allowed(logits, params)
    # float32 may decide otherwise about tokens exactly at a limit, so their neighbours in rank are let pass
    looser = allowed(logits, SamplingParams(temperature, top_k, min(1.0, top_p * 1.0001 + 1e-6), min_p * 0.9999, seed=seed))
    assert all(sampler.pick(logits) in expected | looser for _ in range(5))


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7, "min_p": 0.05}])
def test_frequencies(options):
    logits = np.random.default_rng(3).standard_normal(2000).astype(np.float32) * 3
    params = SamplingParams(temperature=0.8, seed=1, **options)
    expected = allowed(logits, params)
    sampler, n = Sampler(params), 4_000
    counts = np.bincount([sampler.pick(logits) for _ in range(n)], minlength=2000)
    assert set(np.flatnonzero(counts)) <= set(expected)
    for token_id, probability in expected.items():
        assert abs(counts[token_id] - n * probability) < 5 * np.sqrt(n * probability * (1 - probability)) + 3


def test_greedy_takes_the_first_of_the_best():
    logits = np.array([1, 5, 5, -np.inf], dtype=np.float32)
    for params in (SamplingParams(), SamplingParams(temperature=1e-6), SamplingParams(temperature=2.0, top_k=1)):
        assert Sampler(params).pick(logits) == 1


def test_top_k_of_equal_logits_takes_the_lowest_ids():
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=3, seed=0))
    assert {sampler.pick(np.zeros(100, dtype=np.float32)) for _ in range(200)} == {0, 1, 2}


def test_forbidden_tokens_never_come():
    logits = np.full(5000, -np.inf, dtype=np.float32)
    logits[[7, 4999]] = 0.0
    for options in ({}, {"top_p": 0.999}, {"top_k": 50}):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=0, **options))
        assert {sampler.pick(logits) for _ in range(100)} == {7, 4999}


def test_repetition_penalty():
    logits = np.array([2.0, 1.5, -1.0, -1.2], dtype=np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=1.5))
    assert sampler.pick(logits) == 0
    assert sampler.pick(logits, [0, 0, 0, 99, -1]) == 1  # 2.0 / 1.5 < 1.5, once only; unknown ids do not matter
    assert sampler.pick(logits[2:], [0]) == 1  # -1.0 * 1.5 < -1.2
    assert logits.tolist() == np.array([2.0, 1.5, -1.0, -1.2], dtype=np.float32).tolist()


def test_seed_reproduces_and_samplers_are_independent():
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=42)
    first, second = Sampler(params), Sampler(params)
    assert [first.pick(logits) for _ in range(20)] == [second.pick(logits) for _ in range(20)]
    unseeded = [[Sampler(SamplingParams(temperature=1.0)).pick(logits) for _ in range(20)] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("bad", [[0.0, np.nan, 1.0], [np.inf, 0.0, 0.0], [-np.inf] * 3])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(repetition_penalty=1.1)])
def test_unusable_logits(bad, params):
    with pytest.raises(ColibriError, match="not usable"):
        Sampler(params).pick(np.array(bad, dtype=np.float32), [0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, float("nan"), float("inf"), "hot", None, True)],
        *[("top_p", value) for value in (0.0, -1, 1.01, "x")],
        *[("min_p", value) for value in (-0.1, 1.5)],
        *[("top_k", value) for value in (-1, 1.5, "4", True)],
        *[("repetition_penalty", value) for value in (0.0, -1.0)],
        *[("seed", value) for value in (-1, 0.5, "x")],
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})
