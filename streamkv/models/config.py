"""ModelConfig: the facts of a checkpoint that a model is built from.

Owns the reading of a Hugging Face `config.json` (other formats are translated to its names before
they come here). Knows nothing of files, weights or devices. Invariant: a ModelConfig describes a
model this package computes exactly; what it can't compute is a ModelLoadError, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ModelLoadError

MAX_LAYERS = 4096  # a broken config must not make us build a billion layers
MAX_SIZE = 2**31 - 1


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of a decoder-only transformer, by their Hugging Face names."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a config.json. Raises ModelLoadError naming the key at fault."""
        hidden_size = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        model_config = cls(
            architecture=_architecture(config),
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_hidden_layers=_size(config, "num_hidden_layers", most=MAX_LAYERS),
            num_attention_heads=num_heads,
            num_key_value_heads=_size(config, "num_key_value_heads", default=num_heads),
            head_dim=_size(config, "head_dim", default=hidden_size // num_heads),
            max_position_embeddings=_size(config, "max_position_embeddings", default=2048),
            rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
            rope_theta=_rope_theta(config),
            tie_word_embeddings=_switch(config, "tie_word_embeddings"),
            attention_bias=_switch(config, "attention_bias"),
            mlp_bias=_switch(config, "mlp_bias"),
        )
        _check_supported(config, model_config)
        return model_config


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise _unexpected("architectures", "a list with a class name", architectures)
    return str(architectures[0])


def _size(
    config: Mapping[str, Any], key: str, *, default: int | None = None, most: int = MAX_SIZE
) -> int:
    """A whole number in [1, most]; `default` stands for a missing key or null."""
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _unexpected(key, f"a whole number from 1 to {most}", value)
    return value


def _number(config: Mapping[str, Any], key: str, *, default: float) -> float:
    """A positive, finite number; `default` stands for a missing key or null."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise _unexpected(key, "a positive number", value)
    return float(value)


def _switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise _unexpected(key, "true or false", value)
    return value


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of plain rotary embedding; transformers 5 keeps it in `rope_parameters`.

    All places are checked before one counts: older and newer keys may stand side by side.
    """
    theta = _number(config, "rope_theta", default=10000.0)
    for key in ("rope_scaling", "rope_parameters"):  # the newer one wins
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise _unexpected(key, "an object or null", rope)
        for kind in (rope.get("rope_type", "default"), rope.get("type", "default")):
            if kind != "default":
                raise ModelLoadError(
                    f"model config: {key} asks for {kind!r:.100} rotary embeddings; "
                    "only plain ones ('default') are supported"
                )
        if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise _unexpected("partial_rotary_factor", "1.0", rope["partial_rotary_factor"])
        theta = _number(rope, "rope_theta", default=theta)
    return theta


def _check_supported(config: Mapping[str, Any], model_config: ModelConfig) -> None:
    """Raise for what the sizes contradict and for switches that change the arithmetic."""
    heads, kv_heads = model_config.num_attention_heads, model_config.num_key_value_heads
    if heads % kv_heads:
        raise _unexpected("num_key_value_heads", f"a divisor of {heads} attention heads", kv_heads)
    if model_config.head_dim % 2:
        raise _unexpected("head_dim", "an even number", model_config.head_dim)
    if config.get("hidden_act", "silu") != "silu":
        raise _unexpected("hidden_act", "'silu'", config["hidden_act"])
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise _unexpected("partial_rotary_factor", "1.0", config["partial_rotary_factor"])
    if config.get("quantization_config") is not None:
        raise ModelLoadError(
            "model config: quantization_config is not supported; "
            "use an unquantized checkpoint or a GGUF file"
        )


def _unexpected(key: str, expected: str, got: object) -> ModelLoadError:
    return ModelLoadError(f"model config: expected {key} to be {expected}, got {got!r:.100}")
