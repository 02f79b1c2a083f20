"""Qwen2 (Yang et al., 2024) and Qwen2.5: Llama with biases on queries, keys and values.

Owns how Qwen's configs say which layers attend to a window, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, read_decoder
from .config_values import read_size, read_switch, unexpected
from .decoder import CausalLM

DEFAULTS = {"max_position_embeddings": 32_768, "num_key_value_heads": 32}
LAYER_TYPES = ("full_attention", "sliding_attention")


class Qwen2ForCausalLM(CausalLM):
    """Qwen2, Qwen2.5, QwQ, and what was distilled into them."""

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> ModelConfig:
        config = {**DEFAULTS, **config}
        return read_decoder(config, qkv_bias=True, sliding_window=read_window(config))


def read_window(config: Mapping[str, Any]) -> int | None:
    """The window of the layers that attend to one; None if none does. Most configs name a window,
    and switch it off."""
    has_window = _has_windowed_layers(config)
    if not read_switch(config, "use_sliding_window"):
        if has_window and config.get("layer_types"):
            raise unexpected("use_sliding_window", "true, as layer_types has windows", False)
        return None
    if not has_window or config.get("sliding_window", 0) is None:
        return None
    return read_size(config, "sliding_window", default=4096)


def _has_windowed_layers(config: Mapping[str, Any]) -> bool:
    """Those that `layer_types` names, or all after the first `max_window_layers`."""
    kinds = config.get("layer_types")
    if kinds is None:
        first = read_size(config, "max_window_layers", default=28, least=0)
        return first < read_size(config, "num_hidden_layers")
    if not isinstance(kinds, list) or not all(kind in LAYER_TYPES for kind in kinds):
        raise unexpected("layer_types", f"a list of {' and '.join(LAYER_TYPES)}", kinds)
    return "sliding_attention" in kinds
