"""Generating: text, ends, cancelling, prefix reuse, saving; checked against the toy model evaluated from scratch."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.chat_template import ChatTemplate
from libcolibri.engine import Engine
from libcolibri.errors import ColibriError, ConfigError, ContextLengthError, FormatError, TemplateError, TokenizerError
from libcolibri.prompt_encoder import encode_messages
from libcolibri.session import Session
from tests.fake_decoder import FakeTokenizer, ForgetfulDecoder, ScriptSampler, fake_parts, toy_logits
from tests.tiny_model import edit_manifest, make_model

TOKENIZER = {"file": "dense.safetensors", "bos_token_id": None, "eos_token_ids": [47], "add_bos": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("models") / "tiny")
    edit_manifest(model, lambda data: data.update(tokenizer=TOKENIZER))
    return model


@pytest.fixture
def engine(folder):
    with Engine.open(folder, parts=fake_parts(), prefill_chunk=4) as engine:
        yield engine


def greedy(prompt, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, 48).argmax()))
        if tokens[-1] == 47:
            break
    return tokens[len(prompt) :]


def run(session, prompt, sampling=None, **options):
    steps = list(session.generate(prompt, sampling, **options))
    return [s.token_id for s in steps if s.token_id is not None], "".join(s.text for s in steps), steps


def test_greedy_tokens_text_and_counts(engine):
    session = engine.new_session()
    tokens, text, steps = run(session, "ab cd ab c", max_tokens=6)
    prompt = FakeTokenizer().encode("ab cd ab c")
    assert tokens == greedy(prompt, 6) and text == FakeTokenizer().decode(tokens)
    assert session.tokens == prompt + tokens
    assert [s.finish_reason for s in steps] == [None] * (len(steps) - 1) + ["length"]
    assert [(s.text, s.token_id, s.stats.prefilled_tok) for s in steps[:3]] == [("", None, 4), ("", None, 8), ("", None, 10)]
    stats = steps[-1].stats
    assert (stats.prompt_tok, stats.reused_tok, stats.prefilled_tok, stats.completion_tok) == (10, 0, 10, 6)
    assert 0 < stats.prefill_s <= stats.ttft_s and stats.decode_s > 0 and stats.decode_tok_s > 0 and stats.prefill_tok_s > 0
    assert stats.expert_hits + stats.expert_misses == 2 * 2 * 15 and stats.expert_read_bytes > 0
    assert engine._decoder.calls == [(4, "none"), (4, "none"), (2, "last")] + [(1, "last")] * 5


def test_end_token_stops_without_text(engine):
    tokens, text, steps = run(engine.new_session(), "ab", ScriptSampler([1, 2, 47]))
    assert tokens == [1, 2, 47] and text == "ab" and steps[-1].finish_reason == "stop" and steps[-1].text == ""


def test_a_character_of_two_tokens(engine):
    _, text, steps = run(engine.new_session(), "ab", ScriptSampler([5, 6, 47]))
    assert text == "é" and [s.text for s in steps] == ["", "", "é", ""]


def test_stop_string_across_tokens_is_not_shown(engine):
    tokens, text, steps = run(engine.new_session(), "ab", ScriptSampler([1, 2, 3, 4, 1]), stop=["cd", "zz"])
    assert tokens == [1, 2, 3, 4] and text == "ab" and steps[-1].finish_reason == "stop"
    tokens, text, steps = run(engine.new_session(), "ab", ScriptSampler([1, 2, 3, 1]), stop="cd", max_tokens=3)
    assert text == "abc" and steps[-1].finish_reason == "length"
    _, text, _ = run(engine.new_session(), "ab", ScriptSampler([1, 2, 3, 47]), stop="cd")
    assert text == "abc"


def test_sampler_sees_prompt_and_completion(engine):
    sampler = ScriptSampler([1, 2, 47])
    run(engine.new_session(), [9, 8], sampler)
    assert sampler.histories == [[9, 8], [9, 8, 1], [9, 8, 1, 2]]


def test_messages_go_through_the_template(engine):
    session = engine.new_session()
    messages = [{"role": "user", "content": "ab"}]
    expected = FakeTokenizer().encode("uab a")
    assert session.encode_prompt(messages) == expected
    tokens, _, _ = run(session, messages, max_tokens=3)
    assert tokens == greedy(expected, 3)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, ConfigError, "prompt is empty"),
        ("", {}, ConfigError, "prompt is empty"),
        ([48], {}, ConfigError, "prompt token 48: expected a token id from 0 to 47"),
        ([-1], {}, ConfigError, "prompt token -1"),
        ([True], {}, ConfigError, "prompt token True"),
        ([1.5], {}, ConfigError, "prompt token 1.5"),
        ([1], {"max_tokens": 0}, ConfigError, "max_tokens=0"),
        ([1] * 129, {}, ContextLengthError, "the prompt has 129 tokens, the context holds 128"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(engine, prompt, options, error, message):
    with pytest.raises(error, match=message):
        engine.new_session().generate(prompt, **options)


def test_reasoning_is_no_part_of_the_answer(engine):
    engine.chat_template.source = "<think>"
    engine.tokenizer.stream = lambda shown=(): Spelling({1: "<think>", 2: "well", 3: "</think>\n", 4: "four"})
    steps = list(engine.new_session().generate([{"role": "user", "content": "ab"}], ScriptSampler([1, 2, 3, 4, 47])))
    assert ["".join(getattr(step, name) for step in steps) for name in ("reasoning", "text", "tool_call")] == ["well", "four", ""]
    raw = list(engine.new_session().generate("ab", ScriptSampler([1, 2, 3, 4, 47])))
    assert "".join(step.text for step in raw) == "<think>well</think>\nfour"


def test_a_marker_in_a_question_opens_nothing():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}A<think>{% endif %}")
    question, tokenizer = [{"role": "user", "content": "what is <think>?"}], FakeBytes()
    assert encode_messages(question, tokenizer, template, None, {}).inside is not None
    for source in ("[{{ messages[0].content }}]{% if add_generation_prompt %}A{% endif %}", "{{ messages[0].content }}A{# <think> #}"):
        assert encode_messages(question, tokenizer, ChatTemplate(source + "{# <think> #}"), None, {}).inside is None


class FakeBytes:
    """A tokenizer of bytes."""

    def encode(self, text, *, special=False):
        return list(text.encode())

    def with_bos(self, token_ids):
        return token_ids


class Spelling(dict):
    """Texts of tokens."""

    push, flush = dict.__getitem__, lambda self: ""


def test_tools_and_template_options_reach_the_template(engine):
    session, messages = engine.new_session(), [{"role": "user", "content": "ab"}]
    next(session.generate(messages, tools=[{"name": "f"}], template_options={"enable_thinking": False}))
    assert engine.chat_template.options == {"tools": [{"name": "f"}], "enable_thinking": False}
    with pytest.raises(ConfigError, match="for a list of messages"):
        session.generate("ab", template_options={"enable_thinking": False})


def test_a_builtin_template_is_remarked_on(engine):
    assert engine.remarks == ()
    engine.chat_template.builtin = "chatml"
    assert "no chat template; conversations are written in the format 'chatml'" in engine.remarks[0]


def test_without_tokenizer_or_template(engine):
    engine.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        engine.new_session().generate([{"role": "user", "content": "a"}])
    engine.tokenizer = None
    for prompt, options in (("ab", {}), ([{"role": "user", "content": "a"}], {}), ([1], {"stop": "x"})):
        with pytest.raises(TokenizerError, match="no tokenizer"):
            engine.new_session().generate(prompt, **options)
    tokens, text, _ = run(engine.new_session(), [1, 2], max_tokens=3)
    assert tokens == greedy([1, 2], 3) and text == ""


def test_context_full_ends_with_length(engine):
    session = engine.new_session()
    tokens, _, steps = run(session, [1] * 126, ScriptSampler([3] * 9))
    assert tokens == [3, 3, 3] and steps[-1].finish_reason == "length" and session._state.n_tok == 128
    tokens, _, steps = run(session, [1] * 128, ScriptSampler([3] * 9))
    assert tokens == [3] and steps[-1].finish_reason == "length"


# --- prefix reuse


def test_next_turn_evaluates_only_what_is_new(engine):
    session = engine.new_session()
    first, _, _ = run(session, [1, 2, 3, 4, 5], max_tokens=4)
    prompt = [1, 2, 3, 4, 5, *first, 7, 8]
    tokens, _, steps = run(session, prompt, max_tokens=3)
    stats = steps[-1].stats
    # the last token sampled was not evaluated yet
    assert (stats.reused_tok, stats.prefilled_tok) == (8, 3) and tokens == greedy(prompt, 3)


def test_same_prompt_again_evaluates_its_last_token(engine):
    session = engine.new_session()
    first, _, _ = run(session, [1, 2, 3], max_tokens=3)
    again, _, steps = run(session, [1, 2, 3], max_tokens=3)
    assert first == again and steps[-1].stats.reused_tok == 2


@settings(max_examples=40, deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6), leave=st.integers(0, 5))
def test_reuse_never_changes_a_token(folder, prompts, leave):
    with Engine.open(folder, parts=fake_parts(), prefill_chunk=3, expert_cache=3) as engine:
        session = engine.new_session()
        for i, prompt in enumerate(prompts):
            if i == leave:  # a reader that goes away in the middle
                iterator = session.generate(prompt[::-1], max_tokens=3)
                for _ in range(min(leave, 2)):
                    next(iterator)
                continue
            tokens, _, _ = run(session, prompt, max_tokens=3)
            assert tokens == greedy(prompt, 3)
            assert session.tokens[: session._state.n_tok] == session._state.seen[: session._state.n_tok].tolist()


def test_a_state_that_forgets_goes_back_to_the_mark_before_the_prompts_end(folder):
    with Engine.open(folder, parts=fake_parts(decoder=ForgetfulDecoder), prefill_chunk=8) as engine:
        session, prompt = engine.new_session(), [i % 40 for i in range(30)]
        first, _, _ = run(session, prompt, max_tokens=5)
        assert [n for n, _ in engine._decoder.calls[:4]] == [8, 6, 8, 8]  # the mark is 16 tokens before the end
        again, _, steps = run(session, prompt, max_tokens=5)
        assert again == first and steps[-1].stats.reused_tok == 14
        longer = [*prompt, *first, 1, 2, 3]  # the whole answer stays: only its last token was not evaluated
        _, _, steps = run(session, longer, max_tokens=3)
        assert steps[-1].stats.reused_tok == 34
        tokens, _, steps = run(session, [*longer[:34], 9, 9], max_tokens=3)
        assert steps[-1].stats.reused_tok == 30 and tokens == greedy([*longer[:34], 9, 9], 3)  # 16 new tokens: marked at their end


# --- cancelling and misuse


def test_cancel_inside_prefill_keeps_what_was_done(engine):
    session, cancel = engine.new_session(), threading.Event()
    steps = []
    for step in session.generate(list(range(20)), cancel=cancel):
        steps.append(step)
        if step.stats.prefilled_tok == 8:
            cancel.set()
    assert steps[-1].finish_reason == "cancelled" and steps[-1].token_id is None and steps[-1].stats.prefilled_tok == 8
    assert session.tokens == list(range(8))
    tokens, _, steps = run(session, list(range(20)), max_tokens=2)
    assert steps[-1].stats.reused_tok == 8 and tokens == greedy(range(20), 2)


def test_cancel_before_anything_and_after_prefill(engine):
    cancel = threading.Event()
    cancel.set()
    assert [s.finish_reason for s in engine.new_session().generate([1, 2], cancel=cancel)] == ["cancelled"]
    assert engine._decoder.calls == []
    cancel.clear()
    reasons = []
    for step in engine.new_session().generate([1, 2], cancel=cancel):
        cancel.set()
        reasons.append((step.token_id, step.finish_reason))
    assert reasons == [(None, None), (None, "cancelled")]


def test_cancel_between_tokens_shows_held_back_text(engine):
    cancel, text = threading.Event(), ""
    for step in engine.new_session().generate("ab", ScriptSampler([1, 2, 3, 4]), stop="cz", cancel=cancel):
        text += step.text
        if step.stats.completion_tok == 3:
            cancel.set()
    assert text == "abc" and step.finish_reason == "cancelled"


def test_overtaken_generation_raises(engine):
    session = engine.new_session()
    old = session.generate([1, 2, 3])
    next(old)
    run(session, [4, 5], max_tokens=2)
    with pytest.raises(ColibriError, match="overtaken by a newer one"):
        next(old)
    assert session.tokens[:2] == [4, 5]


def test_one_session_on_two_threads_is_refused(engine):
    session = engine.new_session()
    with session.using(), pytest.raises(ColibriError, match="in use by another thread"):
        list(session.generate([1]))


def test_interrupted_pass_leaves_a_consistent_session(engine, monkeypatch):
    session = engine.new_session()
    run(session, [1, 2, 3], max_tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(engine._decoder, "forward", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(session.generate([1, 2, 9, 9]))
    tokens, _, steps = run(session, [1, 2, 3, 4], max_tokens=2)
    assert tokens == greedy([1, 2, 3, 4], 2) and steps[-1].stats.reused_tok == 2


# --- logits, saving


def test_logits_of_every_position(engine):
    session = engine.new_session()
    run(session, [7, 7], max_tokens=2)
    ids = [i % 48 for i in range(70)]
    logits = session.logits(ids)
    assert logits.dtype == np.float32 and logits.shape == (70, 48)
    for position in (0, 31, 32, 69):
        np.testing.assert_array_equal(logits[position], toy_logits(ids[: position + 1], 48))
    assert session.tokens == ids
    with pytest.raises(ContextLengthError):
        session.logits([1] * 129)
    session.reset()
    assert session.tokens == []


def test_save_and_load(engine, tmp_path):
    session = engine.new_session()
    first, _, _ = run(session, [1, 2, 3, 4], max_tokens=3)
    session.save(tmp_path / "gespräch.session")
    resumed = Session.load(engine, tmp_path / "gespräch.session")
    assert resumed.tokens == session.tokens and [p.name for p in tmp_path.iterdir()] == ["gespräch.session"]
    prompt = [1, 2, 3, 4, *first, 9]
    tokens, _, steps = run(resumed, prompt, max_tokens=3)
    assert tokens == greedy(prompt, 3) and steps[-1].stats.reused_tok == 6


def test_load_refuses_what_does_not_belong(engine, folder, tmp_path):
    session = engine.new_session()
    run(session, [1, 2, 3, 4], max_tokens=3)
    path = tmp_path / "s"
    session.save(path)
    with Engine.open(folder, parts=fake_parts(), context_length=5) as small, pytest.raises(ContextLengthError):
        small.load_session(path)
    other = make_model(tmp_path / "other", seed=9)
    with Engine.open(other, parts=fake_parts()) as engine2, pytest.raises(FormatError, match="saved with another model"):
        engine2.load_session(path)
    path.write_bytes(b"garbage")
    with pytest.raises(FormatError, match="is no saved session"):
        engine.load_session(path)
    with pytest.raises(FormatError, match="is no saved session"):
        engine.load_session(tmp_path / "absent")
    with pytest.raises(FormatError, match="has format None"):
        engine.load_session(folder / "dense.safetensors")


@pytest.mark.parametrize("prompt", [None, 5, {"role": "user"}])
def test_a_prompt_of_another_type_is_named(engine, prompt):
    with pytest.raises(ConfigError, match="expected text, a list of messages, or token ids"):
        engine.new_session().generate(prompt)
