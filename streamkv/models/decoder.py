"""The decoder that the architectures share: RMSNorm, rotary positions, grouped queries, SwiGLU.

Owns the layers and their order, and nothing that only one architecture has; computes only through
`Ops`. Module names equal the names in Hugging Face checkpoints. Invariant: an architecture is a
subclass of `CausalLM` that reads its own config, and says where its attention differs.

Shapes: T tokens in the step, R rows that want logits, H hidden size, I intermediate size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ..ops import AttentionShape, Batch, Handle, Ops, Parameter, Rope
from .config import ModelConfig
from .layers import GatedLinear, Linear, RMSNorm, plain_parameter
from .rope import build_rope


class Attention:
    """Causal self-attention over the paged KV cache."""

    def __init__(self, config: ModelConfig, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.rope = rope
        self.shape = AttentionShape(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.scale = config.head_dim**-0.5
        kv_width = config.num_key_value_heads * config.head_dim
        self.qkv_proj = Linear(
            f"{name}.qkv_proj",
            config.hidden_size,
            {
                f"{name}.q_proj": self.shape.q_width,
                f"{name}.k_proj": kv_width,
                f"{name}.v_proj": kv_width,
            },
            bias=config.qkv_bias,
        )
        self.o_proj = Linear(
            f"{name}.o_proj",
            self.shape.q_width,
            {f"{name}.o_proj": config.hidden_size},
            bias=config.o_bias,
        )

    def __call__(self, ops: Ops, x: Handle, residual: Handle, batch: Batch) -> Handle:
        qkv = self.normalize(ops, self.qkv_proj(ops, x))  # [T, qkv_width]
        qkv = ops.rotary(qkv, batch.positions, self.rope, self.shape)
        ops.store_kv(qkv, batch, self.layer, self.shape)
        attended = ops.paged_attention(qkv, batch, self.layer, self.shape, self.scale)
        return self.o_proj(ops, attended, residual)  # [T, H]

    def normalize(self, ops: Ops, qkv: Handle) -> Handle:
        """[T, qkv_width] -> same: what becomes of the heads before they are rotated."""
        return qkv

    def parameters(self) -> Iterator[Parameter]:
        yield from self.qkv_proj.parameters()
        yield from self.o_proj.parameters()


class MLP:
    """residual + down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}.mlp"
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_up_proj = GatedLinear(
            f"{name}.gate_up_proj",
            hidden,
            f"{name}.gate_proj",
            f"{name}.up_proj",
            intermediate,
            bias=config.mlp_bias,
        )
        self.down_proj = Linear(
            f"{name}.down_proj", intermediate, {f"{name}.down_proj": hidden}, bias=config.mlp_bias
        )

    def __call__(self, ops: Ops, x: Handle, residual: Handle) -> Handle:
        return self.down_proj(ops, self.gate_up_proj(ops, x), residual)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.gate_up_proj.parameters()
        yield from self.down_proj.parameters()


class DecoderLayer:
    """Attention and MLP, each after its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, attention: Attention) -> None:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm", hidden, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp = MLP(config, layer)

    def attend(self, ops: Ops, x: Handle, batch: Batch) -> Handle:
        """The first half, [T, H] -> [T, H]: all in which tokens see each other."""
        return self.self_attn(ops, self.input_layernorm(ops, x), x, batch)

    def transform(self, ops: Ops, x: Handle) -> Handle:
        """The second half, row by row."""
        return self.mlp(ops, self.post_attention_layernorm(ops, x), x)

    def parameters(self) -> Iterator[Parameter]:
        for part in (
            self.input_layernorm,
            self.self_attn,
            self.post_attention_layernorm,
            self.mlp,
        ):
            yield from part.parameters()


class CausalLM(ABC):
    """The whole model: token ids of a step -> hidden states -> logits."""

    attention: ClassVar[type[Attention]] = Attention

    @staticmethod
    @abstractmethod
    def read_config(config: Mapping[str, Any]) -> ModelConfig:
        """The content of a config.json of this architecture. ModelLoadError names the key."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        rope = build_rope(config.rope, config.head_dim, config.max_position_embeddings)
        self.embed_tokens = plain_parameter("model.embed_tokens.weight", table)
        self.layers = [
            DecoderLayer(config, layer, self.attention(config, layer, rope))
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = plain_parameter("lm_head.weight", table)

    def parameters(self) -> Iterator[Parameter]:
        """Every weight once, in the order of computation."""
        yield self.embed_tokens
        for layer in self.layers:
            yield from layer.parameters()
        yield from self.norm.parameters()
        if self.lm_head is not self.embed_tokens:
            yield self.lm_head

    def forward(self, ops: Ops, batch: Batch) -> Handle:
        """Hidden states [R, H] of the rows that want logits; the KV of all T tokens is stored."""
        *layers, last = self.layers
        x = ops.embedding(batch.token_ids, self.embed_tokens)  # [T, H], the residual stream
        for layer in layers:
            x = layer.transform(ops, layer.attend(ops, x, batch))
        # After the last attention each row is on its own: only those that want logits go on.
        x = ops.select_rows(last.attend(ops, x, batch), batch.logit_rows)
        return self.norm(ops, last.transform(ops, x))

    def logits(self, ops: Ops, hidden: Handle) -> Handle:
        """[R, H] -> [R, vocab_size]."""
        return ops.linear(hidden, self.lm_head)
