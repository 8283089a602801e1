"""Rotary tables against the published formulas, written out pair by pair."""

import math

import numpy as np
import pytest

from libcolibri.models.registry import parse_config
from libcolibri.rope import RopeConfig, frequencies, rope_tables
from tests.config.test_families import raw_config


def test_default_is_theta_to_the_minus_2j_over_dim():
    cos, sin = rope_tables(RopeConfig(theta=10000.0), head_dim=8, context_length=5)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (5, 4) and cos.flags.c_contiguous
    for s in range(5):
        for j in range(4):
            angle = s * 10000.0 ** (-2 * j / 8)
            assert cos[s, j] == np.float32(math.cos(angle)) and sin[s, j] == np.float32(math.sin(angle))


def test_linear_divides_by_factor():
    np.testing.assert_array_equal(frequencies(RopeConfig(type="linear", factor=4.0), 16), frequencies(RopeConfig(), 16) / 4.0)


def test_llama3_keeps_short_and_stretches_long_wavelengths():
    rope = RopeConfig(type="llama3", theta=5e5, factor=8.0, original_max_position_embeddings=64)
    for plain, got in zip(frequencies(RopeConfig(theta=5e5), 16), frequencies(rope, 16), strict=True):
        wavelength = 2 * math.pi / plain
        if wavelength < 64 / 4.0:
            want = plain
        elif wavelength > 64 / 1.0:
            want = plain / 8.0
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            want = (1 - smooth) * plain / 8.0 + smooth * plain
        assert got == pytest.approx(want, rel=1e-14)


def yarn(**changes):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **changes}
    config = parse_config(raw_config("qwen2", rope_parameters="absent", rope_theta=1e6, rope_scaling=scaling))
    return config.layers[0].sublayers[0].block.rope


def test_yarn_against_values_of_the_published_formula():
    rope = yarn()
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    plain, got = frequencies(RopeConfig(theta=1e6), 128), frequencies(rope, 128)
    low = math.floor(128 * math.log(32768 / (32 * 2 * math.pi)) / (2 * math.log(1e6)))
    high = math.ceil(128 * math.log(32768 / (1 * 2 * math.pi)) / (2 * math.log(1e6)))
    np.testing.assert_allclose(got[: low + 1], plain[: low + 1], rtol=1e-14)
    np.testing.assert_allclose(got[high:], plain[high:] / 4.0, rtol=1e-14)
    middle = (low + high) // 2
    share = (middle - low) / (high - low)
    assert got[middle] == pytest.approx(plain[middle] * (1 - share) + plain[middle] / 4.0 * share)
    cos, _ = rope_tables(rope, 128, 2)
    np.testing.assert_allclose(cos[0], rope.attention_factor, rtol=1e-6)


def test_yarn_attention_factor_spellings():
    assert yarn(attention_factor=1.0).attention_factor == 1.0
    assert yarn(mscale=0.707, mscale_all_dim=0.707).attention_factor == 1.0
    assert yarn(mscale=1.0, mscale_all_dim=0.5).attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert not yarn(truncate=False).truncate


def test_yarn_stretches_the_longest_context():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = parse_config(raw_config("qwen2", rope_parameters=scaling))
    assert config.max_context_length == 1024
