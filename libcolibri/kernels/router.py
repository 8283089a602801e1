"""Which experts a token goes to, and with what weight: one kernel for the rules of all families.

    x = logits (+ bias), then cap * tanh(x / cap) where there is a cap
    p = score of x: softmax, sigmoid, or x itself where only the chosen experts are scored
    c = p (+ choice bias), -inf outside of the best groups
    chosen = the K greatest of c, best first; of equal ones the lower index
    w = p of the chosen, or their own softmax, sigmoid or sparse softmax
    w = w / max(sum(w) + eps, least) where asked, * scale (* scale of the expert)

Everything is float32, and every sum has one order: nothing depends on the instruction set, the run of tokens or the thread.
"""

import numpy as np

from ..simd.registers import (
    add,
    div,
    keep_lanes,
    load_f32,
    maximum,
    mul,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
    sub,
    zero_f32,
)
from ..simd.scalars import get_f32, get_i64, put_f32, put_i64
from .jit import inline, kernel
from .mathlib import exp, sigmoid, tanh

# The last three choose by the logits and score what is chosen.
SOFTMAX, SIGMOID, CHOSEN_SOFTMAX, CHOSEN_SIGMOID, SPARSEMIXER = range(5)
SCORES = {
    "softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "chosen_softmax": CHOSEN_SOFTMAX,
    "chosen_sigmoid": CHOSEN_SIGMOID,
    "sparsemixer": SPARSEMIXER,
}
GROUP_SCORES = {"max": 0, "top2": 1}
ONE, MINUS_INFINITY, ZERO = np.float32(1), np.float32(-np.inf), np.float32(0)


def route_scratch_bytes(experts):
    """Scratch that make_route needs for each rank."""
    return 2 * ((experts + 15) // 16 * 64)


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


@inline
def _sigmoid(x, n):
    """In place over n float32; room for a multiple of 16."""
    for i in range((n + 15) // 16):
        store_f32(x + i * 64, sigmoid(load_f32(x + i * 64)))


@inline
def _prepare(x, experts, bias, cap):
    """Bias and cap of the logits, in place."""
    for i in range((experts + 15) // 16):
        v = load_f32(x + i * 64)
        if bias != 0:
            v = add(v, load_f32(bias + i * 64))
        if cap != ZERO:
            v = mul(splat(cap), tanh(div(v, splat(cap))))
        store_f32(x + i * 64, v)


@inline
def _greatest(x, first, last):
    """Index of the greatest of x[first..last - 1], the lower one of equals."""
    best, where = get_f32(x + first * 4), first
    for e in range(first + 1, last):
        value = get_f32(x + e * 4)
        if value > best:
            best, where = value, e
    return where


@inline
def _group_score(choice, first, last, two):
    """The greatest of a group's values, or the sum of the greatest two."""
    best, second = MINUS_INFINITY, MINUS_INFINITY
    for e in range(first, last):
        value = get_f32(choice + e * 4)
        if value > best:
            best, second = value, best
        elif value > second:
            second = value
    if two != 0:
        return best + second
    return best


@inline
def _keep_groups(choice, experts, groups, kept, two, scores):
    """-inf outside of the `kept` best groups, of equal ones the lower. scores: room for one float32 per group."""
    size = experts // groups
    for g in range(groups):
        put_f32(scores + g * 4, _group_score(choice, g * size, (g + 1) * size, two))
    for g in range(groups):
        score, better = get_f32(scores + g * 4), 0
        for other in range(groups):
            theirs = get_f32(scores + other * 4)
            if theirs > score or (theirs == score and other < g):
                better += 1
        if better >= kept:
            for e in range(g * size, (g + 1) * size):
                put_f32(choice + e * 4, MINUS_INFINITY)


@inline
def _sparse_weight(x, choice, experts, where, tolerance, spare):
    """Softmax of the best expert left among those left whose logit is within `tolerance` of it, relative to the larger size.

    As SparseMixer (arXiv 2409.12136) weighs at inference. spare: room for the experts.
    """
    peak = get_f32(choice + where * 4)
    for e in range(experts):
        value, left = get_f32(x + e * 4), get_f32(choice + e * 4)
        if (peak - value) / max(abs(value), peak) > tolerance:
            left = MINUS_INFINITY
        put_f32(spare + e * 4, left)
    _softmax(spare, experts)
    return get_f32(spare + where * 4)


@inline
def _choose(x, choice, experts, chosen, score, tolerance, ids, weights, spare):
    """The `chosen` greatest of `choice`, which is used up, and their raw weights."""
    for k in range(chosen):
        where = _greatest(choice, 0, experts)
        weight = get_f32(x + where * 4)
        if score == SPARSEMIXER:
            weight = _sparse_weight(x, choice, experts, where, tolerance, spare)
        put_f32(choice + where * 4, MINUS_INFINITY)
        put_i64(ids + k * 8, where)
        put_f32(weights + k * 4, weight)


@inline
def _score_chosen(weights, chosen, score, spare):
    """Softmax or sigmoid of the chosen experts' logits, in place; `weights` has no room for whole vectors, `spare` has."""
    for k in range(chosen):
        put_f32(spare + k * 4, get_f32(weights + k * 4))
    if score == CHOSEN_SOFTMAX:
        _softmax(spare, chosen)
    else:
        _sigmoid(spare, chosen)
    for k in range(chosen):
        put_f32(weights + k * 4, get_f32(spare + k * 4))


def make_route(isa):
    """Kernel: expert ids and weights of every token; see the module for the rule. Ranks share tokens.

    operands: address of the number of tokens, router logits (T rows; overwritten), their stride, E, K, ids out (T, K), weights out (T, K)
    float32, one of SCORES, logit bias or 0, choice bias or 0, number of groups (1: no limit), groups kept, one of GROUP_SCORES, 1 to
    divide by the sum, address of five float32 (cap of the logits or 0, eps, least sum, scale, SparseMixer's tolerance), scales of the
    experts or 0, scratch, scratch bytes per rank (route_scratch_bytes). Biases are padded to whole vectors.
    """

    @kernel
    def route(operands, rank, threads):
        tokens, logits, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        experts, chosen, ids, weights = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        score, bias, choice_bias = get_i64(operands + 56), get_i64(operands + 64), get_i64(operands + 72)
        groups, kept, two, renormalise = get_i64(operands + 80), get_i64(operands + 88), get_i64(operands + 96), get_i64(operands + 104)
        numbers, scales = get_i64(operands + 112), get_i64(operands + 120)
        choice = get_i64(operands + 128) + rank * get_i64(operands + 136)
        padded = (experts + 15) // 16 * 16
        spare = choice + padded * 4
        cap, eps, least = get_f32(numbers), get_f32(numbers + 4), get_f32(numbers + 8)
        scale, tolerance = get_f32(numbers + 12), get_f32(numbers + 16)
        for t in range(rank, tokens, threads):
            x, id, weight = logits + t * stride, ids + t * chosen * 8, weights + t * chosen * 4
            if bias != 0 or cap != ZERO:
                _prepare(x, experts, bias, cap)
            if score == SOFTMAX:
                _softmax(x, experts)
            elif score == SIGMOID:
                _sigmoid(x, experts)
            for i in range(padded // 16):
                c = load_f32(x + i * 64)
                if choice_bias != 0:
                    c = add(c, load_f32(choice_bias + i * 64))
                store_f32(choice + i * 64, c)
            if groups > 1:
                _keep_groups(choice, experts, groups, kept, two, spare)
            _choose(x, choice, experts, chosen, score, tolerance, id, weight, spare)
            if score in (CHOSEN_SOFTMAX, CHOSEN_SIGMOID):
                _score_chosen(weight, chosen, score, spare)
            divisor = ONE
            if renormalise != 0:
                total = ZERO
                for k in range(chosen):
                    total += get_f32(weight + k * 4)
                divisor = max(total + eps, least)
            for k in range(chosen):
                w = get_f32(weight + k * 4) / divisor * scale
                if scales != 0:
                    w *= get_f32(scales + get_i64(id + k * 8) * 4)
                put_f32(weight + k * 4, w)
        return 0

    return route
