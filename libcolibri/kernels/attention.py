"""Rotary embedding, the KV cache, and grouped-query attention over it.

The K cache of a KV head lies in blocks of 16 positions with the position fastest: [position / 16][head_dim][16], so that the scores
of 16 positions fill a vector and nothing is summed across lanes. V lies position by position: [position][head_dim]. A cache may hold
fewer positions than the context, a multiple of 16: then it is a ring, and layers that see only the latest positions need no more.
Elements are float16 or float32 (the target's `format`: KV_F16, KV_F32).
"""

import numpy as np
from numba.extending import overload

from ..simd.registers import (
    add,
    broadcast_f32,
    count_of,
    div,
    fma,
    fnma,
    keep_from,
    keep_lanes,
    load_f16_like,
    load_f32,
    load_f32_like,
    maximum,
    mul,
    reduce_add,
    reduce_max,
    select_greater,
    splat,
    store_f16,
    store_f32,
    store_f32s,
    sub,
    target,
    zero_f32,
)
from ..simd.scalars import fma_scalar, get_f32, get_i64, put_f16, put_f32
from .jit import inline, kernel
from .mathlib import exp, sigmoid, softplus, tanh
from .norm import normalize

KV_F32, KV_F16 = 0, 1
ONE, ZERO, MINUS_INFINITY, LOWEST_SCORE = np.float32(1), np.float32(0), np.float32(-np.inf), np.float32(-3e38)


def load_kv(like, place):
    """16 cache elements as float32."""
    raise TypeError("load_kv exists in compiled kernels only")


@overload(load_kv, jit_options={"forceinline": True})
def _load_kv(like, place):
    if like.format == KV_F16:
        return lambda like, place: load_f16_like(like, place)
    return lambda like, place: load_f32_like(like, place)


def put_kv(like, place, value):
    """One float32 into the cache."""
    raise TypeError("put_kv exists in compiled kernels only")


@overload(put_kv, jit_options={"forceinline": True})
def _put_kv(like, place, value):
    if like.format == KV_F16:
        return lambda like, place, value: put_f16(place, value)
    return lambda like, place, value: put_f32(place, value)


def store_kv(like, place, value):
    """16 float32 into the cache."""
    raise TypeError("store_kv exists in compiled kernels only")


@overload(store_kv, jit_options={"forceinline": True})
def _store_kv(like, place, value):
    if like.format == KV_F16:
        return lambda like, place, value: store_f16(place, value)
    return lambda like, place, value: store_f32(place, value)


@inline
def _cache_of(descriptor):
    """K, V, bytes per KV head of K, of V, and the capacity in positions (models/state.py); position p lies at p % capacity."""
    return (
        get_i64(descriptor), get_i64(descriptor + 8), get_i64(descriptor + 16), get_i64(descriptor + 24), get_i64(descriptor + 32)
    )  # fmt: skip


@inline
def rotate(x, angles, half, out):
    """RoPE of one head, pairs (i, i + half): out = (a cos - b sin, b cos + a sin). angles: `half` cosines, `half` sines."""
    done = half // 16 * 16
    for i in range(0, done, 16):
        a, b = load_f32(x + i * 4), load_f32(x + (half + i) * 4)
        c, s = load_f32(angles + i * 4), load_f32(angles + (half + i) * 4)
        store_f32(out + i * 4, fnma(b, s, mul(a, c)))
        store_f32(out + (half + i) * 4, fma(a, s, mul(b, c)))
    for i in range(done, half):
        a1, b1 = get_f32(x + i * 4), get_f32(x + (half + i) * 4)
        c1, s1 = get_f32(angles + i * 4), get_f32(angles + (half + i) * 4)
        put_f32(out + i * 4, fma_scalar(-b1, s1, a1 * c1))
        put_f32(out + (half + i) * 4, fma_scalar(a1, s1, b1 * c1))


@inline
def _prepare_head(x, cols, norm, norm_last, epsilon, angles, rotary, out, scratch):
    """Norm where there is a weight, before RoPE or last; RoPE of the first `rotary` columns where there are angles; `out` may be `x`.

    scratch: 256 bytes, then `cols` float32. A norm needs a multiple of 16 columns.
    """
    source = x
    if norm != 0 and norm_last == 0:
        source = scratch + 256
        normalize(x, cols, cols, norm, epsilon, source, scratch)
    turned = 0
    if angles != 0:
        turned = rotary
        rotate(source, angles, rotary // 2, out)
    if source != out:
        for i in range(turned, cols):
            put_f32(out + i * 4, get_f32(source + i * 4))
    if norm != 0 and norm_last != 0:
        normalize(out, cols, cols, norm, epsilon, out, scratch)


@inline
def _multiply(x, cols, factor):
    for i in range(cols):
        put_f32(x + i * 4, get_f32(x + i * 4) * factor)


@inline
def _append_key(like, x, cols, keys, place, size):
    """One key to its lane of a block of 16 positions."""
    at = keys + (place // 16 * cols * 16 + place % 16) * size
    for i in range(cols):
        put_kv(like, at + i * 16 * size, get_f32(x + i * 4))


@inline
def _append_value(like, x, cols, norm, epsilon, factor, values, place, size, scratch):
    source = x
    if norm != 0:
        source = scratch + 256
        normalize(x, cols, cols, norm, epsilon, source, scratch)
    at = values + place * cols * size
    for i in range(cols // 16):
        store_kv(like, at + i * 16 * size, mul(load_f32(source + i * 64), splat(factor)))


def make_rope_append(isa, kv_format):
    """Kernel: norms and RoPE of q in place and of k; k and v into the cache. Ranks share (token, head) units.

    operands: address of the number of tokens, address of the first position, q, q stride, bytes between two heads of q, heads, k, its
    stride, v, its stride, KV heads (0: nothing is appended), columns of a head of q and k (a multiple of 8), of v (of 16), RoPE table
    ([position][rotary] float32: cosines, sines) or 0, rotary columns, norm weights of q, k, v, each 0 for no norm (norms need heads of a
    multiple of 16 columns), 1 for norms of q and k after RoPE, address of epsilon, float32 factors of q by position or 0, address of the
    factor of v, address of the layer's state descriptor, scratch, scratch bytes per rank (at least 8 * columns + 512).
    """

    @kernel
    def rope_append(operands, rank, threads):
        tokens, start = get_i64(get_i64(operands)), get_i64(get_i64(operands + 8))
        q, q_stride, q_head, heads = get_i64(operands + 16), get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        k, k_stride, v, v_stride = get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64), get_i64(operands + 72)
        kv_heads, k_cols, v_cols = get_i64(operands + 80), get_i64(operands + 88), get_i64(operands + 96)
        table, rotary = get_i64(operands + 104), get_i64(operands + 112)
        q_norm, k_norm, v_norm = get_i64(operands + 120), get_i64(operands + 128), get_i64(operands + 136)
        norm_last, epsilon = get_i64(operands + 144), get_f32(get_i64(operands + 152))
        q_factors, v_factor = get_i64(operands + 160), get_f32(get_i64(operands + 168))
        k_cache, v_cache, k_head, v_head, capacity = _cache_of(get_i64(operands + 176))
        scratch = get_i64(operands + 184) + rank * get_i64(operands + 192)
        like = target(isa, kv_format, 1, 16)
        size = 4 if kv_format == KV_F32 else 2
        units = heads + kv_heads
        prepared = scratch + 256 + k_cols * 4
        for unit in range(rank, tokens * units, threads):
            t, head = unit // units, unit % units
            position = start + t
            angles = table
            if table != 0:
                angles = table + position * rotary * 4
            if head < heads:
                at = q + t * q_stride + head * q_head
                _prepare_head(at, k_cols, q_norm, norm_last, epsilon, angles, rotary, at, scratch)
                if q_factors != 0:
                    _multiply(at, k_cols, get_f32(q_factors + position * 4))
                continue
            head, place = head - heads, position % capacity
            source = k + t * k_stride + head * k_cols * 4
            _prepare_head(source, k_cols, k_norm, norm_last, epsilon, angles, rotary, prepared, scratch)
            _append_key(like, prepared, k_cols, k_cache + head * k_head, place, size)
            source, values = v + t * v_stride + head * v_cols * 4, v_cache + head * v_head
            _append_value(like, source, v_cols, v_norm, epsilon, v_factor, values, place, size, scratch)
        return 0

    return rope_append


@inline
def _scores(like, q, q_head, cols, keys, ring, first, count, scale, cap, scores, row_bytes, size):
    """scores[head][p - first / 16 * 16] = q . k[p] * scale for positions of all blocks from first's; outside [first, count): -inf.

    ring: blocks of the cache; cap: scores become cap * tanh(score / cap) where it is not 0.
    """
    group = count_of(like)
    start = first // 16
    for block in range(start, (count + 15) // 16):
        at = keys + block % ring * cols * 16 * size
        total = zero_f32(like)
        for i in range(cols):
            total = fma(broadcast_f32(q + i * 4, q_head, like), load_kv(like, at + i * 16 * size), total)
        total = mul(total, splat(scale))
        if cap != ZERO:
            total = mul(splat(cap), tanh(div(total, splat(cap))))
        place = scores + (block - start) * 64
        store_f32s(place, row_bytes, total)
        if count - block * 16 < 16 or first > block * 16:
            for head in range(group):
                valid = keep_lanes(load_f32(place + head * row_bytes), count - block * 16, MINUS_INFINITY)
                store_f32(place + head * row_bytes, keep_from(valid, first - block * 16, MINUS_INFINITY))


@inline
def soften(scores, blocks, sink):
    """Scores of one head become weights exp(s - max); returns their sum. Lanes add in position order, then by one fixed tree.

    sink: a score that takes part without a value; -inf for none.
    """
    peaks = load_f32(scores)
    for block in range(1, blocks):
        peaks = maximum(peaks, load_f32(scores + block * 64))
    peak, total = splat(max(reduce_max(peaks), sink)), zero_f32(1)
    if sink > LOWEST_SCORE:
        total = keep_lanes(exp(sub(splat(sink), peak)), 1, ZERO)
    for block in range(blocks):
        score = load_f32(scores + block * 64)
        weight = exp(sub(score, peak))
        if block == 0 or block == blocks - 1:  # masked scores: exp of our clamped argument is 1e-38, not 0
            weight = select_greater(score, splat(LOWEST_SCORE), weight, zero_f32(1))
        store_f32(scores + block * 64, weight)
        total = add(total, weight)
    return reduce_add(total)


@inline
def _weighted_sum(like, total, weights, row_bytes, values, step, n):
    """total + sum of weight * value over n positions, in their order; 16 columns."""
    for p in range(n):
        total = fma(broadcast_f32(weights + p * 4, row_bytes, like), load_kv(like, values + p * step), total)
    return total


@inline
def _add_values(like, cols, values, capacity, first, count, weights, row_bytes, inverses, out, size):
    """out[head] = sum of weights[head] * V over positions first .. count - 1, times inverses[head].

    The positions lie in the ring in one run or in two, the second from its beginning.
    """
    place, before = first % capacity, count - first
    after = max(0, place + before - capacity)
    before -= after
    for i in range(cols // 16):
        at, step = values + i * 16 * size, cols * size
        total = _weighted_sum(like, zero_f32(like), weights, row_bytes, at + place * step, step, before)
        total = _weighted_sum(like, total, weights + before * 4, row_bytes, at, step, after)
        store_f32s(out + i * 64, cols * 4, mul(total, broadcast_f32(inverses, 4, like)))


def make_attention(isa, kv_format, group):
    """Kernel: causal attention of every token over the cache; `group` query heads (of one KV head) share a pass over K and V.

    operands: address of the number of tokens, address of the first position, q, q stride, bytes between two heads of q, heads, KV heads,
    columns of a head of q and k, of v (a multiple of 16), address of the layer's state descriptor, address of the scale, address of the
    cap of scores (0.0: none), sinks (float32 by head) or 0, window or 0, chunk or 0, out, out stride, scratch, scratch bytes per rank (at
    least group * (4 * positions rounded up to 16) + 64), bytes between two heads' scores in it. Ranks share (head group, token) units.
    out[t] = softmax(q . K * scale) @ V over the positions up to p that token position p sees: all; with a window, p - window + 1 and
    later; with a chunk, those from the last multiple of chunk. A sink is one more score in the softmax whose value is 0.
    """

    @kernel
    def attention(operands, rank, threads):
        tokens, start = get_i64(get_i64(operands)), get_i64(get_i64(operands + 8))
        q, q_stride, q_head = get_i64(operands + 16), get_i64(operands + 24), get_i64(operands + 32)
        heads, kv_heads, k_cols, v_cols = get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64)
        k_cache, v_cache, k_head, v_head, capacity = _cache_of(get_i64(operands + 72))
        scale, cap, sinks = get_f32(get_i64(operands + 80)), get_f32(get_i64(operands + 88)), get_i64(operands + 96)
        window, chunk, out, out_stride = (
            get_i64(operands + 104), get_i64(operands + 112), get_i64(operands + 120), get_i64(operands + 128)
        )  # fmt: skip
        scores, row_bytes = get_i64(operands + 136) + rank * get_i64(operands + 144), get_i64(operands + 152)
        like = target(isa, kv_format, group, 16)
        size = 4 if kv_format == KV_F32 else 2
        groups, inverses = heads // group, scores + group * row_bytes
        for unit in range(rank, groups * tokens, threads):
            t, head = unit // groups, unit % groups * group
            count = start + t + 1
            first = 0
            if window != 0:
                first = max(0, count - window)
            if chunk != 0:
                first = max(first, (count - 1) // chunk * chunk)
            kv = head * kv_heads // heads
            at, ring = q + t * q_stride + head * q_head, capacity // 16
            _scores(like, at, q_head, k_cols, k_cache + kv * k_head, ring, first, count, scale, cap, scores, row_bytes, size)
            blocks = (count + 15) // 16 - first // 16
            for h in range(group):
                sink = MINUS_INFINITY
                if sinks != 0:
                    sink = get_f32(sinks + (head + h) * 4)
                put_f32(inverses + h * 4, ONE / soften(scores + h * row_bytes, blocks, sink))
            place, weights = out + t * out_stride + head * v_cols * 4, scores + first % 16 * 4
            _add_values(like, v_cols, v_cache + kv * v_head, capacity, first, count, weights, row_bytes, inverses, place, size)
        return 0

    return attention


SIGMOID, SOFTPLUS = 0, 1
GATES = {"sigmoid": SIGMOID, "softplus": SOFTPLUS}


def make_gate(isa):
    """Kernel: x[t, head] *= sigmoid or softplus of its gate; ranks share (token, head) units.

    operands: address of the number of tokens, x, x stride, heads, columns of a head (a multiple of 16), gates of the first head, their
    stride, bytes between two heads' gates, 1 where a head has one gate for all its columns, SIGMOID or SOFTPLUS.
    """

    @kernel
    def gate(operands, rank, threads):
        tokens, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        heads, cols, gates, gate_stride = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        gate_head, single, function = get_i64(operands + 56), get_i64(operands + 64), get_i64(operands + 72)
        for unit in range(rank, tokens * heads, threads):
            t, head = unit // heads, unit % heads
            x, opening = x0 + t * stride + head * cols * 4, gates + t * gate_stride + head * gate_head
            for i in range(cols // 16):
                g = splat(get_f32(opening)) if single != 0 else load_f32(opening + i * 64)
                g = sigmoid(g) if function == SIGMOID else softplus(g)
                store_f32(x + i * 64, mul(load_f32(x + i * 64), g))
        return 0

    return gate
