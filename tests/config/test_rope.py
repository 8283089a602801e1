"""Rotary tables against the published formulas, written out pair by pair."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from libcolibri.errors import ConfigError
from libcolibri.models.config_reader import ConfigReader
from libcolibri.models.registry import parse_config
from libcolibri.models.rope_config import read_layer_ropes, read_rope
from libcolibri.rope import RopeConfig, frequencies, rope_tables
from tests.config.test_families import raw_config


def test_default_is_theta_to_the_minus_2j_over_dim():
    cos, sin = rope_tables(RopeConfig(theta=10000.0), columns=8, context_length=5)
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


EXPECTED = json.loads((Path(__file__).parents[1] / "fixtures" / "rope.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_frequencies_and_factors_equal_transformers(name):
    """Heads of 16 columns, 1024 positions; short and long contexts differ for longrope only."""
    case = EXPECTED[name]
    raw = {"max_position_embeddings": 1024, "rope_parameters": {"rope_theta": 10000.0, **case["parameters"]}}
    reader = ConfigReader(raw, "a family")
    rope = read_rope(reader, reader.integer("max_position_embeddings"), 5e5, partial=1.0)
    reader.finish()
    columns = rope.columns(16)
    for length, wanted in ((16, case["short"]), (1024, case["long"])):
        got = frequencies(rope, columns, length)
        np.testing.assert_allclose(got, wanted["frequencies"], rtol=3e-6)
        cos, sin = rope_tables(rope, columns, length)
        np.testing.assert_allclose(cos[0], wanted["attention_factor"], rtol=1e-6)
        np.testing.assert_allclose(sin[3], np.sin(3 * got) * wanted["attention_factor"], atol=1e-7)


def test_layer_types_have_embeddings_of_their_own():
    thetas = {"full_attention": 1e6, "sliding_attention": 1e4}
    scaling = {"rope_type": "linear", "factor": 8.0}
    nested = {"rope_parameters": {"full_attention": {"rope_theta": 1e6, **scaling}, "sliding_attention": {"rope_theta": 1e4}}}
    published = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
    for raw in (nested, published):
        reader = ConfigReader(raw, "gemma3")
        found = read_layer_ropes(reader, 1024, thetas)
        reader.finish()
        assert found == {"full_attention": RopeConfig(type="linear", theta=1e6, factor=8.0), "sliding_attention": RopeConfig(theta=1e4)}
    with pytest.raises(ConfigError, match="expected an object with full_attention, sliding_attention"):
        read_layer_ropes(ConfigReader({"rope_parameters": {"rope_theta": 1e4}}, "gemma3"), 1024, thetas)


def test_longrope_wants_a_factor_for_each_pair():
    rope = RopeConfig(type="longrope", short_factor=(1.0,), long_factor=(1.0,), original_max_position_embeddings=8)
    with pytest.raises(ConfigError, match="long_factor has 1 numbers, expected one for each of 4 pairs"):
        rope_tables(rope, 8, 9)
