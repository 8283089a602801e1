"""The nonlinearity of feed-forward blocks, of experts and of dense ones: opened(gate) * passed(up).

    SILU             silu(gate) * up
    GELU_TANH        gelu(gate) * up, gelu by its tanh formula
    CLAMPED_SWIGLU   g * sigmoid(1.702 g) * (u + 1), g = min(gate, limit), u = up within +-limit (gpt-oss)
    RELU_SQUARED     max(gate, 0)^2; there is no second matrix

`kind` is a constant of the kernel: one branch is compiled.
"""

import numpy as np

from ..simd.registers import add, fma, load_f32, maximum, minimum, mul, splat_like, store_f32, zero_f32
from .jit import inline
from .mathlib import sigmoid, silu

SILU, GELU_TANH, CLAMPED_SWIGLU, RELU_SQUARED = range(4)
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "clamped_swiglu": CLAMPED_SWIGLU, "relu2": RELU_SQUARED}
_f = np.float32
ONE, ALPHA = _f(1), _f(1.702)
GELU_1, GELU_3 = _f(2 * (2 / np.pi) ** 0.5), _f(2 * (2 / np.pi) ** 0.5 * 0.044715)


@inline
def gelu_tanh(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), written as x * sigmoid of twice that argument."""
    inner = fma(mul(x, x), splat_like(x, GELU_3), splat_like(x, GELU_1))
    return mul(x, sigmoid(mul(x, inner)))


@inline
def opened(kind, gate, limit):
    """What gate contributes to the product."""
    if kind == SILU:
        return silu(gate)
    if kind == GELU_TANH:
        return gelu_tanh(gate)
    if kind == CLAMPED_SWIGLU:
        g = minimum(gate, splat_like(gate, limit))
        return mul(g, sigmoid(mul(g, splat_like(g, ALPHA))))
    positive = maximum(gate, zero_f32(gate))
    return mul(positive, positive)


@inline
def passed(kind, up, limit):
    """What up contributes to the product."""
    if kind == CLAMPED_SWIGLU:
        return add(minimum(maximum(up, splat_like(up, -limit)), splat_like(up, limit)), splat_like(up, ONE))
    return up


@inline
def activate_row(kind, gate, up, padded, limit):
    """gate = opened(gate) * passed(up) over one row; up 0: opened(gate)."""
    for i in range(padded // 16):
        value = opened(kind, load_f32(gate + i * 64), limit)
        if up != 0:
            value = mul(value, passed(kind, load_f32(up + i * 64), limit))
        store_f32(gate + i * 64, value)
