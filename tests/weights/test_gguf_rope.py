"""Rotary positions of GGUF files: the angles are those of the checkpoint they were made from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from streamkv.errors import ModelLoadError
from streamkv.models.rope import build_rope, read_rope
from streamkv.weights.gguf_rope import rope_parameters

PATH = Path("model.gguf")
MAX_POSITIONS = 4096
SCALING = "llama.rope.scaling."
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 500000.0,
}


def converted(metadata: dict[str, Any], pair_factors: np.ndarray | None = None) -> dict[str, Any]:
    return rope_parameters({"general.architecture": "llama"} | metadata, pair_factors, PATH)


def llama3_factors() -> np.ndarray:
    """By what llama.cpp's converter says each frequency is divided: float32 [head_dim / 2]."""
    factors = []
    for pair in range(32):
        frequency = LLAMA3["rope_theta"] ** (-2 * pair / 64)
        turns = LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("metadata", "original"),
    [
        ({}, {"rope_type": "default"}),
        ({f"{SCALING}factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({f"{SCALING}type": "linear", f"{SCALING}factor": 4}, {"rope_type": "linear", "factor": 4}),
        ({"llama.rope.scale_linear": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        (
            {
                f"{SCALING}type": "yarn",
                f"{SCALING}factor": 8.0,
                f"{SCALING}original_context_length": 512,
                f"{SCALING}finetuned": True,
            },
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
        ),
        (
            {
                f"{SCALING}type": "yarn",
                f"{SCALING}factor": 2.0,
                f"{SCALING}original_context_length": 2048,
                f"{SCALING}yarn_beta_fast": 20.0,
                f"{SCALING}yarn_beta_slow": 2.0,
                f"{SCALING}attn_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 2048,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
            },
        ),
        ({"rope_freqs.weight": llama3_factors()}, LLAMA3),
        (
            {
                "general.architecture": "qwen2",
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 1024,
                f"{SCALING}factor": 7.0,  # of another architecture
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
    ],
)
def test_scaled_positions_turn_as_those_of_the_original_checkpoint(metadata, original):
    pair_factors = metadata.pop("rope_freqs.weight", None)
    config = {"rope_theta": 500000.0, "rope_parameters": converted(metadata, pair_factors)}
    rope = build_rope(read_rope(config, MAX_POSITIONS), 64, MAX_POSITIONS)
    oracle = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=512,
            num_attention_heads=8,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={"rope_theta": 500000.0} | original,
        )
    )
    frequencies = torch.tensor(rope.frequencies)
    torch.testing.assert_close(frequencies, oracle.inv_freq, rtol=1e-6, atol=0)
    assert math.isclose(rope.magnitude, oracle.attention_scaling, rel_tol=1e-6)


@pytest.mark.parametrize(
    "metadata",
    [
        {f"{SCALING}type": "none", f"{SCALING}factor": 8.0},
        {f"{SCALING}type": "linear"},
        {f"{SCALING}factor": 1.0, "llama.rope.scale_linear": 0.0},
        {f"{SCALING}type": "yarn", f"{SCALING}factor": 1.0},
        {f"{SCALING}yarn_log_multiplier": 0.0},
    ],
)
def test_positions_that_are_said_to_be_plain_are(metadata):
    assert converted(metadata) == {}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({f"{SCALING}type": "longrope"}, "type is 'longrope'"),
        ({f"{SCALING}type": 3}, "type is 3"),
        ({f"{SCALING}attn_factor": 1.2}, "attn_factor is 1.2"),
        ({f"{SCALING}yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({f"{SCALING}yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
    ],
)
def test_what_would_turn_otherwise_is_refused_by_key(metadata, message):
    with pytest.raises(ModelLoadError, match=f"model.gguf: .*{message}"):
        converted(metadata)


def test_factors_of_pairs_and_of_all_positions_at_once_are_refused():
    with pytest.raises(ModelLoadError, match="rope_freqs.weight and .*factor 4.0"):
        converted({f"{SCALING}factor": 4.0}, llama3_factors())


def test_a_factor_that_is_no_number_is_refused():
    for factor in ("1", True, -2.0):
        parameters = converted({f"{SCALING}factor": factor})
        with pytest.raises(ModelLoadError, match="expected factor to be"):
            read_rope({"rope_parameters": parameters}, MAX_POSITIONS)
