"""Mistral (Jiang et al., 2023): Llama without biases, whose layers may attend to a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, read_decoder
from .config_values import read_size
from .decoder import CausalLM

# A config that doesn't name a window has one; those without say null.
DEFAULTS = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


class MistralForCausalLM(CausalLM):
    """Mistral 7B, Nemo and Small."""

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> ModelConfig:
        config = {**DEFAULTS, **config}
        has_window = config["sliding_window"] is not None
        return read_decoder(
            config, sliding_window=read_size(config, "sliding_window") if has_window else None
        )
