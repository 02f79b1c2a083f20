"""Llama (Touvron et al., 2023; Dubey et al., 2024): the plain decoder.

Its config may ask for biases in all projections of attention, or of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, read_decoder
from .config_values import read_switch
from .decoder import CausalLM

DEFAULTS = {"max_position_embeddings": 2048}


class LlamaForCausalLM(CausalLM):
    """Llama 1 to 3.3, and what was built like them."""

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> ModelConfig:
        has_bias = read_switch(config, "attention_bias")
        return read_decoder(
            {**DEFAULTS, **config},
            qkv_bias=has_bias,
            o_bias=has_bias,
            mlp_bias=read_switch(config, "mlp_bias"),
        )
