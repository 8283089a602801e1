"""Perplexity against its definition, token by token."""

import math

import numpy as np
import pytest

from libcolibri.engine import Engine
from libcolibri.errors import ConfigError
from libcolibri.perplexity import Perplexity, perplexity
from tests.fake_decoder import fake_parts, toy_logits
from tests.tiny_model import make_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with Engine.open(make_model(tmp_path_factory.mktemp("models") / "tiny"), parts=fake_parts(), prefill_chunk=5) as engine:
        yield engine


def loss(context, token) -> float:
    logits = toy_logits(context, 48).astype(np.float64)
    return math.log(np.exp(logits).sum()) - logits[token]


TEXT = [(7 * i * i + i) % 48 for i in range(100)]


def test_windows_side_by_side(engine):
    result = perplexity(engine, TEXT, 40)
    expected = [loss(TEXT[start:i], TEXT[i]) for start in (0, 40, 80) for i in range(start + 1, min(start + 40, 100))]
    assert result.n_tok == len(expected) == 97 and result.nll == pytest.approx(np.mean(expected), rel=1e-12)
    assert result.ppl == pytest.approx(math.exp(np.mean(expected)))


def test_stride_gives_more_context_and_scores_each_token_once(engine):
    result = perplexity(engine, TEXT, 40, stride=15)
    expected = [loss(TEXT[:i], TEXT[i]) for i in range(1, 40)]
    for start in (15, 30, 45, 60):
        expected += [loss(TEXT[start:i], TEXT[i]) for i in range(start + 25, min(start + 40, 100))]
    assert result.n_tok == 99 and result.nll == pytest.approx(np.mean(expected), rel=1e-12)


def test_one_window_and_progress(engine):
    seen = []
    assert perplexity(engine, TEXT, 128, on_progress=lambda *facts: seen.append(facts)).n_tok == 99
    assert seen == [("perplexity", 100, 100)]
    assert perplexity(engine, [1, 2], 128).n_tok == 1


def test_a_lone_last_token_is_context_only(engine):
    assert perplexity(engine, TEXT[:41], 40).n_tok == 39


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([1], {"context_length": 8}, "of 1 tokens"),
        (TEXT, {"context_length": 129}, "window of 129 tokens"),
        (TEXT, {"context_length": 1}, "window of 1 tokens"),
        (TEXT, {"context_length": 8, "stride": 9}, "stride 9"),
    ],
)
def test_refusals(engine, tokens, options, message):
    with pytest.raises(ConfigError, match=message):
        perplexity(engine, tokens, **options)


def test_a_hopeless_model_is_infinitely_perplexed():
    assert Perplexity(1000.0, 5).ppl == math.inf
