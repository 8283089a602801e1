"""Usage histories, warming and pins through the engine: the same tokens, experts sooner, nothing that fails."""

import time
from dataclasses import replace

import numpy as np
import pytest

from libcolibri.engine import Engine, Parts
from libcolibri.errors import ConfigError, ExpertReadError, MemoryBudgetError
from libcolibri.models.decoder import Decoder
from libcolibri.models.state import SequenceState
from libcolibri.thread_team import Team
from libcolibri.usage_history import read_usage
from tests.fake_decoder import fake_parts
from tests.tiny_model import make_model

PROMPT = [(11 * i * i + 3 * i) % 47 for i in range(40)]
WAIT_S = 20


def real_parts() -> Parts:
    return replace(fake_parts(), decoder=Decoder, state=SequenceState, team=Team)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
    return make_model(tmp_path_factory.mktemp("models") / "tiny", num_attention_heads=4, num_key_value_heads=2, **sizes)


def open_engine(folder, **options) -> Engine:
    return Engine.open(folder, threads=1, parts=real_parts(), **options)


def resident(engine) -> set:
    return {(layer, expert) for layer in engine.experts._store.num_experts for expert in engine.experts.resident(layer)}


@pytest.fixture(scope="module")
def known(folder, tmp_path_factory):
    """A history of one run, the logits of that run, and the routing it should have counted."""
    path = tmp_path_factory.mktemp("usage") / "history"
    counts: dict = {}
    with open_engine(folder, usage_history=path, prefill_chunk=7) as engine:
        end_pass = engine.experts.end_pass

        def count(routed):
            for layer, ids in routed.items():
                counts[layer] = counts.get(layer, 0) + np.bincount(ids.reshape(-1), minlength=6)
            end_pass(routed)

        engine.experts.end_pass = count
        logits = engine.new_session().logits(PROMPT)
        assert engine.warmer is None and not path.exists() and engine.usage.tokens == len(PROMPT)
    return path, logits, counts


def test_a_run_is_remembered(folder, known):
    path, _, counts = known
    with open_engine(folder) as engine:
        tokens, usage = read_usage(path, engine.fingerprint, engine.experts._store.num_experts)
        assert engine.usage is None
    assert tokens == len(PROMPT) and set(usage.uses) == set(counts)
    for layer, uses in usage.uses.items():
        np.testing.assert_allclose(uses, counts[layer], rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"expert_cache": 1}, {"expert_cache": 3}, {"expert_cache": 3, "preload": True}])
@pytest.mark.parametrize("policy", ["lru", "decayed_frequency"])
def test_the_hottest_come_first_and_no_bit_changes(folder, known, tmp_path, options, policy):
    path, logits, counts = known
    (tmp_path / "h").write_bytes(path.read_bytes())
    with open_engine(folder, usage_history=tmp_path / "h", expert_policy=policy, **options) as engine:
        assert engine.warmer is None if options.get("preload") else engine.warmer.join(WAIT_S)
        order = engine.usage.usage.hottest_first()
        slots = engine.experts.capacity_bytes // engine.experts._store.expert_bytes[0]
        assert set(order[:slots]) <= resident(engine) and engine.expert_stats.misses == 0
        everyone = [(layer, expert) for layer in counts for expert in range(6)]
        assert order[0] == max(everyone, key=lambda at: (counts[at[0]][at[1]], -at[0], -at[1]))
        np.testing.assert_array_equal(engine.new_session().logits(PROMPT), logits)
    assert engine.warmer is None or engine.warmer.error is None


def test_passes_and_warming_at_once_give_the_same_bits(folder, known, tmp_path):
    path, logits, _ = known
    for turn in range(4):
        (tmp_path / "h").write_bytes(path.read_bytes())
        with open_engine(folder, usage_history=tmp_path / "h", expert_cache=3, prefill_chunk=1 + 6 * (turn % 2)) as engine:
            np.testing.assert_array_equal(engine.new_session().logits(PROMPT), logits)


def test_closing_does_not_wait_for_a_full_cache(folder, known, monkeypatch, tmp_path):
    (tmp_path / "h").write_bytes(known[0].read_bytes())
    from libcolibri.expert_cache import ExpertCache

    fill, calls = ExpertCache.fill, []

    def slow(*arguments):
        calls.append(1)
        time.sleep(0.05)
        return fill(*arguments)

    monkeypatch.setattr(ExpertCache, "fill", slow)
    with open_engine(folder, usage_history=tmp_path / "h") as engine:
        pass
    assert engine.warmer.join(0) and len(calls) <= 2


def test_a_read_error_while_warming_shows_where_the_expert_is_needed(folder, known, monkeypatch, tmp_path):
    (tmp_path / "h").write_bytes(known[0].read_bytes())
    from libcolibri.expert_store import ExpertStore

    def broken(self, layer, expert_ids, targets, **options):
        raise ExpertReadError(f"layer {layer}: drive gone")

    with monkeypatch.context() as patch:
        patch.setattr(ExpertStore, "start", broken)
        with open_engine(folder, usage_history=tmp_path / "h") as engine:
            assert engine.warmer.join(WAIT_S) and isinstance(engine.warmer.error, ExpertReadError)
            with pytest.raises(ExpertReadError, match="drive gone"):
                engine.new_session().logits(PROMPT)
            patch.undo()
            np.testing.assert_array_equal(engine.new_session().logits(PROMPT), known[1])


def test_what_is_wrong_with_the_file_is_a_remark(folder, tmp_path):
    (tmp_path / "h").write_bytes(b"Dear diary")
    with open_engine(folder, usage_history=tmp_path / "h") as engine:
        assert engine.remarks[-1].endswith("is no usage history; it is left alone, and nothing is remembered")
        engine.new_session().logits(PROMPT)
    assert (tmp_path / "h").read_bytes() == b"Dear diary"


def test_what_goes_wrong_with_it_later_is_a_notice(folder, tmp_path):
    with open_engine(folder, usage_history=tmp_path / "h") as engine:
        engine.new_session().logits(PROMPT)
        (tmp_path / "h").write_bytes(b"mine")
        engine.usage.save()
        assert engine.remarks == () and "left alone" in engine.notices[0]


def test_a_folder_has_a_file_for_each_model(folder, known, tmp_path):
    with open_engine(folder, usage_history=tmp_path) as engine:
        engine.new_session().logits(PROMPT[:3])
        name = f"{engine.fingerprint[:32]}.json"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with open_engine(folder, usage_history=tmp_path) as engine:
        assert engine.usage.tokens == 3


def test_a_history_of_other_weights_is_begun_anew(folder, known, tmp_path):
    text = known[0].read_text().replace('"model":"', '"model":"0')
    (tmp_path / "h").write_text(text)
    with open_engine(folder, usage_history=tmp_path / "h") as engine:
        assert engine.remarks == (f"usage history {tmp_path / 'h'}: is another model's; it is begun anew",) and engine.warmer is None


def test_pinned_experts_come_first_and_stay(folder, known):
    pins = {(0, 5), (2, 0)}
    with open_engine(folder, pin=pins, expert_cache=3) as engine:
        assert engine.warmer.join(WAIT_S) and resident(engine) == pins == engine.experts.pinned
        np.testing.assert_array_equal(engine.new_session().logits(PROMPT), known[1])
        assert pins <= resident(engine) and engine.expert_stats.evictions > 0


def test_pins_that_make_no_sense(folder, tmp_path):
    with pytest.raises(ConfigError, match="pinned layer 1: this model has experts in layers 0 to 2 only"):
        open_engine(folder, pin=[(1, 0)])
    with pytest.raises(ConfigError, match="pinned expert 6 of layer 0: expected 0 to 5"):
        open_engine(folder, pin=[(0, 6)])
    with pytest.raises(MemoryBudgetError, match="one token needs 2: pin fewer"):
        open_engine(folder, pin=[(0, 1), (0, 2), (0, 3)], expert_cache=2)
    keys = dict.fromkeys(
        ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "shared_expert_intermediate_size")
    )
    dense = make_model(tmp_path / "m", model_type="qwen2", **keys)
    with pytest.raises(ConfigError, match="no experts to pin"):
        Engine.open(dense, pin=[(0, 1)], parts=fake_parts())
    with Engine.open(dense, usage_history=tmp_path / "h", parts=fake_parts()) as engine:
        assert engine.usage is None and engine.warmer is None
    assert not (tmp_path / "h").exists()
