"""Rotary positions against transformers: the frequencies of every scaling, and the tables."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from streamkv.errors import ModelLoadError
from streamkv.models.rope import RopeConfig, build_rope, read_rope, rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
FACTORS = [1.0 + 0.25 * index for index in range(32)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": FACTORS,
    "long_factor": FACTORS,
    "original_max_position_embeddings": 1024,
}
MAX_POSITIONS = 8192

# what config.json says besides its sizes: max_position_embeddings is 8192, heads are of 64
CONFIGS = {
    "nothing": {},
    "theta": {"rope_theta": 500000.0},
    "new-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "linear-old": {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 26000.0},
    "linear-null": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": None}},
    "linear-others-keys": {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 8}},
    "plain-neutral": {"rope_scaling": {"rope_type": "default", "factor": 1.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "llama3-short": {
        "rope_parameters": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 512}
    },
    "llama3-old": {"rope_scaling": LLAMA3 | {"low_freq_factor": 2, "high_freq_factor": 3.5}},
    "yarn": {"rope_parameters": YARN},
    "yarn-old": {"rope_scaling": {"type": "yarn", "factor": 16, "finetuned": True}},
    "yarn-betas": {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2, "factor": 8.0}},
    "yarn-not-truncated": {"rope_parameters": YARN | {"truncate": False}},
    "yarn-attention-factor": {"rope_parameters": YARN | {"attention_factor": 0.75}},
    "yarn-mscale": {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3}},
    "yarn-mscale-alone": {"rope_parameters": YARN | {"mscale": 0.707}},
    "yarn-no-factor": {"rope_parameters": YARN | {"factor": None}},
    "yarn-theta": {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "yarn-all-fast": {"rope_parameters": YARN | {"original_max_position_embeddings": 10**9}},
    "yarn-all-slow": {"rope_parameters": YARN | {"original_max_position_embeddings": 4}},
    "yarn-original-outside": {
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0},
        "original_max_position_embeddings": 1024,
    },
    "yarn-original-twice": {"rope_parameters": YARN, "original_max_position_embeddings": 512},
    "longrope": {"rope_parameters": LONGROPE},
    "longrope-attention-factor": {"rope_parameters": LONGROPE | {"attention_factor": 1.5}},
    "longrope-factor": {"rope_parameters": LONGROPE | {"factor": 3.0}},
    "longrope-not-longer": {
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": MAX_POSITIONS}
    },
}


def copied(config: dict) -> dict:
    """transformers completes the objects that it is given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}


def read(config: dict) -> RopeConfig:
    return read_rope(copied(config), MAX_POSITIONS)


def oracle_of(config: dict) -> LlamaRotaryEmbedding:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
    return LlamaRotaryEmbedding(
        transformers.LlamaConfig(**sizes, max_position_embeddings=MAX_POSITIONS, **copied(config))
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_and_magnitude_equal_transformers(name):
    rope = build_rope(read(CONFIGS[name]), 64, MAX_POSITIONS)
    oracle = oracle_of(CONFIGS[name])
    assert (rope.head_dim, rope.max_positions) == (64, MAX_POSITIONS)
    assert math.isclose(rope.magnitude, oracle.attention_scaling, rel_tol=1e-12)
    found = np.array(rope.frequencies)
    assert np.array_equal(found, found.astype(np.float32))  # float32 values
    # A float32 power differs by a unit or two in the last place from library to library.
    np.testing.assert_allclose(found, oracle.inv_freq.double().numpy(), rtol=4e-7, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_table_is_transformers_cosines_then_sines(name):
    """From transformers' own frequencies, so that far positions can be compared closely too."""
    oracle = oracle_of(CONFIGS[name])
    rope = build_rope(read(CONFIGS[name]), 64, MAX_POSITIONS)
    rope = dataclasses.replace(rope, frequencies=tuple(oracle.inv_freq.tolist()))
    table = rope_table(rope, MAX_POSITIONS)
    assert table.dtype == np.float32 and table.shape == (MAX_POSITIONS, 64)
    cos, sin = oracle(torch.zeros(1), torch.arange(MAX_POSITIONS)[None])  # [1, positions, 64]
    expected = torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=-1).numpy()
    np.testing.assert_allclose(table, expected, rtol=0, atol=5e-7)


def test_a_table_is_as_long_as_asked_and_a_longer_one_begins_with_it():
    rope = build_rope(read({}), 64, MAX_POSITIONS)
    longer = rope_table(rope, 5000)
    assert np.array_equal(rope_table(rope, 100), longer[:100])
    assert rope_table(rope, 0).shape == (0, 64)
    assert np.array_equal(longer[0], np.repeat(np.float32([1, 0]), 32))


def test_the_number_of_heads_factors_must_fit():
    with pytest.raises(ModelLoadError, match="short_factor to be a list of 16 numbers, got 32"):
        build_rope(read({"rope_parameters": LONGROPE}), 32, MAX_POSITIONS)


def test_old_and_new_keys_may_say_the_same_but_not_different_things():
    both = {"rope_parameters": YARN, "rope_scaling": YARN | {"type": "yarn"}}
    assert read(both) == read({"rope_parameters": YARN})
    for other in ({"rope_type": "default"}, YARN | {"factor": 8.0}, YARN | {"rope_theta": 1e6}):
        with pytest.raises(ModelLoadError, match="rope_scaling and rope_parameters disagree"):
            read(both | {"rope_scaling": other})


def test_empty_objects_say_nothing():
    assert read({"rope_parameters": {}, "rope_scaling": None}) == read({})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": 3}, "rope_parameters to be an object or null"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling asks for 'dynamic'"),
        ({"rope_parameters": {"rope_type": ["x"]}}, r"asks for \['x'\] rotary embeddings"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "got 'linear'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor to be a number of at least 1"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": True}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": math.nan}}, "factor"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta"),
        ({"rope_scaling": {"factor": 8.0}}, r"rope_scaling\.factor to be absent .* got 8\.0"),
        ({"rope_parameters": {"short_factor": FACTORS}}, r"rope_parameters\.short_factor"),
        ({"rope_parameters": LLAMA3 | {"facter": 8.0}}, r"rope_parameters\.facter is not sup"),
        ({"rope_scaling": {"rope_typ": "linear", "factor": 8.0}}, r"rope_scaling\.rope_typ is"),
        ({"rope_parameters": {"full_attention": LLAMA3}}, r"rope_parameters\.full_attention"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "factor"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "more than low_freq_factor 1.0"),
        ({"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_parameters": YARN | {"attention_factor": 0.0}}, "attention_factor"),
        ({"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 2}}, "beta_fast to be at least"),
        ({"rope_parameters": YARN | {"truncate": "no"}}, "truncate"),
        ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "more than 1 for yarn"),
        ({"rope_parameters": LONGROPE | {"long_factor": FACTORS[::-1]}}, "the same list"),
        ({"rope_parameters": LONGROPE | {"short_factor": 4, "long_factor": 4}}, "the same list"),
        ({"rope_parameters": {**LONGROPE, "short_factor": [0], "long_factor": [0]}}, "positive"),
        ({"rope_theta": 1e29, "rope_parameters": {"rope_type": "linear", "factor": 1e29}}, "gives"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(config, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        build_rope(read(config), 64, MAX_POSITIONS)
    assert "\n" not in caught.value.message
