"""Opening, planning, sharing and closing an engine."""

import itertools
import threading

import pytest

from libcolibri.engine import Engine
from libcolibri.errors import ColibriError, ConfigError, FormatError, MemoryBudgetError
from libcolibri.expert_store import ExpertStore
from libcolibri.turn_lock import TurnLock
from tests.fake_decoder import FakeDecoder, FakeTeam, fake_parts, toy_logits
from tests.tiny_model import edit_manifest, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def open_engine(folder, **options) -> Engine:
    return Engine.open(folder, parts=fake_parts(), **options)


def test_open_and_close(folder):
    with open_engine(folder, threads=2, preload=True) as engine:
        assert engine.threads == 2 and engine.context_length == 128 and engine.tokenizer is None and engine.end_ids == {47}
        assert engine.plan.experts == engine.plan.experts_total == engine.experts.capacity_bytes
        assert engine.experts.holds_everything and engine.plan.line().startswith("memory: runtime ")
        assert engine.experts.resident(0) == list(range(6)) and engine.expert_stats.misses == 0
        session, team = engine.new_session(), engine._decoder.team
    assert team.closed
    with pytest.raises(ColibriError, match="engine is closed"):
        list(session.generate([1]))
    with pytest.raises(ColibriError, match="engine is closed"):
        engine.new_session()
    engine.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threads": 0}, ConfigError, "threads=0"),
        ({"threads": True}, ConfigError, "threads=True"),
        ({"expert_cache": "plenty"}, ConfigError, "expert cache 'plenty'"),
        ({"expert_cache": "4kB"}, MemoryBudgetError, "cannot hold one token's 2 experts"),
        ({"expert_cache": "9999TB", "context_length": 129}, ConfigError, "context length 129: .* allow 1 to 128"),
        ({"prefetch": "always"}, ConfigError, "prefetch='always'"),
        ({"prefill_chunk": 0}, ConfigError, "prefill_chunk=0"),
    ],
)
def test_settings_that_make_no_sense(folder, options, error, message):
    with pytest.raises(error, match=message):
        open_engine(folder, **options)


def test_an_encoder_is_refused(tmp_path):
    model = make_model(tmp_path / "m")
    edit_manifest(model, lambda data: data.update(kind="encoder"))
    with pytest.raises(FormatError, match="is a model of kind 'encoder'"):
        open_engine(model)


def test_a_path_that_is_no_model(tmp_path):
    with pytest.raises(FormatError, match=r"colibri\.json"):
        open_engine(tmp_path)


def test_nothing_stays_open_when_opening_fails(folder, monkeypatch):
    closed = []
    monkeypatch.setattr(ExpertStore, "close", lambda self: closed.append("store"))
    monkeypatch.setattr(FakeTeam, "close", lambda self: closed.append("team"))

    def broken(*args, **options):
        raise RuntimeError("no kernels")

    broken.activation_bytes, broken.max_chunk_tok = FakeDecoder.activation_bytes, 64
    with pytest.raises(RuntimeError, match="no kernels"):
        Engine.open(folder, parts=fake_parts(decoder=broken))
    assert closed == ["team", "store"]


def test_smallest_cache_gives_the_same_tokens(folder):
    with open_engine(folder) as large, open_engine(folder, expert_cache=2) as small:
        assert small.experts.capacity(0) == 4 and small.plan.streams_experts  # 2 experts of 2 layers share 4 slots
        outputs = [[step.token_id for step in e.new_session().generate(range(20), max_tokens=12)] for e in (large, small)]
        assert outputs[0] == outputs[1]
        assert small.expert_stats.evictions > 0 and large.expert_stats.evictions == 0


def test_dense_model_has_no_expert_cache(tmp_path):
    keys = dict.fromkeys(
        ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "shared_expert_intermediate_size")
    )
    with open_engine(make_model(tmp_path / "m", model_type="qwen2", **keys)) as engine:
        assert engine.experts is None and "experts" not in engine.plan.line()
        steps = list(engine.new_session().generate([1, 2], max_tokens=2))
        assert steps[-1].stats.expert_hit_rate == 1.0


def test_a_session_too_many(folder, monkeypatch):
    with open_engine(folder) as engine:
        monkeypatch.setattr("libcolibri.engine.available_memory", lambda: 100)
        with pytest.raises(MemoryBudgetError, match=r"a session needs 1\.0 kB"):
            engine.new_session()


def test_two_threads_generate_at_once_and_take_turns(folder, monkeypatch):
    monkeypatch.setattr(FakeDecoder, "delay_s", 0.001)
    with open_engine(folder) as engine:
        order, results, start = [], {}, threading.Barrier(2)

        def run(name: int) -> None:
            tokens, session = [], engine.new_session()
            start.wait(20)
            for step in session.generate([name, 2, 3], max_tokens=25):
                order.append(name)
                tokens.append(step.token_id)
            results[name] = tokens[1:]

        threads = [threading.Thread(target=run, args=(name,)) for name in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for name in (0, 1):
            context, expected = [name, 2, 3], []
            while len(expected) < 25 and (not expected or expected[-1] != 47):
                expected.append(int(toy_logits(context, 48).argmax()))
                context.append(expected[-1])
            assert results[name] == expected
        changes = sum(a != b for a, b in itertools.pairwise(order))
        assert changes > min(len(tokens) for tokens in results.values()), "one session starved the other"


def test_turn_lock_survives_an_interrupted_wait():
    lock, entered = TurnLock(), threading.Event()

    def wait_in_vain():
        with pytest.raises(KeyboardInterrupt), lock:
            raise KeyboardInterrupt
        entered.set()

    with lock:
        thread = threading.Thread(target=wait_in_vain)
        thread.start()
        while not lock._waiting:
            pass
        lock._give_up(waiting := lock._waiting[0])
        assert not lock._waiting
        lock._waiting.append(waiting)
    thread.join(5)
    assert entered.is_set() and not lock._held
