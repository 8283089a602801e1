"""Vector functions LLVM has no instruction for, written out as fmas: the same bits on every machine."""

import numpy as np

from ..simd.registers import (
    absolute,
    add,
    div,
    fma,
    fnma,
    maximum,
    minimum,
    mul,
    negate,
    round_f32,
    select_greater,
    splat_like,
    sub,
    times_power_of_two,
    to_i32,
    zero_f32,
)
from .jit import inline

_f = np.float32
LOG2E, LN2_HIGH, LN2_LOW = _f(1.4426950408889634), _f(0.693359375), _f(-2.12194440e-4)
LOWEST, HIGHEST = _f(-87.3), _f(88.0)
C0, C1, C2, C3, C4, C5 = (
    _f(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
ONE, TWO, TANH_BORDER = _f(1), _f(2), _f(0.625)
A3, A5, A7, A9, A11, A13, A15, A17 = (_f(1.0 / n) for n in (3, 5, 7, 9, 11, 13, 15, 17))
T3, T5, T7, T9, T11 = (_f(c) for c in (-3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3))


@inline
def exp(x):
    """e**x of 16 lanes per register, about 1 ulp (the polynomial of Cephes' expf).

    Arguments are clamped to [-87.3, 88]: below, the result is 1e-38 instead of 0.
    """
    x = minimum(maximum(x, splat_like(x, LOWEST)), splat_like(x, HIGHEST))
    n = round_f32(mul(x, splat_like(x, LOG2E)))
    r = fnma(n, splat_like(x, LN2_LOW), fnma(n, splat_like(x, LN2_HIGH), x))
    p = fma(splat_like(x, C0), r, splat_like(x, C1))
    p = fma(p, r, splat_like(x, C2))
    p = fma(p, r, splat_like(x, C3))
    p = fma(p, r, splat_like(x, C4))
    p = fma(p, r, splat_like(x, C5))
    p = fma(p, mul(r, r), add(r, splat_like(x, ONE)))
    return times_power_of_two(p, to_i32(n))


@inline
def sigmoid(x):
    """1 / (1 + e**-x)."""
    one = splat_like(x, ONE)
    return div(one, add(one, exp(negate(x))))


@inline
def silu(x):
    """x / (1 + e**-x)."""
    return div(x, add(splat_like(x, ONE), exp(negate(x))))


@inline
def log1p(x):
    """ln(1 + x) for 0 <= x <= 1, about 2 ulp: 2 atanh(s) with s = x / (2 + x), by its series up to s**17 (s**2 is at most 1/9)."""
    s = div(x, add(splat_like(x, TWO), x))
    square = mul(s, s)
    p = fma(splat_like(x, A17), square, splat_like(x, A15))
    p = fma(p, square, splat_like(x, A13))
    p = fma(p, square, splat_like(x, A11))
    p = fma(p, square, splat_like(x, A9))
    p = fma(p, square, splat_like(x, A7))
    p = fma(p, square, splat_like(x, A5))
    p = fma(p, square, splat_like(x, A3))
    return mul(splat_like(x, TWO), fma(mul(p, square), s, s))


@inline
def softplus(x):
    """ln(1 + e**x), never overflowing; close to e**x for very negative x, down to 1e-38."""
    return add(maximum(x, zero_f32(x)), log1p(exp(negate(absolute(x)))))


@inline
def tanh(x):
    """Hyperbolic tangent, about 2 ulp: an odd polynomial (of Cephes' tanhf) near 0, else 1 - 2 / (e**2|x| + 1) with the sign of x."""
    square = mul(x, x)
    p = fma(splat_like(x, T11), square, splat_like(x, T9))
    p = fma(p, square, splat_like(x, T7))
    p = fma(p, square, splat_like(x, T5))
    p = fma(p, square, splat_like(x, T3))
    near = fma(mul(p, square), x, x)
    size, one = absolute(x), splat_like(x, ONE)
    far = sub(one, div(splat_like(x, TWO), add(exp(add(size, size)), one)))
    far = select_greater(x, zero_f32(x), far, negate(far))
    return select_greater(size, splat_like(x, TANH_BORDER), far, near)
