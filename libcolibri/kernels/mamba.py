"""Mamba-2: the selective state update, and the gated norm that follows it.

The state of a head is head_dim x d_state float32. It lies as [head_dim / 16][d_state][16], the heads one after the other: 16 rows of a head
share a register, so that C . h needs no sum across lanes, and what one rank works on (16 rows of all d_state columns) stays in the first
cache for a whole chunk. Tokens are taken one after the other in every program: prefill and decode give the same bits.
"""

from ..simd.registers import (
    broadcast_f32,
    fma,
    load_f32,
    load_f32s,
    maximum,
    minimum,
    mul,
    splat,
    store_f32,
    store_f32s,
    sum_registers,
    zero_f32,
)
from ..simd.scalars import get_f32, get_i64
from .jit import inline, kernel
from .mathlib import exp, silu, softplus
from .matrix import share
from .norm import normalize

COLUMNS = 2  # of the state, taken at a time: with their sums they fill AVX2's registers


@inline
def _scan(tokens, x, b, c, stride, dt, dt_stride, head, limits, state, d_state, out, out_stride):
    """One register of a head's rows through all tokens; `head` = (A, D, dt_bias), `limits` = least and greatest dt."""
    a, d, bias = splat(head[0]), splat(head[1]), head[2]
    least, greatest = splat(limits[0]), splat(limits[1])
    for t in range(tokens):
        step = minimum(maximum(softplus(splat(get_f32(dt + t * dt_stride) + bias)), least), greatest)
        decay, v, y = exp(mul(step, a)), load_f32(x + t * stride), zero_f32(COLUMNS)
        drive = mul(step, v)
        b_row, c_row = b + t * stride, c + t * stride
        for n in range(0, d_state, COLUMNS):
            at = state + n * 64
            h = fma(drive, broadcast_f32(b_row + n * 4, 4, COLUMNS), mul(decay, load_f32s(at, 64, COLUMNS)))
            store_f32s(at, 64, h)
            y = fma(h, broadcast_f32(c_row + n * 4, 4, COLUMNS), y)
        store_f32(out + t * out_stride, fma(d, v, sum_registers(y)))


def make_selective_scan(isa):
    """Kernel: for every token, head and row of the head (Mamba-2, as NemotronH and GraniteMoeHybrid compute it),

        dt = min(max(softplus(dt + dt_bias), least), greatest),  h = exp(dt A) h + (dt x) B,  y = C . h + D x

    operands: address of the number of tokens; rows x | B | C (heads * head_dim, groups * d_state, groups * d_state float32), their stride;
    rows of dt (one a head, raw), their stride; A (negative), D, dt_bias (one a head); least and greatest dt (float32 (2,)); heads, groups
    (each serves heads / groups heads, in order), head_dim (a multiple of 16), d_state (even); address of the state's address;
    rows of y (heads * head_dim), their stride. Ranks share slices of 16 rows.
    """

    @kernel
    def selective_scan(operands, rank, threads):
        tokens, x, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        dt, dt_stride = get_i64(operands + 24), get_i64(operands + 32)
        a, d, bias, limits = get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64)
        heads, groups = get_i64(operands + 72), get_i64(operands + 80)
        head_dim, d_state = get_i64(operands + 88), get_i64(operands + 96)
        state, out, out_stride = get_i64(get_i64(operands + 104)), get_i64(operands + 112), get_i64(operands + 120)
        all_b = x + heads * head_dim * 4
        all_c = all_b + groups * d_state * 4
        first, last = share(heads * head_dim // 16, rank, threads)
        for part in range(first, last):
            head = part * 16 // head_dim
            group = head * groups // heads * d_state * 4
            own = get_f32(a + head * 4), get_f32(d + head * 4), get_f32(bias + head * 4)
            _scan(
                tokens, x + part * 64, all_b + group, all_c + group, stride, dt + head * 4, dt_stride, own,
                (get_f32(limits), get_f32(limits + 4)), state + part * d_state * 64, d_state, out + part * 64, out_stride,
            )  # fmt: skip
        return 0

    return selective_scan


def make_gated_norm(isa):
    """Kernel: x = v / sqrt(mean(v^2) + epsilon) * weight with v = x * silu(gate), the mean over each group of columns.

    operands: address of the number of tokens, x, its stride, gate, its stride, groups, columns of a group (a multiple of 16), weight
    (groups * columns), address of epsilon, scratch, scratch bytes per rank (at least 256). Ranks share (token, group) units.
    """

    @kernel
    def gated_norm(operands, rank, threads):
        tokens, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        gate0, gate_stride = get_i64(operands + 24), get_i64(operands + 32)
        groups, cols, weight = get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56)
        epsilon, scratch = get_f32(get_i64(operands + 64)), get_i64(operands + 72) + rank * get_i64(operands + 80)
        for unit in range(rank, tokens * groups, threads):
            t, at = unit // groups, unit % groups * cols * 4
            x, gate = x0 + t * stride + at, gate0 + t * gate_stride + at
            for i in range(cols // 16):
                store_f32(x + i * 64, mul(load_f32(x + i * 64), silu(load_f32(gate + i * 64))))
            normalize(x, cols, cols, weight + at, epsilon, x, scratch)
        return 0

    return gated_norm
