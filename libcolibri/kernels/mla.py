"""Multi-head latent attention: all heads attend to one compressed row per position, which is key and value at once.

A row of the cache is [latent | rotary | zeros up to a multiple of 16]: the normed latent that keys and values are made from, and the part
of the key that is rotated. Rows lie position by position, float16 or float32 (the target's `format`: KV_F16, KV_F32); a head's query has
the same columns. The matrices that would expand a latent to a head's key and value are applied to the head's query and to its weighted
sum of latents instead (matrix.make_head_product): K[p] = W_k latent[p], so q . K[p] = (W_k^T q) . latent[p], and sum w[p] W_v latent[p] =
W_v (sum w[p] latent[p]). Prefill and decode do the same operations in the same order.
"""

import numpy as np

from ..simd.isa import Isa
from ..simd.registers import (
    broadcast_f32,
    count_of,
    fma,
    load_f32,
    load_f32s,
    mul,
    reduce_add,
    store_f32,
    store_f32s,
    target,
    zero_f32,
)
from ..simd.scalars import get_f32, get_i64, put_f32
from .activations import quantize_row
from .attention import KV_F32, load_kv, rotate, soften, store_kv
from .jit import inline, kernel
from .norm import normalize

ONE, MINUS_INFINITY = np.float32(1), np.float32(-np.inf)
TILE = 64  # positions whose latents (74 KB of float16) stay in a core's cache while all their columns are summed
# Heads that share a pass over the rows: as many sums as the registers take. On a Zen 3, 8 are half as fast as 4, and 2 slower by a third.
HEADS_AT_ONCE = {Isa.GENERIC: 4, Isa.AVX2: 4, Isa.AVX512_VNNI: 8}


def head_group(isa: Isa, heads: int) -> int:
    """The largest divisor of `heads` that a pass takes."""
    return max(n for n in range(1, HEADS_AT_ONCE[isa] + 1) if heads % n == 0)


@inline
def _rotary_columns(x, rotary, table, position, out):
    """The rotated columns of a row, and zeros up to a multiple of 16. table: 0 where nothing is rotated."""
    for i in range(0, rotary, 16):
        store_f32(out + i * 4, zero_f32(1))
    if table != 0:
        rotate(x, table + position * rotary * 4, rotary // 2, out)
    else:
        for i in range(rotary):
            put_f32(out + i * 4, get_f32(x + i * 4))


def make_latent_append(isa, kv_format):
    """Kernel: one row of the cache per token: RMS norm of the latent columns, RoPE of the rotary ones. Ranks share tokens.

    operands: address of the number of tokens, address of the first position, x [latent | rotary], its stride, latent columns (a multiple
    of 16), rotary columns (even), norm weight, address of epsilon, RoPE table ([position][rotary] float32: cosines, sines) or 0, address of
    the layer's state descriptor (its first word is the cache), scratch, scratch bytes per rank (at least 4 * columns of a row + 256).
    """

    @kernel
    def latent_append(operands, rank, threads):
        tokens, start = get_i64(get_i64(operands)), get_i64(get_i64(operands + 8))
        x0, stride, latent, rotary = get_i64(operands + 16), get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        weight, epsilon, table = get_i64(operands + 48), get_f32(get_i64(operands + 56)), get_i64(operands + 64)
        cache, scratch = get_i64(get_i64(operands + 72)), get_i64(operands + 80) + rank * get_i64(operands + 88)
        like = target(isa, kv_format, 1, 16)
        size = 4 if kv_format == KV_F32 else 2
        cols, row = latent + (rotary + 15) // 16 * 16, scratch + 256
        for t in range(rank, tokens, threads):
            x = x0 + t * stride
            normalize(x, latent, latent, weight, epsilon, row, scratch)
            _rotary_columns(x + latent * 4, rotary, table, start + t, row + latent * 4)
            at = cache + (start + t) * cols * size
            for i in range(0, cols, 16):
                store_kv(like, at + i * size, load_f32(row + i * 4))
        return 0

    return latent_append


def make_latent_query(isa):
    """Kernel: the rotary columns of every head's query, out[t][head][latent:] = RoPE(q[t][head][nope:]). Ranks share (token, head) units.

    operands: address of the number of tokens, address of the first position, q, q stride, heads, nope columns of a head, rotary columns,
    RoPE table or 0, out, out stride, latent columns. A head has nope + rotary columns in q, those of a cache row in out.
    """

    @kernel
    def latent_query(operands, rank, threads):
        tokens, start = get_i64(get_i64(operands)), get_i64(get_i64(operands + 8))
        q, q_stride, heads, nope = get_i64(operands + 16), get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        rotary, table, out, out_stride = get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64), get_i64(operands + 72)
        latent = get_i64(operands + 80)
        cols = latent + (rotary + 15) // 16 * 16
        for unit in range(rank, tokens * heads, threads):
            t, head = unit // heads, unit % heads
            x = q + t * q_stride + (head * (nope + rotary) + nope) * 4
            _rotary_columns(x, rotary, table, start + t, out + t * out_stride + (head * cols + latent) * 4)
        return 0

    return latent_query


def make_head_panels(isa, width):
    """Kernel: columns of every head as int8 panels, one run per head: the input of a quantised head product.

    operands: address of the number of tokens, x, x stride, heads, bytes of x between heads, columns (a multiple of 32), panels, their bytes
    between heads, scratch, scratch bytes per rank (at least 32). Ranks share (token, head) units.
    """

    @kernel
    def head_panels(operands, rank, threads):
        tokens, x, stride, heads = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        head_bytes, cols = get_i64(operands + 32), get_i64(operands + 40)
        panels, panels_bytes = get_i64(operands + 48), get_i64(operands + 56)
        scratch = get_i64(operands + 64) + rank * get_i64(operands + 72)
        for unit in range(rank, tokens * heads, threads):
            t, head = unit // heads, unit % heads
            quantize_row(x + t * stride + head * head_bytes, cols, panels + head * panels_bytes, t, tokens, width, scratch)
        return 0

    return head_panels


@inline
def _scores(like, query, head_bytes, cols, rows, count, scale, scores, row_bytes, size):
    """scores[head][p] = query[head] . row[p] * scale for p < count, then -inf up to a multiple of 16."""
    group = count_of(like)
    partial = scores + group * row_bytes
    for p in range(count):
        at, total = rows + p * cols * size, zero_f32(like)
        for i in range(0, cols, 16):
            total = fma(load_f32s(query + i * 4, head_bytes, like), load_kv(like, at + i * size), total)
        store_f32s(partial, 64, total)
        for head in range(group):
            put_f32(scores + head * row_bytes + p * 4, reduce_add(load_f32(partial + head * 64)) * scale)
    for p in range(count, (count + 15) // 16 * 16):
        for head in range(group):
            put_f32(scores + head * row_bytes + p * 4, MINUS_INFINITY)


@inline
def _values(like, weights, row_bytes, factors, latent, cols, rows, count, out, head_bytes, size):
    """out[head][i] = factor[head] * sum over p of weight[head][p] * row[p][i] for the latent columns."""
    for start in range(0, count, TILE):
        end = min(count, start + TILE)
        for i in range(0, latent, 16):
            total, at = zero_f32(like), rows + i * size
            if start != 0:
                total = load_f32s(out + i * 4, head_bytes, like)
            for p in range(start, end):
                total = fma(broadcast_f32(weights + p * 4, row_bytes, like), load_kv(like, at + p * cols * size), total)
            if end == count:
                total = mul(total, broadcast_f32(factors, 4, like))
            store_f32s(out + i * 4, head_bytes, total)


def make_latent_attention(isa, kv_format, group):
    """Kernel: causal attention in place: a head's query becomes, in its latent columns, softmax(query . rows * scale) @ latents.

    operands: address of the number of tokens, address of the first position, query, query stride, heads (a multiple of `group`), latent
    columns, columns of a row (both multiples of 16), address of the layer's state descriptor, address of the scale, scratch, scratch bytes
    per rank (at least group * (bytes between two heads' scores + 64)), bytes between two heads' scores (at least 4 * positions, rounded up
    to 16 positions). `group` heads share a pass over the rows. Ranks share (token, head group) units.
    """

    @kernel
    def latent_attention(operands, rank, threads):
        tokens, start = get_i64(get_i64(operands)), get_i64(get_i64(operands + 8))
        query, stride, heads = get_i64(operands + 16), get_i64(operands + 24), get_i64(operands + 32)
        latent, cols, rows, scale = get_i64(operands + 40), get_i64(operands + 48), get_i64(get_i64(operands + 56)), get_i64(operands + 64)
        scores, row_bytes = get_i64(operands + 72) + rank * get_i64(operands + 80), get_i64(operands + 88)
        like = target(isa, kv_format, group, 16)
        size = 4 if kv_format == KV_F32 else 2
        groups, factors = heads // group, scores + group * row_bytes
        for unit in range(rank, groups * tokens, threads):
            t, head = unit // groups, unit % groups * group
            count, at = start + t + 1, query + t * stride + head * cols * 4
            _scores(like, at, cols * 4, cols, rows, count, get_f32(scale), scores, row_bytes, size)
            for i in range(group):
                put_f32(factors + i * 4, ONE / soften(scores + i * row_bytes, (count + 15) // 16, MINUS_INFINITY))
            _values(like, scores, row_bytes, factors, latent, cols, rows, count, at, cols * 4, size)
        return 0

    return latent_attention
