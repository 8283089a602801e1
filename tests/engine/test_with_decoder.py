"""The engine over the real decoder: neither cache size, nor chunks, nor reuse, nor a saved session changes a bit."""

import os
import re
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from libcolibri.cache_simulator import OPTIMUM, simulate
from libcolibri.engine import Engine, Parts, _longer_chunk
from libcolibri.errors import ConfigError, DiskSpaceError, ExpertReadError
from libcolibri.eviction import POLICIES
from libcolibri.expert_trace import read_trace
from libcolibri.memory_plan import MemoryPlan
from libcolibri.models.decoder import Decoder
from libcolibri.models.state import SequenceState
from libcolibri.perplexity import perplexity
from libcolibri.prompt_encoder import set_apart
from libcolibri.thread_team import Team
from tests.fake_decoder import fake_parts
from tests.tiny_model import make_model

PROMPT = [(11 * i * i + 3 * i) % 47 for i in range(40)]


def real_parts() -> Parts:
    return replace(fake_parts(), decoder=Decoder, state=SequenceState, team=Team)


@pytest.fixture(scope="module", params=["f32", "q8_0"])
def folder(tmp_path_factory, request):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
    return make_model(
        tmp_path_factory.mktemp("models") / "tiny", quant=request.param, num_attention_heads=4, num_key_value_heads=2, **sizes
    )


@pytest.fixture(scope="module")
def engine(folder):
    with Engine.open(folder, threads=1, parts=real_parts()) as engine:
        yield engine


def test_plan_knows_what_is_taken(engine):
    session = engine.new_session()
    assert session.state_bytes == engine.plan.kv and engine.plan.experts == engine.experts.capacity_bytes


def test_smallest_cache_and_other_chunks_give_the_same_bits(folder, engine):
    expected = engine.new_session().logits(PROMPT)
    assert np.isfinite(expected).all() and len(np.unique(expected.argmax(axis=1))) > 3
    for options in ({"expert_cache": 1, "prefill_chunk": 7}, {"threads": 2, "preload": True, "prefill_chunk": 1}):
        with Engine.open(folder, parts=real_parts(), **options) as other:
            np.testing.assert_array_equal(other.new_session().logits(PROMPT), expected)
            stats = other.expert_stats
            if options.get("preload"):
                assert stats.misses == stats.evictions == 0 and stats.hits > 0
            else:
                assert stats.misses > 0 and stats.evictions > 0 and other.experts.capacity(0) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_simulated_misses_are_those_of_the_cache(folder, engine, policy, tmp_path):
    """Every policy gives the same bits, and the simulator, fed with the run's trace, counts what the cache counted.

    Token by token: of a prompt's experts those are computed first that come first, so a drive's mood decides who leaves.
    """
    expected, options = engine.new_session().logits(PROMPT), {"expert_cache": 3, "prefill_chunk": 1, "expert_policy": policy}
    with Engine.open(folder, parts=real_parts(), trace=tmp_path / "trace", prefetch=False, **options) as other:
        np.testing.assert_array_equal(other.new_session().logits(PROMPT), expected)
        budget, stats = other.experts.capacity_bytes, other.expert_stats
    run = simulate(read_trace(tmp_path / "trace"), policy, budget)
    assert (run.hits, run.misses, run.read_bytes) == (stats.hits, stats.misses, stats.read_bytes)
    assert stats.misses > simulate(read_trace(tmp_path / "trace"), OPTIMUM, budget).misses > 0


def test_a_pass_over_streamed_experts_can_be_cancelled(folder, engine):
    """The event is looked at while experts are missing; the session goes on as if nothing had been."""
    expected = [s.token_id for s in engine.new_session().generate(PROMPT, max_tokens=4) if s.token_id is not None]
    with Engine.open(folder, parts=real_parts(), expert_cache=1) as other:
        session, cancel, demand = other.new_session(), threading.Event(), other.experts.demand

        def cancel_later(*arguments):
            demand(*arguments)
            cancel.set()

        other.experts.demand = cancel_later
        steps = list(session.generate(PROMPT, max_tokens=4, cancel=cancel))
        assert [step.finish_reason for step in steps] == ["cancelled"] and steps[0].stats.prefilled_tok == 0
        other.experts.demand = demand
        assert [s.token_id for s in session.generate(PROMPT, max_tokens=4) if s.token_id is not None] == expected


def test_a_token_over_streamed_experts_can_be_cancelled(folder, engine):
    """On a slow drive a token takes seconds: the wait for its experts ends with the one that is being read."""
    expected = [s.token_id for s in engine.new_session().generate(PROMPT, max_tokens=6) if s.token_id is not None]
    with Engine.open(folder, parts=real_parts(), expert_cache=1) as other:
        session, cancel, demand = other.new_session(), threading.Event(), other.experts.demand

        def cancel_later(*arguments):
            demand(*arguments)
            cancel.set()

        steps = []
        for step in session.generate(PROMPT, max_tokens=6, cancel=cancel):
            steps += [] if step.token_id is None and step.finish_reason is None else [step]
            if len(steps) == 3:
                other.experts.demand = cancel_later
        assert [step.token_id for step in steps] == [*expected[:3], None] and steps[-1].finish_reason == "cancelled"
        other.experts.demand = demand
        assert [s.token_id for s in session.generate(PROMPT + expected[:3], max_tokens=3) if s.token_id is not None] == expected[3:]


def test_a_prompt_in_memory_is_cancelled_between_two_layers(folder, engine):
    expected = [s.token_id for s in engine.new_session().generate(PROMPT, max_tokens=4) if s.token_id is not None]
    with Engine.open(folder, parts=real_parts(), preload=True) as other:
        session, cancel, team = other.new_session(), threading.Event(), other._decoder.team
        run, calls = team.run, []

        def cancel_soon(*arguments):
            calls.append(arguments)
            if len(calls) == 2:
                cancel.set()
            return run(*arguments)

        team.run = cancel_soon
        steps = list(session.generate(PROMPT, max_tokens=4, cancel=cancel))
        assert [step.finish_reason for step in steps] == ["cancelled"] and len(calls) == 2
        team.run = run
        assert [s.token_id for s in session.generate(PROMPT, max_tokens=4) if s.token_id is not None] == expected


def test_experts_make_chunks_longer(folder):
    for cache, chunk in (("auto", 128), (1, 128), (3, 128)):  # the context is no longer than that
        with Engine.open(folder, parts=real_parts(), expert_cache=cache) as other:
            assert other.prefill_chunk == chunk
    plans = {512: 80, 256: 95, 128: 100}
    chosen = _longer_chunk(_plan_of(100), lambda tokens: _plan_of(plans[tokens]))
    assert (chosen[0], chosen[1].experts) == (256, 95)
    assert _longer_chunk(_plan_of(100), lambda tokens: _plan_of(10)) == (128, _plan_of(100))


def _plan_of(experts: int) -> MemoryPlan:
    return MemoryPlan(available=5000, dense=1, kv=1, activations=1, experts=experts, experts_total=1000, context_length=4096)


def test_a_trace_that_cannot_be_written_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        Engine.open(folder, parts=real_parts(), trace=tmp_path / "no" / "trace")


if Path("/dev/full").is_char_device():

    def test_a_full_drive_ends_the_recording_and_not_the_run(folder, engine, tmp_path):
        expected = engine.new_session().logits(PROMPT)
        with Engine.open(folder, parts=real_parts(), expert_cache=2, prefill_chunk=8, trace=tmp_path / "trace") as other:
            session = other.new_session()
            np.testing.assert_array_equal(session.logits(PROMPT[:8]), expected[:8])
            assert other.notices == ()
            with open("/dev/full", "w") as full:
                os.dup2(full.fileno(), other._trace._file.fileno())
                np.testing.assert_array_equal(session.logits(PROMPT), expected)
            assert re.fullmatch(r"trace .*/trace: recording ended after 1 passes \(No space left on device\): .*", other.notices[0])


def test_a_session_that_the_drive_does_not_take(engine, tmp_path):
    """One line, nothing left behind, and the session goes on."""
    session, limits = engine.new_session(), resource.getrlimit(resource.RLIMIT_FSIZE)
    list(session.generate(PROMPT, max_tokens=4))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(DiskSpaceError, match=r"/s: the session cannot be saved \(.*too large.*\): make room"):
            session.save(tmp_path / "s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    session.save(tmp_path / "s")
    assert engine.load_session(tmp_path / "s").tokens == session.tokens


@pytest.mark.parametrize("happening", ["deleted", "renamed", "truncated", "replaced in place"])
def test_a_model_that_goes_away_while_it_runs(happening, tmp_path):
    """Right tokens or an error that says what happened; never others. The dense part is in memory."""
    folder = make_model(tmp_path / "model", num_experts=8)
    with Engine.open(folder, parts=real_parts(), expert_cache=2) as engine:
        expected = [s.token_id for s in engine.new_session().generate(PROMPT, max_tokens=8)]
        if happening == "deleted":
            shutil.rmtree(folder)
        elif happening == "renamed":
            folder.rename(tmp_path / "elsewhere")
        else:
            other = make_model(tmp_path / "other", seed=5, num_experts=8)
            for path in folder.glob("*.safetensors"):
                if happening == "truncated":
                    os.truncate(path, 5000)
                else:
                    shutil.copyfile(other / path.name, path)
        if happening in ("deleted", "renamed"):
            assert [s.token_id for s in engine.new_session().generate(PROMPT, max_tokens=8)] == expected
            return
        what = "cannot be read .*ends at byte" if happening == "truncated" else "has wrong bytes"
        with pytest.raises(ExpertReadError, match=rf"experts-0000\d\S+: layer \d expert \d {what}.*changed while the model was open"):
            list(engine.new_session().generate(PROMPT, max_tokens=8))


def test_reuse_and_resumption_give_the_same_tokens(engine, tmp_path):
    first = [s.token_id for s in engine.new_session().generate(PROMPT, max_tokens=8) if s.token_id is not None]
    session = engine.new_session()
    list(session.generate(PROMPT[:25], max_tokens=5))
    session.save(tmp_path / "s")
    for again in (session, engine.load_session(tmp_path / "s")):
        steps = list(again.generate(PROMPT, max_tokens=8))
        assert [s.token_id for s in steps if s.token_id is not None] == first and steps[-1].stats.reused_tok == 25


FORGETFUL = {
    "rings": {"model_type": "mistral", "sliding_window": 9},
    "recurrent": {
        "model_type": "lfm2", "norm_eps": 1e-6, "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}  # fmt: skip
DENSE = {
    "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "moe_intermediate_size": None, "shared_expert_intermediate_size": None, "num_experts": None, "num_experts_per_tok": None,
    "mlp_only_layers": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", FORGETFUL)
def test_a_session_whose_layers_forget_gives_the_tokens_of_a_fresh_one(kind, tmp_path):
    """Regenerating, another question after the same beginning, and going on after being saved."""
    folder = make_model(tmp_path / "model", **{**DENSE, **FORGETFUL[kind]})
    with Engine.open(folder, threads=1, parts=real_parts(), prefill_chunk=8) as engine:

        def generated(session, prompt) -> list[int]:
            return [step.token_id for step in session.generate(prompt, max_tokens=20) if step.token_id is not None]

        session, other = engine.new_session(), [*PROMPT[:36], 5, 6, 7]
        assert session.state_bytes == engine.plan.kv
        first = generated(session, PROMPT)
        for prompt in (PROMPT, other, [*PROMPT, *first, 3, 4], PROMPT[:20]):
            assert generated(session, prompt) == generated(engine.new_session(), prompt)
        session.save(tmp_path / "session")
        longer = [*session.tokens, 8, 9]
        assert generated(engine.load_session(tmp_path / "session"), longer) == generated(engine.new_session(), longer)
        steps = list(session.generate(longer, max_tokens=1))
        assert steps[-1].stats.reused_tok == len(longer) - 3  # the last token of an answer has not been evaluated


def test_perplexity_agrees_with_logits(engine):
    logits = engine.new_session().logits(PROMPT).astype(np.float64)[:-1]
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), PROMPT[1:]]
    assert perplexity(engine, PROMPT, 40).nll == pytest.approx(losses.mean(), rel=1e-12)


def test_user_text_cannot_forge_control_tokens():
    """A content that spells a control token is encoded as plain text; the template's own control tokens stay."""
    tokenizer = SpellingTokenizer()
    marked, contents = set_apart([{"role": "user", "content": "hi"}, {"role": "user", "content": "a <end> b"}], tokenizer)
    assert marked[0]["content"] == "hi"
    assert contents == ["a <end> b"]
    assert "<end>" not in marked[1]["content"]
    forged = [{"role": "user", "content": "\ue0000\ue001"}]  # a content that looks like a mark is set apart too
    assert set_apart(forged, tokenizer)[1] == ["\ue0000\ue001"]


class SpellingTokenizer:
    """`<end>` is control token 999 when control tokens are recognised."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if special:
            head, *rest = text.split("<end>")
            return [*map(ord, head), *(code for piece in rest for code in (999, *map(ord, piece)))]
        return [ord(letter) for letter in text]
