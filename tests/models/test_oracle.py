"""Every family against Hugging Face transformers: converted by our converter, loaded by our loader, computed by our kernels.

Fixtures are tiny random checkpoints with float32 logits, greedy tokens and router decisions (tests/fixtures/tiny/README.md).
"""

from pathlib import Path

import numpy as np
import pytest
from colibri_converter import convert

from libcolibri.expert_cache import ExpertCache
from libcolibri.expert_store import ExpertStore
from libcolibri.format import read_manifest
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.loader import load_weights
from libcolibri.models.decoder import Decoder
from libcolibri.models.registry import parse_config
from libcolibri.prefetch import Prefetch
from libcolibri.simd.isa import available
from libcolibri.thread_team import Team

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tiny"
DENSE, MOE = ["llama", "qwen2", "qwen3"], ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]
KERNELS = {isa: KernelSet(isa) for isa in available()}
BEST = available()[-1]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    """Model directories by (family, recipe), converted once."""
    made: dict[tuple[str, str], Path] = {}

    def get(name: str, quant: str = "f32") -> Path:
        if (name, quant) not in made:
            made[name, quant] = tmp_path_factory.mktemp("models") / f"{name}-{quant}"
            convert(FIXTURES / name, made[name, quant], quant=quant, tokenizer=False)
        return made[name, quant]

    return get


class Running:
    """A decoder on a model directory, with all that must be closed. Where experts are streamed, they are read ahead as well."""

    def __init__(self, path: Path, *, threads: int = 1, isa=BEST, expert_slots: int | None = None, max_chunk_tok: int = 512):
        manifest = read_manifest(path)
        self.config = parse_config(manifest.config)
        weights = load_weights(path, manifest, self.config)
        self.team, self.store, self.cache = Team(threads), None, None
        if self.config.is_moe:
            self.store = ExpertStore(path, manifest)
            budget = self.store.total_bytes if expert_slots is None else expert_slots * max(self.store.expert_bytes.values())
            self.cache = ExpertCache(self.store, budget, self.config.num_experts_per_tok)
        self.decoder = Decoder(
            self.config, weights, self.team, self.cache, context_length=128, kernels=KERNELS[isa], max_chunk_tok=max_chunk_tok,
            prefetch=Prefetch("on") if self.config.is_moe and expert_slots is not None else None,
        )  # fmt: skip

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.team.close()
        if self.store is not None:
            self.store.close()

    def logits(self, ids: np.ndarray, chunk: int = 512) -> np.ndarray:
        """float32 (T, V), fed `chunk` tokens at a time into a fresh cache."""
        kv = self.decoder.new_state()
        return np.concatenate([np.atleast_2d(self.decoder.forward(kv, ids[at : at + chunk], "all")) for at in range(0, len(ids), chunk)])


def oracle(name: str):
    return np.load(FIXTURES / name / "oracle.npz")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


@pytest.mark.parametrize("name", DENSE + MOE)
def test_logits_tokens_and_routers_equal_transformers(name, model_dirs):
    expected = oracle(name)
    prompt, greedy = expected["input_ids"][0].astype(np.int64), expected["greedy"].astype(np.int64)
    with Running(model_dirs(name)) as running:
        got = running.logits(prompt)
        spread = expected["logits"].max() - expected["logits"].min()
        assert np.abs(got - expected["logits"]).max() < 1e-5 * spread
        assert (got.argmax(-1) == expected["logits"].argmax(-1)).all()
        for layer in running.config.experts:
            ids, weights = running.decoder.routing(layer)
            count = len(prompt)
            routed = sorted(int(key.split(".")[1]) for key in expected.files if key.endswith("indices"))
            key = layer if layer in routed else routed[list(running.config.experts).index(layer)]
            assert (ids == expected[f"router.{key}.indices"][:count]).all()
            np.testing.assert_allclose(weights, expected[f"router.{key}.weights"][:count], rtol=1e-4, atol=1e-6)
        kv, tokens = running.decoder.new_state(), list(prompt)
        logits = running.decoder.forward(kv, prompt)
        for _ in greedy:
            tokens.append(int(logits.argmax()))
            logits = running.decoder.forward(kv, np.array(tokens[-1:]))
        assert tokens[len(prompt) :] == greedy.tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize("quant", ["f32", "q8_0"])
def test_prefill_equals_decode_to_the_bit(name, quant, model_dirs):
    """Chunk sizes, threads and instruction sets: one number."""
    ids = oracle(name)["input_ids"][0].astype(np.int64)
    with Running(model_dirs(name, quant)) as running:
        whole = running.logits(ids)
        for chunk in (1, 2, 7, 16):
            assert same_bits(running.logits(ids, chunk), whole), chunk
    for threads in (2, 3):
        with Running(model_dirs(name, quant), threads=threads) as running:
            assert same_bits(running.logits(ids), whole) and same_bits(running.logits(ids, 1), whole), threads
    for isa in available():
        with Running(model_dirs(name, quant), isa=isa) as running:
            assert same_bits(running.logits(ids), whole) and same_bits(running.logits(ids, 5), whole), isa.name


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("quant", ["f32", "q8_0", "q4_k_m"])
def test_expert_cache_size_never_changes_a_bit(name, quant, model_dirs):
    ids = oracle(name)["input_ids"][0].astype(np.int64)
    with Running(model_dirs(name, quant)) as running:
        whole = running.logits(ids)
        assert running.cache.stats.evictions == 0
        floor = running.config.num_experts_per_tok
    for slots in (floor, floor + 1):
        with Running(model_dirs(name, quant), threads=2, expert_slots=slots) as running:
            assert same_bits(running.logits(ids), whole), slots
            assert same_bits(running.logits(ids, 1), whole), slots
            stats = running.cache.stats
            assert stats.evictions > 0 and running.decoder.expert_counters[1] > 0 and stats.read_bytes > 0


def test_truncated_cache_continues_like_a_fresh_one(model_dirs):
    ids = oracle("qwen3_moe")["input_ids"][0].astype(np.int64)
    with Running(model_dirs("qwen3_moe")) as running:
        kv = running.decoder.new_state()
        running.decoder.forward(kv, ids[:20], "none")
        running.decoder.forward(kv, ids[::-1][:12].copy(), "none")
        kv.truncate(20)
        assert same_bits(running.decoder.forward(kv, ids[20:], "all"), running.logits(ids)[20:])


def test_exported_cache_can_be_restored(model_dirs):
    ids = oracle("llama")["input_ids"][0].astype(np.int64)
    with Running(model_dirs("llama")) as running:
        kv = running.decoder.new_state()
        running.decoder.forward(kv, ids[:21], "none")
        other = running.decoder.new_state(64)
        other.restore(kv.export(), kv.n_tok)
        assert same_bits(running.decoder.forward(other, ids[21:], "all"), running.logits(ids)[21:])
