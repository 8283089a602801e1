"""Mixture of experts: routing, waves of resident experts, their products, and the weighted sum.

Tokens are grouped by expert so that each expert's weights are read once: assignment a = t * K + k (token t's k-th choice) gets row
`slot[a]` of buffers that are sorted by expert. An expert's rows form one panel run of activations.py. A layer is computed in waves: `wave`
lists the experts that are resident and not done; a miss ends the replay as an expert fault, Python reads the missing
experts, and the wave is entered again. Every assignment has an output row of its own, and the sum over a token's choices
is taken at the end in the order of its choices: the number of waves, hence the cache size, cannot change a bit.

Routing state of a layer, int64 arrays (A = T * K assignments, E experts):
    ids (T, K)     chosen experts, best first         slot (A)     row of an assignment in sorted order
    count (E)      tokens of an expert                first (E)    first row of an expert
    token (A)      token of a row                     done (E)     1 when its outputs are there
    ready (1 + E)  number of experts of this wave, then their numbers
    missing (1 + E) number of absent experts, then their numbers
"""

import numpy as np

from ..simd.registers import (
    add,
    div,
    fma,
    keep_lanes,
    load_f32,
    maximum,
    mul,
    negate,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
    sub,
    target,
    zero_f32,
)
from ..simd.scalars import get_f32, get_i32, get_i64, put_f32, put_i32, put_i64
from .activations import BLOCK, quantize_row
from .jit import inline, kernel
from .mathlib import exp
from .matrix import gate_up_run, product_run

ONE, MINUS_INFINITY, ZERO = np.float32(1), np.float32(-np.inf), np.float32(0)
FAULT = 1


@inline
def _softmax(x, n):
    """In place over n float32; room for a multiple of 16. Lanes add in order, then by one fixed tree."""
    slices = (n + 15) // 16
    peaks = splat(MINUS_INFINITY)
    for i in range(slices):
        peaks = maximum(peaks, keep_lanes(load_f32(x + i * 64), n - i * 16, MINUS_INFINITY))
    peak, total = splat(reduce_max(peaks)), zero_f32(1)
    for i in range(slices):
        e = keep_lanes(exp(sub(load_f32(x + i * 64), peak)), n - i * 16, ZERO)
        store_f32(x + i * 64, e)
        total = add(total, e)
    inverse = splat(reduce_add(total))
    for i in range(slices):
        store_f32(x + i * 64, div(load_f32(x + i * 64), inverse))


def make_route(isa):
    """Kernel: softmax over all experts, the K most probable (ties: the lower index), optionally divided by their sum.

    operands: address of the number of tokens, router logits (T rows; overwritten), their stride, E, K, 1 to renormalise, ids out (T, K),
    weights out (T, K) float32. Ranks share tokens. As Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE route.
    """

    @kernel
    def route(operands, rank, threads):
        tokens, logits, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        experts, chosen, renormalise = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        ids, weights = get_i64(operands + 48), get_i64(operands + 56)
        for t in range(rank, tokens, threads):
            x = logits + t * stride
            _softmax(x, experts)
            total = ZERO
            for k in range(chosen):
                best, where = MINUS_INFINITY, np.int64(0)
                for e in range(experts):
                    p = get_f32(x + e * 4)
                    if p > best:
                        best, where = p, e
                put_f32(x + where * 4, MINUS_INFINITY)
                put_i64(ids + (t * chosen + k) * 8, where)
                put_f32(weights + (t * chosen + k) * 4, best)
                total += best
            if renormalise != 0:
                for k in range(chosen):
                    at = weights + (t * chosen + k) * 4
                    put_f32(at, get_f32(at) / total)
        return 0

    return route


def make_sort(isa):
    """Kernel (rank 0): sort assignments by expert and forget what was done.

    operands: address of the number of tokens, K, E, ids, slot, count, first, token, done, address of the flag "first wave" (set).
    """

    @kernel
    def sort(operands, rank, threads):
        if rank != 0:
            return 0
        tokens, chosen, experts = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        ids, slot, count = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        first, token, done = get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64)
        put_i64(get_i64(operands + 72), 1)
        for e in range(experts):
            put_i64(count + e * 8, 0)
            put_i64(done + e * 8, 0)
        for a in range(tokens * chosen):
            at = count + get_i64(ids + a * 8) * 8
            put_i64(at, get_i64(at) + 1)
        row = 0
        for e in range(experts):
            put_i64(first + e * 8, row)
            row += get_i64(count + e * 8)
        for a in range(tokens * chosen):
            at = first + get_i64(ids + a * 8) * 8
            put_i64(slot + a * 8, get_i64(at))
            put_i64(token + get_i64(at) * 8, a // chosen)
            put_i64(at, get_i64(at) + 1)
        for e in range(experts):
            put_i64(first + e * 8, get_i64(first + e * 8) - get_i64(count + e * 8))
        return 0

    return sort


def make_wave(isa):
    """Kernel (rank 0): list the experts of the next wave and the missing ones; an expert fault where none is resident.

    operands: E, count, done, table of resident addresses (0: absent), ready, missing, recency stamps (E), address of the clock, counters
    (hits, misses), address of a flag that is 1 in the first wave of a layer. Status FAULT asks the caller to bring in experts.
    """

    @kernel
    def wave(operands, rank, threads):
        if rank != 0:
            return 0
        experts, count, done, table = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        ready, missing, stamps = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        clock, counters, fresh = get_i64(get_i64(operands + 56)), get_i64(operands + 64), get_i64(operands + 72)
        here, absent = 0, 0
        for e in range(experts):
            if get_i64(count + e * 8) == 0 or get_i64(done + e * 8) != 0:
                continue
            if get_i64(table + e * 8) != 0:
                here += 1
                put_i64(ready + here * 8, e)
                put_i64(stamps + e * 8, clock)
            else:
                absent += 1
                put_i64(missing + absent * 8, e)
        put_i64(ready, here)
        put_i64(missing, absent)
        if get_i64(fresh) != 0:
            put_i64(fresh, 0)
            put_i64(counters, get_i64(counters) + here)
            put_i64(counters + 8, get_i64(counters + 8) + absent)
        if here == 0 and absent != 0:
            return FAULT
        return 0

    return wave


def make_gather(isa, width, quantised):
    """Kernel: the input rows of this wave's experts, into their panel runs (quantised) or float32 rows. Ranks share experts' rows.

    operands: ready, count, first, token, x (quantised: panels of width 1; else float32 rows), bytes of x per token, out, columns.
    """

    @kernel
    def gather(operands, rank, threads):
        ready, count, first, token = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        x, x_bytes, out, cols = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56)
        for i in range(get_i64(ready)):
            e = get_i64(ready + 8 + i * 8)
            rows, start = get_i64(count + e * 8), get_i64(first + e * 8)
            run = out + start * x_bytes
            for j in range(rank, rows, threads):
                source = x + get_i64(token + (start + j) * 8) * x_bytes
                if quantised == 0:
                    _copy(source, run + j * x_bytes, x_bytes)
                elif j < rows // width * width:
                    _into_panel(source, run + j // width * width * x_bytes, j % width, cols // 32, width)
                else:
                    _copy(source, run + j * x_bytes, x_bytes)
        return 0

    return gather


@inline
def _copy(source, out, size):
    """Bytes, a multiple of 16."""
    for i in range(size // 8):
        put_i64(out + i * 8, get_i64(source + i * 8))


@inline
def _into_panel(source, panel, t, blocks, width):
    """One token's blocks (width 1) as column t of a panel: 4-byte units 0..7 are codes, then scale, shift, sum, halves."""
    for block in range(blocks):
        for unit in range(BLOCK // 4):
            put_i32(panel + (block * BLOCK + unit * 4) * width + t * 4, get_i32(source + block * BLOCK + unit * 4))


def make_expert_gate_up(isa, format, width, lanes):
    """Kernel: hidden[row] = silu(gate @ x[row]) * (up @ x[row]) for the rows of this wave's experts; ranks share row groups.

    operands: ready, count, first, table, gate offset, up offset, row groups, bytes of a row group, tiles of a row group, x, bytes of x per
    row, out, out stride.
    """

    @kernel
    def expert_gate_up(operands, rank, threads):
        ready, count, first, table = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        gate_at, up_at, groups = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        group_bytes, blocks, x0, x_bytes = get_i64(operands + 56), get_i64(operands + 64), get_i64(operands + 72), get_i64(operands + 80)
        out0, out_stride = get_i64(operands + 88), get_i64(operands + 96)
        wide, one = target(isa, format, width, lanes), target(isa, format, 1, 16)
        for unit in range(rank, get_i64(ready) * groups, threads):  # in turn: experts have different numbers of tokens
            e = get_i64(ready + 8 + unit // groups * 8)
            weights, tokens, start = get_i64(table + e * 8), get_i64(count + e * 8), get_i64(first + e * 8)
            group = unit % groups
            gate, up = weights + gate_at + group * group_bytes, weights + up_at + group * group_bytes
            x, out = x0 + start * x_bytes, out0 + start * out_stride + group * 64
            gate_up_run(wide, one, gate, up, blocks, x, x_bytes, tokens, out, out_stride)
        return 0

    return expert_gate_up


def make_expert_product(isa, format, width, lanes):
    """Kernel: out[row] = W @ x[row] for the rows of this wave's experts; ranks share row groups.

    operands: ready, count, first, table, offset of W in an expert, row groups, bytes of a row group, tiles of a row group, x, bytes of x
    per row, out, out stride.
    """

    @kernel
    def expert_product(operands, rank, threads):
        ready, count, first, table = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        offset, groups, group_bytes, blocks = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56)
        x0, x_bytes, out0, out_stride = get_i64(operands + 64), get_i64(operands + 72), get_i64(operands + 80), get_i64(operands + 88)
        wide, one = target(isa, format, width, lanes), target(isa, format, 1, 16)
        for unit in range(rank, get_i64(ready) * groups, threads):  # in turn: experts have different numbers of tokens
            e = get_i64(ready + 8 + unit // groups * 8)
            tokens, start, group = get_i64(count + e * 8), get_i64(first + e * 8), unit % groups
            tile = get_i64(table + e * 8) + offset + group * group_bytes
            x, out = x0 + start * x_bytes, out0 + start * out_stride + group * 64
            product_run(wide, one, tile, blocks, x, x_bytes, tokens, out, out_stride, 0, 0)
        return 0

    return expert_product


def make_expert_activate(isa):
    """Kernel: gate[row] = silu(gate[row]) * up[row] for this wave's rows, where gate and up have different tensor types.

    operands: ready, count, first, gate rows, up rows, their stride, columns padded to 16.
    """

    @kernel
    def expert_activate(operands, rank, threads):
        ready, count, first = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16)
        gate, up, stride, padded = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        for i in range(get_i64(ready)):
            e = get_i64(ready + 8 + i * 8)
            start = get_i64(first + e * 8)
            for j in range(start + rank, start + get_i64(count + e * 8), threads):
                activate_row(gate + j * stride, up + j * stride, padded)
        return 0

    return expert_activate


@inline
def activate_row(gate, up, padded):
    """gate = silu(gate) * up over one row."""
    for i in range(padded // 16):
        x = load_f32(gate + i * 64)
        opened = div(x, add(splat(ONE), exp(negate(x))))
        store_f32(gate + i * 64, mul(opened, load_f32(up + i * 64)))


def make_expert_quantize(isa, width):
    """Kernel: float32 rows of this wave's experts to panel runs; ranks share rows.

    operands: ready, count, first, rows, stride, columns, panels, bytes of panels per row, scratch, scratch bytes per rank.
    """

    @kernel
    def expert_quantize(operands, rank, threads):
        ready, count, first = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16)
        rows, stride, cols = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        panels, row_bytes, scratch = get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64) + rank * get_i64(operands + 72)
        for i in range(get_i64(ready)):
            e = get_i64(ready + 8 + i * 8)
            start, tokens = get_i64(first + e * 8), get_i64(count + e * 8)
            for j in range(rank, tokens, threads):
                quantize_row(rows + (start + j) * stride, cols, panels + start * row_bytes, j, tokens, width, scratch)
        return 0

    return expert_quantize


def make_wave_end(isa):
    """Kernel (rank 0): mark this wave's experts done; FAULT where others are still missing.

    operands: ready, done, missing.
    """

    @kernel
    def wave_end(operands, rank, threads):
        if rank != 0:
            return 0
        ready, done = get_i64(operands), get_i64(operands + 8)
        for i in range(get_i64(ready)):
            put_i64(done + get_i64(ready + 8 + i * 8) * 8, 1)
        if get_i64(get_i64(operands + 16)) != 0:
            return FAULT
        return 0

    return wave_end


def make_combine(isa):
    """Kernel: out[t] = sum over k of weight[t, k] * y[slot[t, k]] (+ sigmoid(gate[t]) * shared[t]) (+ onto[t]); ranks share tokens.

    operands: address of the number of tokens, K, weights, slot, expert outputs y, their stride, out, out stride, columns padded to 16,
    shared expert's outputs or 0, their stride, shared gate's logits (first of 16 per token) or 0, their stride, onto or 0, its stride.
    """

    @kernel
    def combine(operands, rank, threads):
        tokens, chosen, weights, slot = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        outputs, stride, out0, out_stride = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56)
        padded, shared, shared_stride = get_i64(operands + 64), get_i64(operands + 72), get_i64(operands + 80)
        gate, gate_stride = get_i64(operands + 88), get_i64(operands + 96)
        onto, onto_stride = get_i64(operands + 104), get_i64(operands + 112)
        for t in range(rank, tokens, threads):
            opened = splat(ONE)
            if gate != 0:
                opened = div(splat(ONE), add(splat(ONE), exp(splat(-get_f32(gate + t * gate_stride)))))
            for i in range(padded // 16):
                total = zero_f32(1)
                for k in range(chosen):
                    a = t * chosen + k
                    row = outputs + get_i64(slot + a * 8) * stride
                    total = fma(splat(get_f32(weights + a * 4)), load_f32(row + i * 64), total)
                if shared != 0:
                    total = fma(opened, load_f32(shared + t * shared_stride + i * 64), total)
                if onto != 0:
                    total = add(load_f32(onto + t * onto_stride + i * 64), total)
                store_f32(out0 + t * out_stride + i * 64, total)
        return 0

    return combine
