"""Every family, one test: every fixture whose model_type is registered against its oracle, and against itself.

Fixtures are tiny random checkpoints with float32 logits, greedy tokens and router decisions of Hugging Face transformers
(tests/fixtures/tiny/README.md). `pytest tests/models/test_all_families.py -s` prints the table.
"""

import json

import numpy as np
import pytest

from libcolibri.blocks.base import AttentionState
from libcolibri.models.registry import FAMILIES, parse_config, text_config
from tests.models.test_oracle import FIXTURES, Running, model_dirs, oracle, same_bits  # noqa: F401  # model_dirs is a fixture

RECURRENT_LIMIT, LIMIT, QUANTISED_LIMIT = 1e-3, 1e-4, 0.1  # of the logits' range


def supported() -> list[str]:
    """Fixtures with an oracle of a registered decoder family."""
    names = []
    for folder in sorted(path for path in FIXTURES.iterdir() if (path / "oracle.npz").exists()):
        raw = text_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        names += [folder.name] if raw["model_type"].removesuffix("_text") in FAMILIES else []
    return names


@pytest.fixture
def case(request, model_dirs):  # noqa: F811
    return request.param, model_dirs(request.param)


def routers_agree(running: Running, expected, count: int) -> bool | None:
    """Whether every MoE layer chose transformers' experts with its weights, in the last forward call; None where it is not known."""
    keys = sorted({int(key.split(".")[1]) for key in expected.files if key.endswith("indices")})
    if not keys:
        return None
    layers = list(running.config.experts)
    for layer, key in zip(layers, layers if set(keys) == set(layers) else keys, strict=True):
        ids, weights = running.decoder.routing(layer)
        order = np.argsort(-weights, axis=1, kind="stable")
        wanted = expected[f"router.{key}.indices"][:count]
        if not (np.sort(ids, axis=1) == np.sort(wanted, axis=1)).all():
            return False
        if f"router.{key}.weights" in expected.files:
            wanted = expected[f"router.{key}.weights"][:count]
            np.testing.assert_allclose(np.take_along_axis(weights, order, 1), wanted, rtol=1e-4, atol=1e-6)
    return True


def greedy_tokens(running: Running, prompt: np.ndarray, count: int) -> list[int]:
    kv = running.decoder.new_state()
    tokens, logits = [], running.decoder.forward(kv, prompt)
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = running.decoder.forward(kv, np.array(tokens[-1:]))
    return tokens


@pytest.mark.parametrize("case", supported(), indirect=True)
def test_family(case):
    name, folder = case
    expected = oracle(name)
    prompt, greedy = expected["input_ids"][0].astype(np.int64), expected["greedy"].astype(np.int64)
    with Running(folder) as running:
        longest = running.config.max_context_length
        if longest < len(prompt):  # beyond it the model is another one; its first tokens do not see the later ones
            prompt, greedy = prompt[:longest], greedy[:0]
        got, wanted = running.logits(prompt), expected["logits"][: len(prompt)]
        error = float(np.abs(got - wanted).max() / np.ptp(wanted))
        routers = routers_agree(running, expected, len(prompt)) if running.config.is_moe else None
        top_1 = (got.argmax(-1) == wanted.argmax(-1)).mean()
        print(f"\n{name:20} |dlogit| {error:.1e} of the range; routers equal: {routers}; top-1 {top_1:.0%}")
        assert error < (RECURRENT_LIMIT if running.config.is_recurrent else LIMIT)
        assert top_1 == 1.0 and routers in (None, True)
        assert greedy_tokens(running, prompt, len(greedy)) == greedy.tolist()
        for chunk in (1, 3, 16):
            assert same_bits(running.logits(prompt, chunk), got), chunk
        half = len(prompt) // 2
        assert same_bits(resumed(running, prompt, half), got[half:])
    slots = running.config.num_experts_per_tok or None
    with Running(folder, threads=2, expert_slots=slots, max_chunk_tok=len(prompt)) as small:
        assert same_bits(small.logits(prompt), got) and same_bits(small.logits(prompt, 1), got)
    if any(isinstance(state, AttentionState) and state.window for state in running.config.states):
        with Running(folder, max_chunk_tok=8) as ring:  # short passes: windows are rings that the prompt goes round
            assert same_bits(ring.logits(prompt, 8), got) and same_bits(resumed(ring, prompt, 8), got[8:16])


@pytest.mark.parametrize("name", supported())
def test_family_with_quantised_weights(name, model_dirs):  # noqa: F811
    """Activations are rounded to 8 bits: one number whatever the chunks, threads and cache, and near the oracle.

    Tiny random models amplify rounding where a router flips or a softmax is sharp; the median position shows a defect, the worst does not.
    """
    folder, expected = model_dirs(name, "q8_0"), oracle(name)
    with Running(folder) as running:
        prompt = expected["input_ids"][0].astype(np.int64)[: running.config.max_context_length]
        got, wanted = running.logits(prompt), expected["logits"][: len(prompt)]
        assert same_bits(running.logits(prompt, 1), got) and same_bits(running.logits(prompt, 7), got)
    slots = 3 * running.config.num_experts_per_tok or None  # room for guesses
    with Running(folder, threads=2, expert_slots=slots, max_chunk_tok=len(prompt)) as small:
        assert same_bits(small.logits(prompt), got) and same_bits(small.logits(prompt, 1), got)
    error = np.abs(got - wanted).max(1) / np.ptp(wanted)
    assert np.median(error) < QUANTISED_LIMIT


def resumed(running: Running, prompt: np.ndarray, at: int) -> np.ndarray:
    """Logits of one pass over prompt[at:] from a state that was exported after `at` tokens and restored."""
    kv, other = running.decoder.new_state(), running.decoder.new_state()
    running.decoder.forward(kv, prompt[:at], "none")
    other.restore(kv.export(), kv.n_tok)
    return running.decoder.forward(other, prompt[at : at + running.decoder.max_chunk_tok], "all")


@pytest.mark.parametrize("name", supported())
def test_new_and_published_spelling_agree(name):
    files = [FIXTURES / name / file for file in ("config.json", "config_legacy.json")]
    configs = [parse_config(json.loads(path.read_text(encoding="utf-8"))) for path in files if path.exists()]
    assert all(config == configs[0] for config in configs)


