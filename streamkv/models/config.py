"""ModelConfig: the facts of a checkpoint that a model is built from.

Owns what architectures read alike from a Hugging Face `config.json` (other formats are translated
to its names before they come here); what only one of them says is read in its own file. Knows
nothing of files, weights or devices. Invariant: a ModelConfig describes a model this package
computes exactly; what it can't compute is a ModelLoadError, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ModelLoadError
from .config_values import read_number, read_size, read_switch, unexpected
from .rope import RopeConfig, read_rope

# A broken config must not make us build a billion layers, or frequencies for a billion pairs.
MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    sliding_window: int | None  # the last tokens that some layers attend to; None: all do to all
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool

    @property
    def max_context_len(self) -> int:
        """Tokens that a sequence may have. Attention is computed over all of them, which is the
        same as over a window while they fit into it."""
        longest = self.max_position_embeddings
        return min(longest, self.sliding_window or longest)


def read_architecture(config: Mapping[str, Any]) -> str:
    """The name of the class that a config.json was made for. ModelLoadError."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise unexpected("architectures", "a list with a class name", architectures)
    return str(architectures[0])


def read_decoder(
    config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    sliding_window: int | None = None,
) -> ModelConfig:
    """What all architectures say alike, and their own, given. ModelLoadError names the key."""
    hidden_size = read_size(config, "hidden_size")
    num_heads = read_size(config, "num_attention_heads", most=MAX_HEADS)
    max_positions = read_size(config, "max_position_embeddings")
    model_config = ModelConfig(
        architecture=read_architecture(config),
        vocab_size=read_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_size(config, "intermediate_size"),
        num_hidden_layers=read_size(config, "num_hidden_layers", most=MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=read_size(
            config, "num_key_value_heads", default=num_heads, most=MAX_HEADS
        ),
        head_dim=read_size(config, "head_dim", default=hidden_size // num_heads, most=MAX_HEAD_DIM),
        max_position_embeddings=max_positions,
        sliding_window=sliding_window,
        rms_norm_eps=read_number(config, "rms_norm_eps", default=1e-6),
        rope=read_rope(config, max_positions),
        tie_word_embeddings=read_switch(config, "tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
    )
    _check_supported(config, model_config)
    return model_config


def _check_supported(config: Mapping[str, Any], model_config: ModelConfig) -> None:
    """Raise for what the sizes contradict and for switches that change the arithmetic."""
    heads, kv_heads = model_config.num_attention_heads, model_config.num_key_value_heads
    if heads % kv_heads:
        raise unexpected("num_key_value_heads", f"a divisor of {heads} attention heads", kv_heads)
    if model_config.head_dim % 2:
        raise unexpected("head_dim", "an even number", model_config.head_dim)
    if config.get("hidden_act", "silu") != "silu":
        raise unexpected("hidden_act", "'silu'", config["hidden_act"])
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise unexpected("partial_rotary_factor", "1.0", config["partial_rotary_factor"])
    if config.get("quantization_config") is not None:
        raise ModelLoadError(
            "model config: quantization_config is not supported; "
            "use an unquantized checkpoint or a GGUF file"
        )
