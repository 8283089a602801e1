"""When experts are read ahead: by what was measured; which: by likelihood."""

import numpy as np
import pytest

from libcolibri.prefetch import EVERY_TOK, PROMPT_TOK, TRIAL_TOK, Prefetch, most_likely


def run(prefetch: Prefetch, n_tok: int, seconds_with: float, seconds_without: float) -> list[bool]:
    """What it decides token by token on a machine that takes so long."""
    decisions = []
    for _ in range(n_tok):
        decisions.append(prefetch.wanted(1))
        prefetch.note(1, decisions[-1], seconds_with if decisions[-1] else seconds_without)
    return decisions


@pytest.mark.parametrize(("mode", "expected"), [("on", {True}), ("off", {False})])
def test_a_fixed_mode_is_kept(mode, expected):
    prefetch = Prefetch(mode)
    assert set(run(prefetch, 200, 1.0, 9.0)) == expected and prefetch.wanted(100) is (mode == "on")


@pytest.mark.parametrize("pays", [True, False])
def test_auto_settles_on_what_is_faster_and_keeps_trying(pays):
    prefetch = Prefetch("auto")
    decisions = run(prefetch, 10 * EVERY_TOK, *((0.8, 1.0) if pays else (1.0, 0.8)))
    settled = decisions[EVERY_TOK:]
    assert settled.count(pays) / len(settled) == 1 - TRIAL_TOK / EVERY_TOK
    assert prefetch.wanted(512)  # prompts are another matter


def test_auto_notices_a_change():
    prefetch = Prefetch("auto")
    assert run(prefetch, 4 * EVERY_TOK, 0.8, 1.0)[-TRIAL_TOK - 1]
    assert not run(prefetch, 20 * EVERY_TOK, 2.0, 1.0)[-TRIAL_TOK - 1]


def test_few_experts_for_a_token_all_for_a_prompt():
    prefetch = Prefetch("on")
    assert prefetch.most(1) == prefetch.most(PROMPT_TOK - 1) == 1 < 128 < prefetch.most(PROMPT_TOK)


def test_likely_experts_are_the_upper_choices_of_most_tokens():
    assert most_likely(np.array([[5, 3, 9, 1]])) == [5, 3]
    assert most_likely(np.array([[5, 3, 9], [3, 7, 5], [8, 3, 5]])) == [3, 5, 8, 7]
    assert most_likely(np.array([[4]])) == [4]
