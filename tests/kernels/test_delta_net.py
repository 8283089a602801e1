"""The gated delta rule and what surrounds it against float64; the same bits on every path and however a run of tokens is cut."""

import numpy as np
import pytest

from libcolibri.kernels.delta_net import make_delta_gates, make_delta_rule, make_gated_norm, make_unit_heads
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.program import Program
from libcolibri.simd.isa import Isa, available
from libcolibri.thread_team import Team

KERNELS = {isa: KernelSet(isa) for isa in available()}


def run(threads, *operations):
    """Replay (kernel, operands) pairs."""
    program = Program()
    for kernel, operands in operations:
        program.record("operation", kernel, operands)
    team = Team(threads)
    team.run(program.finish())
    team.close()


def case(tokens, heads, key_heads, dk, dv, per_channel, seed=0):
    """q, k (T, key heads, dk), v (T, heads, dv), decay (T, heads[, dk]), beta (T, heads), and a state (heads, dk, dv)."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, tokens, key_heads, dk)) / dk**0.5
    v, s = rng.standard_normal((tokens, heads, dv)), rng.standard_normal((heads, dk, dv))
    decay = rng.random((tokens, heads, dk) if per_channel else (tokens, heads)) ** 0.2
    beta = rng.random((tokens, heads))
    return [x.astype(np.float32) for x in (q, k, v, decay, beta, s)]


def laid_out(s):
    """(heads, dk, dv) as the kernel keeps it: [head][dv / 16][dk][16]."""
    heads, dk, dv = s.shape
    return s.reshape(heads, dk, dv // 16, 16).transpose(0, 2, 1, 3).copy()


def recur(isa, q, k, v, decay, beta, state, threads=1, tiled=0):
    """The kernel's out (T, heads, dv); `state` (laid out) is rewritten."""
    tokens, heads, dv = v.shape
    key_heads, dk = k.shape[1:]
    qkv = np.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], 1)
    out = np.zeros((tokens, heads * dv), np.float32)
    keys = qkv.ctypes.data + key_heads * dk * 4
    slots = [
        np.array([tokens]), qkv, keys, keys + key_heads * dk * 4, qkv.strides[0], heads, key_heads, tiled, dk, dv,
        decay, decay.strides[0], beta, beta.strides[0], out, out.strides[0], np.array([state.ctypes.data]),
    ]  # fmt: skip
    per_channel = int(decay.ndim == 3)
    run(threads, (KERNELS[isa].get(make_delta_rule, per_channel), slots))
    return out.reshape(v.shape)


def exact(q, k, v, decay, beta, s):
    """The recurrence, float64."""
    q, k, v, decay, beta, s = (x.astype(np.float64) for x in (q, k, v, decay, beta, s))
    shared, out = v.shape[1] // k.shape[1], np.zeros(v.shape)
    for t in range(len(v)):
        keys, queries = np.repeat(k[t], shared, 0), np.repeat(q[t], shared, 0)
        s = s * (decay[t][:, :, None] if decay.ndim == 3 else decay[t][:, None, None])
        correction = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", keys, s))
        s = s + keys[:, :, None] * correction[:, None, :]
        out[t] = np.einsum("hk,hkv->hv", queries, s)
    return out, s


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("per_channel", [0, 1])
@pytest.mark.parametrize("shape", [(1, 4, 2, 16, 16), (7, 3, 3, 32, 48), (37, 4, 1, 128, 128), (5, 2, 2, 20, 16)])
def test_recurrence_equals_float64(isa, per_channel, shape):
    *inputs, s = case(*shape, per_channel)
    wanted, wanted_state = exact(*inputs, s)
    state = laid_out(s)
    got = recur(isa, *inputs, state)
    np.testing.assert_allclose(got, wanted, atol=2e-6 * np.abs(wanted).max())
    np.testing.assert_allclose(state, laid_out(wanted_state), atol=2e-6 * np.abs(wanted_state).max())


def test_tiled_value_heads_take_key_heads_in_turn():
    """Heads 0..5 of 3 key heads: 0 1 2 0 1 2 when tiled, 0 0 1 1 2 2 otherwise."""
    q, k, v, decay, beta, s = case(5, 6, 3, 16, 16, 0)
    grouped = recur(Isa.GENERIC, q, k, v, decay, beta, laid_out(s))
    order = [0, 2, 4, 1, 3, 5]
    got = recur(Isa.GENERIC, q, k, *(np.ascontiguousarray(x[:, order]) for x in (v, decay, beta)), laid_out(s[order]), tiled=1)
    assert (got == grouped[:, order]).all()


@pytest.mark.parametrize("per_channel", [0, 1])
def test_recurrence_has_one_order(per_channel):
    """Instruction set, threads, one token at a time or many: one number."""
    *inputs, s = case(19, 4, 2, 64, 32, per_channel, seed=1)
    state = laid_out(s)
    reference = recur(Isa.GENERIC, *inputs, state)
    for isa in available():
        for threads, cuts in ((1, [19]), (3, [1] * 19), (2, [5, 13, 1])):
            again, at, done = laid_out(s), 0, []
            for n in cuts:
                done.append(recur(isa, *(x[at : at + n].copy() for x in inputs), again, threads))
                at += n
            assert (np.concatenate(done).view(np.uint32) == reference.view(np.uint32)).all(), (isa.name, threads)
            assert (again.view(np.uint32) == state.view(np.uint32)).all(), (isa.name, threads)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("threads", [1, 3])
def test_unit_heads(isa, threads):
    x = np.random.default_rng(2).standard_normal((5, 7 * 32)).astype(np.float32)
    x[1, :32] = 0
    heads = x.reshape(5, 7, 32).astype(np.float64)
    wanted = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-6) * 32**-0.5
    kernel = KERNELS[isa].get(make_unit_heads)
    run(threads, (kernel, [np.array([5]), x, x.strides[0], 7, 32, np.array([32**-0.5], np.float32)]))
    np.testing.assert_allclose(x.reshape(wanted.shape), wanted, atol=1e-6)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("threads", [1, 3])
def test_gates(isa, threads):
    rng = np.random.default_rng(3)
    a, dt_bias = -np.exp(rng.standard_normal(48)).astype(np.float32), rng.standard_normal(48).astype(np.float32)
    decay, beta = (4 * rng.standard_normal((3, 48))).astype(np.float32), rng.standard_normal((3, 16)).astype(np.float32)
    wanted = np.exp(a.astype(np.float64) * np.log1p(np.exp(decay.astype(np.float64) + dt_bias)))
    wanted_beta = 1 / (1 + np.exp(-beta.astype(np.float64)))
    slots = [np.array([3]), decay, decay.strides[0], 48, a, dt_bias, beta, beta.strides[0], 16]
    run(threads, (KERNELS[isa].get(make_delta_gates), slots))
    np.testing.assert_allclose(decay, wanted, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(beta, wanted_beta, rtol=1e-6)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("plain", [0, 1])
def test_gated_norm(isa, plain):
    rng = np.random.default_rng(4)
    x, gate = rng.standard_normal((2, 3, 5 * 48)).astype(np.float32)
    weight, scratch = rng.standard_normal(48).astype(np.float32), np.zeros(2 * 256, np.uint8)
    heads, z = x.reshape(3, 5, 48).astype(np.float64), gate.reshape(3, 5, 48).astype(np.float64)
    wanted = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-3) * weight / (1 + np.exp(-z)) * (1 if plain else z)
    slots = [np.array([3]), x, x.strides[0], 5, 48, weight, np.array([1e-3], np.float32), gate, gate.strides[0], scratch, 256]
    run(2, (KERNELS[isa].get(make_gated_norm, plain), slots))
    np.testing.assert_allclose(x.reshape(wanted.shape), wanted, rtol=2e-6, atol=2e-6)
