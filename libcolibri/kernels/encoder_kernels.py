"""What a BERT layer needs beside its matrix products: LayerNorm, GELU, attention over whole texts, pooling.

Tokens of several texts lie one behind the other without padding (a ragged batch); text i has the tokens starts[i] to
starts[i + 1] - 1. Every number of a text is computed from that text alone, in an order that depends on its length only, so
neither the other texts nor the number of threads change a bit. Rows are float32 and a multiple of 16 columns wide.
"""

import numpy as np

from ..simd.registers import (
    absolute,
    add,
    broadcast_f32,
    count_of,
    div,
    fma,
    keep_lanes,
    load_f32,
    maximum,
    mul,
    reduce_add,
    reduce_max,
    select_greater,
    splat,
    store_f32,
    store_f32s,
    sub,
    target,
    zero_f32,
)
from ..simd.scalars import get_f32, get_i64, put_f32
from .activations import quantize_row
from .dots import F32
from .jit import inline, kernel
from .mathlib import exp
from .matrix import share
from .norm import layer_normalize

_f = np.float32
ZERO, HALF, ONE, MINUS_INFINITY = _f(0), _f(0.5), _f(1), _f(-np.inf)
QUERIES = 4  # queries that share every load of a key or value: eight 256-bit accumulators

# 0.5 * |x| * erf(|x| / sqrt(2)) = u * P(u) / Q(u) with u = x^2: a minimax fit on |x| < 5.5 (error 4e-7), made by Lawson's
# iteration on the linearised problem. Beyond, gelu(x) and max(x, 0) differ by less than 1.1e-7.
GELU_CUT = _f(5.5 * 5.5)
P0, P1, P2, P3, P4 = (
    _f(c) for c in (0.39894111218115236, 0.0684343361294048, 0.006879602102324192, 0.0005292009950518602, 9.495979998302072e-06)
)
Q1, Q2, Q3, Q4, Q5 = (
    _f(c) for c in (0.33818194606272967, 0.048650284733455576, 0.00392440852636618, 0.00019259154273122242, 7.645218325481209e-07)
)


@inline
def gelu(x):
    """0.5 * x * (1 + erf(x / sqrt(2))), absolute error below 1.5e-6 on |x| <= 8."""
    u = mul(x, x)
    p = fma(fma(fma(fma(splat(P4), u, splat(P3)), u, splat(P2)), u, splat(P1)), u, splat(P0))
    q = fma(fma(fma(fma(fma(splat(Q5), u, splat(Q4)), u, splat(Q3)), u, splat(Q2)), u, splat(Q1)), u, splat(ONE))
    half = mul(x, splat(HALF))
    return select_greater(u, splat(GELU_CUT), add(half, absolute(half)), fma(u, div(p, q), half))


def make_gelu(isa, width):
    """Kernel: x = gelu(x) in place, and its int8 panels.

    operands: address of the number of tokens, x, x stride, columns, panels (`width` tokens wide) or 0, scratch, scratch bytes per rank.
    """

    @kernel
    def gelu_quantize(operands, rank, threads):
        tokens, x0, stride, cols = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        panels, scratch = get_i64(operands + 32), get_i64(operands + 40) + rank * get_i64(operands + 48)
        first, last = share(tokens, rank, threads)
        for t in range(first, last):
            x = x0 + t * stride
            for i in range(cols // 16):
                store_f32(x + i * 64, gelu(load_f32(x + i * 64)))
            if panels != 0:
                quantize_row(x, cols, panels, t, tokens, width, scratch)
        return 0

    return gelu_quantize


def make_quantize(isa, width):
    """Kernel: the int8 panels of float32 rows.

    operands: address of the number of tokens, x, x stride, columns, panels (`width` tokens wide), scratch, scratch bytes per rank.
    """

    @kernel
    def quantize(operands, rank, threads):
        tokens, x, stride, cols = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        panels, scratch = get_i64(operands + 32), get_i64(operands + 40) + rank * get_i64(operands + 48)
        first, last = share(tokens, rank, threads)
        for t in range(first, last):
            quantize_row(x + t * stride, cols, panels, t, tokens, width, scratch)
        return 0

    return quantize


def make_residual_norm(isa, width):
    """Kernel: out = LayerNorm(x + residual), as float32 rows and as int8 panels.

    operands: address of the number of tokens, x, x stride, residual or 0, residual stride, address of int64 row numbers of the residual
    or 0 (row t for token t), columns, weight, bias, address of epsilon, out, out stride, panels (`width` tokens wide) or 0, scratch,
    scratch bytes per rank (at least 256). out may be x or the residual.
    """

    @kernel
    def residual_norm(operands, rank, threads):
        tokens, x, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        residual, residual_stride, numbers = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        cols, weight, bias = get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64)
        epsilon, out, out_stride = get_f32(get_i64(operands + 72)), get_i64(operands + 80), get_i64(operands + 88)
        panels, scratch = get_i64(operands + 96), get_i64(operands + 104) + rank * get_i64(operands + 112)
        first, last = share(tokens, rank, threads)
        for t in range(first, last):
            row = t
            if numbers != 0:
                row = get_i64(numbers + t * 8)
            added = residual
            if residual != 0:
                added += row * residual_stride
            layer_normalize(x + t * stride, added, cols, weight, bias, epsilon, out + t * out_stride, scratch)
            if panels != 0:
                quantize_row(out + t * out_stride, cols, panels, t, tokens, width, scratch)
        return 0

    return residual_norm


@inline
def _gather_head(k, v, stride, tokens, head, keys, values):
    """One head's keys in blocks of 16 positions, position fastest (zeros beyond the text), and its values row by row."""
    for block in range((tokens + 15) // 16):
        at = keys + block * head * 64
        for lane in range(16):
            position = block * 16 + lane
            for d in range(head):
                value = ZERO
                if position < tokens:
                    value = get_f32(k + position * stride + d * 4)
                put_f32(at + d * 64 + lane * 4, value)
    for position in range(tokens):
        for i in range(head // 16):
            store_f32(values + (position * head + i * 16) * 4, load_f32(v + position * stride + i * 64))


@inline
def _soften(scores, tokens):
    """Scores of one query -> weights e**(s - max), in place; returns 1 / their sum. Lanes beyond the text get 0."""
    blocks = (tokens + 15) // 16
    peaks = splat(MINUS_INFINITY)
    for block in range(blocks):
        peaks = maximum(peaks, keep_lanes(load_f32(scores + block * 64), tokens - block * 16, MINUS_INFINITY))
    peak, total = splat(reduce_max(peaks)), zero_f32(1)
    for block in range(blocks):
        weights = keep_lanes(exp(sub(load_f32(scores + block * 64), peak)), tokens - block * 16, ZERO)
        store_f32(scores + block * 64, weights)
        total = add(total, weights)
    return ONE / reduce_add(total)


@inline
def _attend(like, q, stride, tokens, head, scale, keys, values, out, out_stride, scores, scores_stride):
    """As many queries as `like` holds, of one head, over all positions of their text."""
    for block in range((tokens + 15) // 16):
        at, total = keys + block * head * 64, zero_f32(like)
        for d in range(head):
            total = fma(broadcast_f32(q + d * 4, stride, like), load_f32(at + d * 64), total)
        store_f32s(scores + block * 64, scores_stride, mul(total, splat(scale)))
    inverses = scores - 64
    for query in range(count_of(like)):
        put_f32(inverses + query * 4, _soften(scores + query * scores_stride, tokens))
    for i in range(head // 16):
        total = zero_f32(like)
        for position in range(tokens):
            total = fma(broadcast_f32(scores + position * 4, scores_stride, like), load_f32(values + (position * head + i * 16) * 4), total)
        store_f32s(out + i * 64, out_stride, mul(total, broadcast_f32(inverses, 4, like)))


def attention_scratch_bytes(longest: int, head_size: int) -> int:
    """Scratch that one thread of the attention kernel needs for texts of at most `longest` tokens."""
    padded = (longest + 15) // 16 * 16
    return 64 + padded * 4 * QUERIES + 2 * padded * head_size * 4


def make_text_attention(isa):
    """Kernel: softmax(q @ k^T * scale) @ v within every text and head, each position seeing its whole text.

    operands: address of the number of texts, starts (int64), q, k, v, their stride, heads, head size (a multiple of 16), address of the
    scale, out, out stride, longest text that fits the scratch, scratch, scratch bytes per rank (attention_scratch_bytes).
    """

    @kernel
    def attention(operands, rank, threads):
        texts, starts, q = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        k, v, stride = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        heads, head, scale = get_i64(operands + 48), get_i64(operands + 56), get_f32(get_i64(operands + 64))
        out, out_stride, longest = get_i64(operands + 72), get_i64(operands + 80), get_i64(operands + 88)
        padded = (longest + 15) // 16 * 16
        scores = get_i64(operands + 96) + rank * get_i64(operands + 104) + 64
        keys = scores + padded * 4 * QUERIES
        values = keys + padded * head * 4
        four, one = target(isa, F32, QUERIES, 16), target(isa, F32, 1, 16)
        for unit in range(rank, texts * heads, threads):
            start, at = get_i64(starts + unit // heads * 8), unit % heads * head * 4
            tokens = get_i64(starts + unit // heads * 8 + 8) - start
            _gather_head(k + start * stride + at, v + start * stride + at, stride, tokens, head, keys, values)
            t = 0
            while t + QUERIES <= tokens:
                q_at, out_at = q + (start + t) * stride + at, out + (start + t) * out_stride + at
                _attend(four, q_at, stride, tokens, head, scale, keys, values, out_at, out_stride, scores, padded * 4)
                t += QUERIES
            while t < tokens:
                q_at, out_at = q + (start + t) * stride + at, out + (start + t) * out_stride + at
                _attend(one, q_at, stride, tokens, head, scale, keys, values, out_at, out_stride, scores, padded * 4)
                t += 1
        return 0

    return attention


def make_pool(isa):
    """Kernel: out[i] = mean of text i's rows (or its first row), scaled to length 1 if asked.

    operands: address of the number of texts, starts (int64), x, x stride, columns, first row only (0/1), normalise (0/1), out,
    out stride.
    A zero vector stays zero.
    """

    @kernel
    def pool(operands, rank, threads):
        texts, starts, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        slices, first_only, normalize = get_i64(operands + 32) // 16, get_i64(operands + 40), get_i64(operands + 48)
        out0, out_stride = get_i64(operands + 56), get_i64(operands + 64)
        for text in range(rank, texts, threads):
            first, last = get_i64(starts + text * 8), get_i64(starts + text * 8 + 8)
            if first_only:
                last = first + 1
            out, squares = out0 + text * out_stride, zero_f32(1)
            share_of_one = splat(ONE / _f(last - first))
            for i in range(slices):
                total = zero_f32(1)
                for t in range(first, last):
                    total = add(total, load_f32(x0 + t * stride + i * 64))
                total = mul(total, share_of_one)
                squares = fma(total, total, squares)
                store_f32(out + i * 64, total)
            length = np.sqrt(reduce_add(squares))
            if normalize and length > ZERO:
                for i in range(slices):
                    store_f32(out + i * 64, div(load_f32(out + i * 64), splat(length)))
        return 0

    return pool
