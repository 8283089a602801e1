"""Rotary embedding, the KV cache, and grouped-query attention over it.

The K cache of a KV head lies in blocks of 16 positions with the position fastest: [position / 16][head_dim][16], so that the scores
of 16 positions fill a vector and nothing is summed across lanes. V lies position by position: [position][head_dim].
Elements are float16 or float32 (the target's `format`: KV_F16, KV_F32).
"""

import numpy as np
from numba.extending import overload

from ..simd.registers import (
    add,
    broadcast_f32,
    count_of,
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
from .mathlib import exp
from .norm import normalize

KV_F32, KV_F16 = 0, 1
ONE, MINUS_INFINITY, LOWEST_SCORE = np.float32(1), np.float32(-np.inf), np.float32(-3e38)


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
    """K, V, bytes per KV head of K, of V."""
    return get_i64(descriptor), get_i64(descriptor + 8), get_i64(descriptor + 16), get_i64(descriptor + 24)


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
def _prepare_head(x, head_dim, weight, epsilon, angles, out, scratch):
    """Norm of one head where it has a weight, then RoPE; `out` may be `x`."""
    source = x
    if weight != 0:
        source = scratch + 256
        normalize(x, head_dim, head_dim, weight, epsilon, source, scratch)
    rotate(source, angles, head_dim // 2, out)


def make_rope_append(isa, kv_format):
    """Kernel: norm (where a head has one) and RoPE of q in place and of k; k and v into the cache. Ranks share (token, head) units.

    operands: address of the number of tokens, address of the first position, q, q stride, heads, k, v, their stride, KV heads, head_dim,
    RoPE table ([position][head_dim] float32: cosines, sines), q norm weight or 0, k norm weight or 0, address of epsilon, address of the
    layer's cache descriptor (K, V, bytes per KV head of K, of V), scratch, scratch bytes per rank (at least 8 * head_dim + 512).
    """

    @kernel
    def rope_append(operands, rank, threads):
        tokens, start = get_i64(get_i64(operands)), get_i64(get_i64(operands + 8))
        q, q_stride = get_i64(operands + 16), get_i64(operands + 24)
        heads, k, v, kv_stride = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56)
        kv_heads, head_dim, table = get_i64(operands + 64), get_i64(operands + 72), get_i64(operands + 80)
        q_norm, k_norm, epsilon = get_i64(operands + 88), get_i64(operands + 96), get_f32(get_i64(operands + 104))
        k_cache, v_cache, k_head, v_head = _cache_of(get_i64(operands + 112))
        scratch = get_i64(operands + 120) + rank * get_i64(operands + 128)
        like = target(isa, kv_format, 1, 16)
        size = 4 if kv_format == KV_F32 else 2
        units = heads + kv_heads
        rotated = scratch + 256 + head_dim * 4
        for unit in range(rank, tokens * units, threads):
            t, head = unit // units, unit % units
            position = start + t
            angles = table + position * head_dim * 4
            if head < heads:
                at = q + t * q_stride + head * head_dim * 4
                _prepare_head(at, head_dim, q_norm, epsilon, angles, at, scratch)
                continue
            head -= heads
            _prepare_head(k + t * kv_stride + head * head_dim * 4, head_dim, k_norm, epsilon, angles, rotated, scratch)
            at = k_cache + head * k_head + ((position // 16) * head_dim * 16 + position % 16) * size
            for i in range(head_dim):
                put_kv(like, at + i * 16 * size, get_f32(rotated + i * 4))
            source, at = v + t * kv_stride + head * head_dim * 4, v_cache + head * v_head + position * head_dim * size
            for i in range(head_dim // 16):
                store_kv(like, at + i * 16 * size, load_f32(source + i * 64))
        return 0

    return rope_append


@inline
def _scores(like, q, head_dim, keys, first, count, scale, scores, row_bytes, size):
    """scores[head][p - first / 16 * 16] = q . k[p] * scale for positions of all blocks from first's; outside [first, count): -inf."""
    group = count_of(like)
    start = first // 16
    for block in range(start, (count + 15) // 16):
        at = keys + block * head_dim * 16 * size
        total = zero_f32(like)
        for i in range(head_dim):
            total = fma(broadcast_f32(q + i * 4, head_dim * 4, like), load_kv(like, at + i * 16 * size), total)
        place = scores + (block - start) * 64
        store_f32s(place, row_bytes, mul(total, splat(scale)))
        if count - block * 16 < 16 or first > block * 16:
            for head in range(group):
                valid = keep_lanes(load_f32(place + head * row_bytes), count - block * 16, MINUS_INFINITY)
                store_f32(place + head * row_bytes, keep_from(valid, first - block * 16, MINUS_INFINITY))


@inline
def _soften(scores, blocks):
    """Scores of one head become weights exp(s - max); returns their sum. Lanes add in position order, then by one fixed tree."""
    peaks = load_f32(scores)
    for block in range(1, blocks):
        peaks = maximum(peaks, load_f32(scores + block * 64))
    peak, total = splat(reduce_max(peaks)), zero_f32(1)
    for block in range(blocks):
        score = load_f32(scores + block * 64)
        weight = exp(sub(score, peak))
        if block == 0 or block == blocks - 1:  # masked scores: exp of our clamped argument is 1e-38, not 0
            weight = select_greater(score, splat(LOWEST_SCORE), weight, zero_f32(1))
        store_f32(scores + block * 64, weight)
        total = add(total, weight)
    return reduce_add(total)


@inline
def _attend(like, q, head_dim, keys, values, first, count, scale, out, scores, row_bytes, size):
    """The query heads of one bundle over positions first .. count - 1 of their KV head."""
    group, start = count_of(like), first // 16
    blocks = (count + 15) // 16 - start
    _scores(like, q, head_dim, keys, first, count, scale, scores, row_bytes, size)
    totals = scores + group * row_bytes
    for head in range(group):
        put_f32(totals + head * 4, ONE / _soften(scores + head * row_bytes, blocks))
    for i in range(head_dim // 16):
        total = zero_f32(like)
        at = values + i * 16 * size
        for p in range(first, count):
            weight = broadcast_f32(scores + (p - start * 16) * 4, row_bytes, like)
            total = fma(weight, load_kv(like, at + p * head_dim * size), total)
        store_f32s(out + i * 64, head_dim * 4, mul(total, broadcast_f32(totals, 4, like)))


def make_attention(isa, kv_format, group):
    """Kernel: causal attention of every token over the cache; `group` query heads (of one KV head) share a pass over K and V.

    operands: address of the number of tokens, address of the first position, q, q stride, heads, KV heads, head_dim, address of the layer's
    cache descriptor (K, V, bytes per KV head of K, of V), address of the scale, window (0: none), out, out stride, scratch, scratch bytes
    per rank (at least group * (4 * positions rounded up to 16) + 64), bytes between two heads' scores in it. Ranks share (head group,
    token) units.
    out[t] = softmax(q . K * scale) @ V over positions max(0, p - window + 1) .. p of token position p.
    """

    @kernel
    def attention(operands, rank, threads):
        tokens, start = get_i64(get_i64(operands)), get_i64(get_i64(operands + 8))
        q, q_stride = get_i64(operands + 16), get_i64(operands + 24)
        heads, kv_heads, head_dim = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        k_cache, v_cache, k_head, v_head = _cache_of(get_i64(operands + 56))
        scale, window = get_f32(get_i64(operands + 64)), get_i64(operands + 72)
        out, out_stride = get_i64(operands + 80), get_i64(operands + 88)
        scores, row_bytes = get_i64(operands + 96) + rank * get_i64(operands + 104), get_i64(operands + 112)
        like = target(isa, kv_format, group, 16)
        size = 4 if kv_format == KV_F32 else 2
        groups = heads // group
        for unit in range(rank, groups * tokens, threads):
            t, head = unit // groups, unit % groups * group
            count = start + t + 1
            first = 0
            if window != 0:
                first = max(0, count - window)
            kv = head * kv_heads // heads
            at = t * q_stride + head * head_dim * 4
            keys, values = k_cache + kv * k_head, v_cache + kv * v_head
            place = out + t * out_stride + head * head_dim * 4
            _attend(like, q + at, head_dim, keys, values, first, count, scale, place, scores, row_bytes, size)
        return 0

    return attention
