"""The gated delta rule: linear attention whose state is corrected towards each value before it is read (Gated DeltaNet, Kimi's KDA).

For every value head, with keys and queries of unit length, the state S (dk, dv) of float32 goes from token to token:
    S = decay * S ;  S += k (beta * (v - k S))^T ;  out = q S
decay is one number per head (Gated DeltaNet) or one per key channel (KDA). Tokens are taken one by one in prefill as in decode: the
same numbers in the same order. Columns of S never meet, so a unit of work is 16 columns of a head, whose part of S stays in the
first-level cache for all tokens of a run.

In memory S lies as [head][dv / 16][dk][16].
"""

import numpy as np

from ..simd.registers import (
    add,
    add_registers,
    broadcast_f32,
    fma,
    load_f32,
    load_f32s,
    mul,
    reduce_add,
    splat,
    store_f32,
    store_f32s,
    sub,
    target,
    zero_f32,
)
from ..simd.scalars import get_f32, get_i64
from .jit import inline, kernel
from .mathlib import exp, sigmoid, silu, softplus
from .norm import normalize, sum_of_squares

EPSILON = np.float32(1e-6)  # of the unit length; not a setting of any model
ROWS = 2  # rows of S that are summed side by side; with more, AVX2 runs out of registers


def make_unit_heads(isa):
    """Kernel: x = scale * x / sqrt(sum of x^2 + 1e-6) of every head in place; ranks share heads.

    operands: address of the number of tokens, x, stride, heads, head_dim (a multiple of 16), address of the scale.
    """

    @kernel
    def unit_heads(operands, rank, threads):
        tokens, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        heads, head_dim, scale = get_i64(operands + 24), get_i64(operands + 32), get_f32(get_i64(operands + 40))
        for unit in range(rank, tokens * heads, threads):
            x = x0 + unit // heads * stride + unit % heads * head_dim * 4
            squares, rest = sum_of_squares(x, head_dim)
            inverse = splat(scale / np.sqrt(reduce_add(add(add_registers(squares), rest)) + EPSILON))
            for i in range(head_dim // 16):
                store_f32(x + i * 64, mul(load_f32(x + i * 64), inverse))
        return 0

    return unit_heads


def make_delta_gates(isa):
    """Kernel, in place: decay = exp(a * softplus(decay + dt_bias)), beta = sigmoid(beta); ranks share vectors.

    operands: address of the number of tokens, decay rows, stride, columns padded to 16, a (negative), dt_bias (both padded), beta rows,
    stride, columns padded to 16.
    """

    @kernel
    def delta_gates(operands, rank, threads):
        tokens, decay, decay_stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        decays, a, dt_bias = get_i64(operands + 24) // 16, get_i64(operands + 32), get_i64(operands + 40)
        beta, beta_stride, betas = get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64) // 16
        vectors = decays + betas
        for unit in range(rank, tokens * vectors, threads):
            t, i = unit // vectors, unit % vectors
            if i < decays:
                at = decay + t * decay_stride + i * 64
                step = softplus(add(load_f32(at), load_f32(dt_bias + i * 64)))
                store_f32(at, exp(mul(load_f32(a + i * 64), step)))
            else:
                at = beta + t * beta_stride + (i - decays) * 64
                store_f32(at, sigmoid(load_f32(at)))
        return 0

    return delta_gates


@inline
def _recall(like, per_channel, s, dk, k, decay):
    """k (decay * S) of one vector of columns."""
    total = zero_f32(like)
    for i in range(0, dk, ROWS):
        old = load_f32s(s + i * 64, 64, like)
        if per_channel:
            old = mul(old, broadcast_f32(decay + i * 4, 4, like))
        total = fma(broadcast_f32(k + i * 4, 4, like), old, total)
    recalled = add_registers(total)
    if per_channel:
        return recalled
    return mul(recalled, splat(get_f32(decay)))


@inline
def _correct(like, per_channel, s, dk, q, k, decay, correction):
    """S = decay * S + k correction^T of one vector of columns; returns q S."""
    total, step = zero_f32(like), 4 if per_channel else 0
    for i in range(0, dk, ROWS):
        old = mul(load_f32s(s + i * 64, 64, like), broadcast_f32(decay + i * step, step, like))
        new = fma(broadcast_f32(k + i * 4, 4, like), correction, old)
        store_f32s(s + i * 64, 64, new)
        total = fma(broadcast_f32(q + i * 4, 4, like), new, total)
    return add_registers(total)


def make_delta_rule(isa, per_channel):
    """Kernel: the recurrence of the module's head for every value head; per_channel: decay rows are (heads, dk), else (heads).

    operands: address of the number of tokens, q, k, v, their stride, value heads, key heads, 1 where value heads are tiled, dk (even), dv
    (a multiple of 16), decay rows, stride, beta rows, stride, out, out stride, address of the address of the state. Ranks share (value
    head, 16 columns) units.
    Of r = value heads / key heads, r neighbours share a key head; tiled: value heads 0, 1, 2 ... take key heads in turn, r times over.
    """

    @kernel
    def delta_rule(operands, rank, threads):
        tokens, q0, k0, v0 = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        stride, heads, key_heads = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        tiled, dk, dv, decay0 = get_i64(operands + 56), get_i64(operands + 64), get_i64(operands + 72), get_i64(operands + 80)
        decay_stride, beta0, beta_stride = get_i64(operands + 88), get_i64(operands + 96), get_i64(operands + 104)
        out0, out_stride, state = get_i64(operands + 112), get_i64(operands + 120), get_i64(get_i64(operands + 128))
        blocks = dv // 16
        like = target(isa, 0, ROWS, 16)
        for unit in range(rank, heads * blocks, threads):
            head, block = unit // blocks, unit % blocks
            key = (head % key_heads if tiled else head * key_heads // heads) * dk * 4
            decay_at = head * dk * 4 if per_channel else head * 4
            s, at = state + unit * dk * 64, (head * dv + block * 16) * 4
            for t in range(tokens):
                q, k, decay = q0 + t * stride + key, k0 + t * stride + key, decay0 + t * decay_stride + decay_at
                beta = splat(get_f32(beta0 + t * beta_stride + head * 4))
                correction = mul(beta, sub(load_f32(v0 + t * stride + at), _recall(like, per_channel, s, dk, k, decay)))
                store_f32(out0 + t * out_stride + at, _correct(like, per_channel, s, dk, q, k, decay, correction))
        return 0

    return delta_rule


def make_gated_norm(isa, plain):
    """Kernel: x = x / rms(x) * weight * silu(gate) of every head in place (plain: sigmoid(gate)); ranks share heads.

    operands: address of the number of tokens, x, stride, heads, head_dim (a multiple of 16), weight, address of epsilon, gate, its stride,
    scratch, scratch bytes per rank (at least 256).
    """

    @kernel
    def gated_norm(operands, rank, threads):
        tokens, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        heads, head_dim, weight = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        epsilon, gate0, gate_stride = get_f32(get_i64(operands + 48)), get_i64(operands + 56), get_i64(operands + 64)
        scratch = get_i64(operands + 72) + rank * get_i64(operands + 80)
        for unit in range(rank, tokens * heads, threads):
            t, at = unit // heads, unit % heads * head_dim * 4
            x, gate = x0 + t * stride + at, gate0 + t * gate_stride + at
            normalize(x, head_dim, head_dim, weight, epsilon, x, scratch)
            for i in range(head_dim // 16):
                opened = load_f32(gate + i * 64)
                opened = sigmoid(opened) if plain else silu(opened)
                store_f32(x + i * 64, mul(load_f32(x + i * 64), opened))
        return 0

    return gated_norm
