"""Qwen3 (Yang et al., 2025), dense: each query and key head is normalized before it is rotated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..ops import Handle, Ops, Parameter, Rope
from .config import ModelConfig, read_decoder
from .config_values import read_switch
from .decoder import Attention, CausalLM
from .layers import plain_parameter
from .qwen2 import DEFAULTS, read_window


class Qwen3Attention(Attention):
    """Attention with a norm for queries and one for keys, shared by their heads."""

    def __init__(self, config: ModelConfig, layer: int, rope: Rope) -> None:
        super().__init__(config, layer, rope)
        name, shape = f"model.layers.{layer}.self_attn", (config.head_dim,)
        self.eps = config.rms_norm_eps
        self.q_norm = plain_parameter(f"{name}.q_norm.weight", shape)
        self.k_norm = plain_parameter(f"{name}.k_norm.weight", shape)

    def normalize(self, ops: Ops, qkv: Handle) -> Handle:
        return ops.head_rms_norm(qkv, self.q_norm, self.k_norm, self.eps, self.shape)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.qkv_proj.parameters()
        yield from (self.q_norm, self.k_norm)
        yield from self.o_proj.parameters()


class Qwen3ForCausalLM(CausalLM):
    """The dense models of Qwen3."""

    attention = Qwen3Attention

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> ModelConfig:
        config = {**DEFAULTS, "head_dim": 128, **config}
        has_bias = read_switch(config, "attention_bias")
        return read_decoder(
            config, qkv_bias=has_bias, o_bias=has_bias, sliding_window=read_window(config)
        )
