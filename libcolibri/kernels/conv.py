"""Depthwise causal convolution over time with a carried state: the short convolutions before recurrent layers."""

from ..simd.registers import fma, load_f32, mul, store_f32, zero_f32
from ..simd.scalars import get_i64
from .jit import inline, kernel
from .mathlib import silu
from .matrix import share

MAX_TAPS = 4


@inline
def _row(rows, stride, index):
    """16 channels of row `index`; zeros before the first."""
    if index < 0:
        return zero_f32(1)
    return load_f32(rows + index * stride)


@inline
def _put_row(rows, stride, index, value):
    if index >= 0:
        store_f32(rows + index * stride, value)


def make_causal_conv(isa):
    """Kernel: y[t] = sum over j of w[j] * u[t - taps + 1 + j] (+ bias), then silu where asked, with u = x (* gate); ranks share channels.

    operands: address of the number of tokens, x, x stride, out, out stride, channels (a multiple of 16), taps (2 to 4), kernel (taps,
    channels), bias (channels) or 0, 1 for silu, address of the address of the state, input gate or 0, output gate or 0.
    state    (taps - 1, channels): the last inputs u before this run, oldest first; rewritten
    gates    rows as far apart as x's: x is multiplied by the input gate, the result by the output gate
    out may be x: a channel is read before it is written. Tokens are taken one by one, so the sum's order never depends on the run.
    """

    @kernel
    def causal_conv(operands, rank, threads):
        tokens, x0, x_stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        out0, out_stride, channels = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        missing, weights = MAX_TAPS - get_i64(operands + 48), get_i64(operands + 56)
        bias0, activate, state0 = get_i64(operands + 64), get_i64(operands + 72), get_i64(get_i64(operands + 80))
        gate_in, gate_out = get_i64(operands + 88), get_i64(operands + 96)
        row = channels * 4
        first, last = share(channels // 16, rank, threads)
        for group in range(first, last):
            # Fewer taps are four with zeros before them: nothing is added to the sum.
            at = group * 64
            x, out, w, state = x0 + at, out0 + at, weights + at, state0 + at
            w0, w1 = _row(w, row, -missing), _row(w, row, 1 - missing)
            w2, w3 = _row(w, row, 2 - missing), _row(w, row, 3 - missing)
            oldest, older, old = _row(state, row, -missing), _row(state, row, 1 - missing), _row(state, row, 2 - missing)
            bias = zero_f32(1)
            if bias0 != 0:
                bias = load_f32(bias0 + at)
            for t in range(tokens):
                new = load_f32(x + t * x_stride)
                if gate_in != 0:
                    new = mul(new, load_f32(gate_in + at + t * x_stride))
                y = fma(w3, new, fma(w2, old, fma(w1, older, fma(w0, oldest, bias))))
                if activate != 0:
                    y = silu(y)
                if gate_out != 0:
                    y = mul(y, load_f32(gate_out + at + t * x_stride))
                store_f32(out + t * out_stride, y)
                oldest, older, old = older, old, new
            _put_row(state, row, -missing, oldest)
            _put_row(state, row, 1 - missing, older)
            _put_row(state, row, 2 - missing, old)
        return 0

    return causal_conv
