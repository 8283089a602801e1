"""The router kernel against each family's rule in float64, and the same bits on every instruction set and number of threads."""

import numpy as np
import pytest

from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.kernels.router import GROUP_SCORES, SCORES, make_route, route_scratch_bytes
from libcolibri.program import Program
from libcolibri.recorder import Rows, padded_vector
from libcolibri.simd.isa import available
from libcolibri.thread_team import Team
from tests.oracle import routers as oracle

KERNELS = {isa: KernelSet(isa) for isa in available()}
T = 5


def route(x, k, score, *, isa=None, threads=2, bias=None, choice_bias=None, groups=1, kept=1, by="max", normalise=False, cap=0.0, eps=0.0,
          least=0.0, scale=1.0, tolerance=0.0, per_expert=None):  # fmt: skip
    """ids and weights (T, K) as the kernel finds them."""
    n, experts = x.shape
    logits, ids, weights = Rows(n, experts), np.full((n, k), -1), np.zeros((n, k), np.float32)
    logits.data[:, :experts] = x
    numbers = np.array([cap, eps, least, scale, tolerance], np.float32)
    scratch = np.zeros((threads, route_scratch_bytes(experts)), np.uint8)
    vectors = [0 if v is None else padded_vector(v) for v in (bias, choice_bias, per_expert)]
    slots = [
        np.array([n]), logits.data, logits.stride, experts, k, ids, weights, SCORES[score], *vectors[:2], groups, kept, GROUP_SCORES[by],
        int(normalise), numbers, vectors[2], scratch, scratch.shape[1],
    ]  # fmt: skip
    program, team = Program(), Team(threads)
    program.record("route", KERNELS[isa or available()[-1]].get(make_route), slots)
    team.run(program.finish())
    team.close()
    return ids, weights


def inputs(experts, seed):
    """Logits, and a bias whose size does not decide alone."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((T, experts)) * 2).astype(np.float32), (rng.standard_normal(experts) * 0.2).astype(np.float32)


def rules(x, k, bias, groups):
    """name -> (float64 ids and weights, the same rule for the kernel)."""
    wide, b = x.astype(np.float64), bias.astype(np.float64)
    kept, limit = max(1, groups // 2), {"groups": groups, "kept": max(1, groups // 2)}
    k_grouped = min(k, kept * (x.shape[1] // groups))
    return {
        "A": (oracle.qwen3_moe(wide, k, False), {"k": k, "score": "softmax"}),
        "A renormalised": (oracle.qwen3_moe(wide, k, True), {"k": k, "score": "softmax", "normalise": True}),
        "A' with bias": (oracle.gpt_oss(wide, k, b), {"k": k, "score": "chosen_softmax", "bias": bias}),
        "B": (
            oracle.deepseek_v3(wide, k_grouped, b, groups, kept, 2.5),
            dict(k=k_grouped, score="sigmoid", choice_bias=bias, by="top2", normalise=True, eps=1e-20, scale=2.5, **limit),
        ),
        "B lfm2": (oracle.lfm2_moe(wide, k, b), {"k": k, "score": "sigmoid", "choice_bias": bias, "normalise": True, "eps": 1e-6}),
        "B capped": (
            oracle.laguna(wide, k, b, 1.5, 1.3),
            {"k": k, "score": "sigmoid", "choice_bias": bias, "normalise": True, "cap": 1.5, "scale": 1.3},
        ),
        "C": (oracle.deepseek_v2(wide, k_grouped, groups, kept, 16.0), dict(k=k_grouped, score="softmax", scale=16.0, **limit)),
        "C'": (
            oracle.mistral4(wide, k_grouped, groups, kept, 1.5),
            dict(k=k_grouped, score="softmax", by="top2", normalise=True, eps=1e-20, scale=1.5, **limit),
        ),
        "D": (oracle.gemma4(wide, k, 1 + b), {"k": k, "score": "softmax", "normalise": True, "per_expert": 1 + bias}),
        "E": (oracle.ernie4_5_moe(wide, k, b, 0.3), {"k": k, "score": "softmax", "choice_bias": bias, "normalise": True, "least": 0.3}),
        "F": (oracle.phimoe(wide, k, 0.1), {"k": k, "score": "sparsemixer", "tolerance": 0.2}),
        "G": (oracle.llama4(wide, k), {"k": k, "score": "chosen_sigmoid"}),
    }  # fmt: skip


@pytest.mark.parametrize(("experts", "k", "groups"), [(2, 1, 1), (8, 2, 4), (9, 3, 3), (16, 4, 2), (60, 4, 6), (128, 8, 8), (257, 13, 1)])
def test_every_rule_equals_float64(experts, k, groups):
    x, bias = inputs(experts, seed=experts)
    for name, ((ids, weights), rule) in rules(x, k, bias, groups).items():
        got_ids, got_weights = route(x, **rule)
        np.testing.assert_array_equal(got_ids, ids, err_msg=name)
        np.testing.assert_allclose(got_weights, weights, rtol=3e-6, atol=1e-9, err_msg=name)


def test_bits_do_not_depend_on_the_path():
    x, bias = inputs(60, seed=1)
    for name, (_, rule) in rules(x, 4, bias, 6).items():
        reference = route(x, threads=1, isa=available()[0], **rule)
        for isa in available():
            got = route(x, threads=3, isa=isa, **rule)
            np.testing.assert_array_equal(got[0], reference[0], err_msg=name)
            np.testing.assert_array_equal(got[1].view(np.uint32), reference[1].view(np.uint32), err_msg=name)


def test_equal_experts_and_groups_go_to_the_lower_index():
    x = np.zeros((1, 12), np.float32)
    for score in SCORES:
        assert route(x, 3, score)[0].tolist() == [[0, 1, 2]], score
    assert route(x, 4, "sigmoid", groups=4, kept=2, by="top2")[0].tolist() == [[0, 1, 2, 3]]
