"""Mixture of experts: sorted assignments, waves of resident experts, their products, and the weighted sum (router.py chooses experts).

Tokens are grouped by expert so that each expert's weights are read once: assignment a = t * K + k (token t's k-th choice) gets row
`slot[a]` of buffers that are sorted by expert. An expert's rows form one panel run of activations.py. A layer is computed in waves: `wave`
lists the experts that are resident and not done; where others are missing the replay stops as an expert fault, Python starts to read those,
and the wave is computed meanwhile. At its end, or at once where none is resident, a fault waits for them, and the wave is entered
again. Every assignment has an output row of its own, and the sum over a token's choices
is taken at the end in the order of its choices: the number of waves, hence the cache size, cannot change a bit.

Routing state of a layer, int64 arrays (A = T * K assignments, E experts):
    ids (T, K)     chosen experts, best first         slot (A)     row of an assignment in sorted order
    count (E)      tokens of an expert                first (E)    first row of an expert
    source (A)     assignment of a row                done (E)     1 when its outputs are there
    ready (1 + E)  number of experts of this wave, then their numbers
    missing (1 + E) number of absent experts, then their numbers
"""

import numpy as np

from ..simd.registers import add, div, fma, load_f32, mul, splat, store_f32, target, zero_f32
from ..simd.scalars import get_f32, get_i32, get_i64, put_f32, put_i32, put_i64
from .activations import BLOCK, COLS, SCALE, SHIFT, quantize_row
from .ffn import activate_row
from .jit import inline, kernel
from .mathlib import exp
from .matrix import gate_up_run, product_run, share, shifted

ONE = np.float32(1)
FAULT = 1


def make_sort(isa):
    """Kernel (rank 0): sort assignments by expert and forget what was done.

    operands: address of the number of tokens, K, E, ids, slot, count, first, source, done, address of the flag "first wave" (set).
    """

    @kernel
    def sort(operands, rank, threads):
        if rank != 0:
            return 0
        tokens, chosen, experts = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        ids, slot, count = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        first, source, done = get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64)
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
            put_i64(source + get_i64(at) * 8, a)
            put_i64(at, get_i64(at) + 1)
        for e in range(experts):
            put_i64(first + e * 8, get_i64(first + e * 8) - get_i64(count + e * 8))
        return 0

    return sort


def make_wave(isa):
    """Kernel (rank 0): list the experts of the next wave and the missing ones; an expert fault where some are missing.

    operands: E, count, done, table of resident addresses (0: absent), ready, missing, recency stamps (E), address of the clock, counters
    (hits, misses), address of a flag that is 1 in the first wave of a layer. Status FAULT lets the caller
    start reading the missing experts while those of the wave are computed, or wait for them where there are none.
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
        if absent != 0:
            return FAULT
        return 0

    return wave


def make_stop(isa):
    """Kernel: end the replay here. No operands."""

    @kernel
    def stop(operands, rank, threads):
        return FAULT if rank == 0 else 0

    return stop


def make_gather(isa, width, quantised):
    """Kernel: the input rows of this wave's experts, into their panel runs (quantised) or float32 rows. Ranks share experts' rows.

    operands: ready, count, first, source, K, x (quantised: panels of width 1; else float32 rows), bytes of x per token, out, columns,
    routing weights (T, K) by which inputs are multiplied, or 0.
    """

    @kernel
    def gather(operands, rank, threads):
        ready, count, first, source = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        chosen, x, x_bytes, out = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56)
        blocks, weights = get_i64(operands + 64) // COLS, get_i64(operands + 72)
        for i in range(get_i64(ready)):
            e = get_i64(ready + 8 + i * 8)
            rows, start = get_i64(count + e * 8), get_i64(first + e * 8)
            run = out + start * x_bytes
            for j in range(rank, rows, threads):
                assignment, factor = get_i64(source + (start + j) * 8), ONE
                if weights != 0:
                    factor = get_f32(weights + assignment * 4)
                row = x + assignment // chosen * x_bytes
                if quantised == 0:
                    _copy_row(row, run + j * x_bytes, x_bytes, factor)
                elif j < rows // width * width:
                    _into_panel(row, run + j // width * width * x_bytes, j % width, blocks, width, factor)
                else:
                    _into_panel(row, run + j * x_bytes, 0, blocks, 1, factor)
        return 0

    return gather


@inline
def _copy_row(source, out, size, factor):
    """A float32 row of whole vectors times a factor (1 changes no bit)."""
    for at in range(0, size, 64):
        store_f32(out + at, mul(load_f32(source + at), splat(factor)))


@inline
def _into_panel(source, panel, t, blocks, width, factor):
    """One token's blocks (width 1) as column t of a panel, times a factor: what a code is worth changes, the codes do not."""
    for block in range(blocks):
        at, out = source + block * BLOCK, panel + block * BLOCK * width + t * 4
        for unit in range(0, BLOCK, 4):
            put_i32(out + unit * width, get_i32(at + unit))
        put_f32(out + SCALE * width, get_f32(at + SCALE) * factor)
        put_f32(out + SHIFT * width, get_f32(at + SHIFT) * factor)


def make_expert_gate_up(isa, format, width, lanes, kind):
    """Kernel: hidden[row] = opened(gate @ x[row]) * passed(up @ x[row]) of ffn.py for this wave's rows; ranks share row groups.

    operands: ready, count, first, table, gate offset, up offset, row groups, bytes of a row group, tiles of a row group, x, bytes of x per
    row, out, out stride, gate biases (E rows) or 0, up biases or 0, bytes of a row of biases, address of the limit.
    """

    @kernel
    def expert_gate_up(operands, rank, threads):
        ready, count, first, table = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        gate_at, up_at, groups = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        group_bytes, blocks, x0, x_bytes = get_i64(operands + 56), get_i64(operands + 64), get_i64(operands + 72), get_i64(operands + 80)
        out0, out_stride, gate_bias = get_i64(operands + 88), get_i64(operands + 96), get_i64(operands + 104)
        up_bias, bias_bytes, limit = get_i64(operands + 112), get_i64(operands + 120), get_f32(get_i64(operands + 128))
        wide, one = target(isa, format, width, lanes), target(isa, format, 1, 16)
        for i in range(get_i64(ready)):
            e, (begin, end) = get_i64(ready + 8 + i * 8), share(groups, (rank + i) % threads, threads)  # in turn: shares can differ
            expert, tokens, start = get_i64(table + e * 8), get_i64(count + e * 8), get_i64(first + e * 8)
            x = x0 + start * x_bytes
            for group in range(begin, end):
                tile, out = expert + group * group_bytes, out0 + start * out_stride + group * 64
                here = e * bias_bytes + group * 64
                biases = shifted(gate_bias, here), shifted(up_bias, here)
                gate_up_run(wide, one, kind, (tile + gate_at, tile + up_at), blocks, x, x_bytes, tokens, out, out_stride, biases, limit)
        return 0

    return expert_gate_up


def make_expert_product(isa, format, width, lanes):
    """Kernel: out[row] = W @ x[row] + bias for the rows of this wave's experts; ranks share row groups.

    operands: ready, count, first, table, offset of W in an expert, row groups, bytes of a row group, tiles of a row group, x, bytes of x
    per row, out, out stride, biases (E rows) or 0, bytes of a row of biases.
    """

    @kernel
    def expert_product(operands, rank, threads):
        ready, count, first, table = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        offset, groups, group_bytes, blocks = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56)
        x0, x_bytes, out0, out_stride = get_i64(operands + 64), get_i64(operands + 72), get_i64(operands + 80), get_i64(operands + 88)
        biases, bias_bytes = get_i64(operands + 96), get_i64(operands + 104)
        wide, one = target(isa, format, width, lanes), target(isa, format, 1, 16)
        for i in range(get_i64(ready)):
            e, (begin, end) = get_i64(ready + 8 + i * 8), share(groups, (rank + i) % threads, threads)  # in turn: shares can differ
            tokens, start, expert = get_i64(count + e * 8), get_i64(first + e * 8), get_i64(table + e * 8) + offset
            x = x0 + start * x_bytes
            for group in range(begin, end):
                tile, bias = expert + group * group_bytes, shifted(biases, e * bias_bytes + group * 64)
                out = out0 + start * out_stride + group * 64
                product_run(wide, one, tile, blocks, x, x_bytes, tokens, out, out_stride, bias, 0)
        return 0

    return expert_product


def make_expert_activate(isa, kind):
    """Kernel: gate[row] = opened(gate[row]) * passed(up[row]) of ffn.py for this wave's rows, where no fused product does it.

    operands: ready, count, first, gate rows, up rows (0: no such matrix), their stride, columns padded to 16, address of the limit.
    """

    @kernel
    def expert_activate(operands, rank, threads):
        ready, count, first = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16)
        gate, up, stride, padded = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        limit = get_f32(get_i64(operands + 56))
        for i in range(get_i64(ready)):
            e = get_i64(ready + 8 + i * 8)
            start = get_i64(first + e * 8)
            for j in range(start + rank, start + get_i64(count + e * 8), threads):
                activate_row(kind, gate + j * stride, shifted(up, j * stride), padded, limit)
        return 0

    return expert_activate


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

    operands: address of the number of tokens, K, weights (0: all are 1), slot, expert outputs y, their stride, out, out stride, columns
    padded to 16, shared expert's outputs or 0, their stride, shared gate's logits (first of 16 per token) or 0, their stride, onto or 0,
    its stride.
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
                    weight = ONE
                    if weights != 0:
                        weight = get_f32(weights + a * 4)
                    total = fma(splat(weight), load_f32(row + i * 64), total)
                if shared != 0:
                    total = fma(opened, load_f32(shared + t * shared_stride + i * 64), total)
                if onto != 0:
                    total = add(load_f32(onto + t * onto_stride + i * 64), total)
                store_f32(out0 + t * out_stride + i * 64, total)
        return 0

    return combine
