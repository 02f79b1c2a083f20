"""Llama (Touvron et al., 2023): RMSNorm, rotary positions, grouped queries, SwiGLU.

Owns the architecture and nothing else; computes only through `Ops`. Module names equal the names
in Hugging Face checkpoints.

Shapes: T tokens in the step, R rows that want logits, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import AttentionShape, Batch, Handle, Ops, Parameter, Rope
from .config import ModelConfig
from .layers import Linear, RMSNorm, plain_parameter


class Attention:
    """Causal self-attention over the paged KV cache."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.shape = AttentionShape(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.rope = Rope(config.rope_theta, config.head_dim, config.max_position_embeddings)
        self.scale = config.head_dim**-0.5
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.qkv_proj = Linear(
            f"{name}.qkv_proj",
            config.hidden_size,
            {f"{name}.q_proj": q_width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width},
            bias=config.attention_bias,
        )
        self.o_proj = Linear(
            f"{name}.o_proj",
            q_width,
            {f"{name}.o_proj": config.hidden_size},
            bias=config.attention_bias,
        )

    def __call__(self, ops: Ops, x: Handle, batch: Batch) -> Handle:
        qkv = self.qkv_proj(ops, x)  # [T, qkv_width]
        qkv = ops.rotary(qkv, batch.positions, self.rope, self.shape)
        ops.store_kv(qkv, batch, self.layer, self.shape)
        attended = ops.paged_attention(qkv, batch, self.layer, self.shape, self.scale)
        return self.o_proj(ops, attended)  # [T, H]

    def parameters(self) -> Iterator[Parameter]:
        yield from self.qkv_proj.parameters()
        yield from self.o_proj.parameters()


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up computed as one."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}.mlp"
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(
            f"{name}.gate_up_proj",
            hidden,
            {f"{name}.gate_proj": intermediate, f"{name}.up_proj": intermediate},
            bias=config.mlp_bias,
        )
        self.down_proj = Linear(
            f"{name}.down_proj", intermediate, {f"{name}.down_proj": hidden}, bias=config.mlp_bias
        )

    def __call__(self, ops: Ops, x: Handle) -> Handle:
        return self.down_proj(ops, ops.silu_mul(self.gate_up_proj(ops, x)))

    def parameters(self) -> Iterator[Parameter]:
        yield from self.gate_up_proj.parameters()
        yield from self.down_proj.parameters()


class DecoderLayer:
    """Attention and MLP, each after its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm", hidden, eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp = MLP(config, layer)

    def parameters(self) -> Iterator[Parameter]:
        for part in (
            self.input_layernorm,
            self.self_attn,
            self.post_attention_layernorm,
            self.mlp,
        ):
            yield from part.parameters()


class LlamaForCausalLM:
    """The whole model: token ids of a step -> hidden states -> logits."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        self.embed_tokens = plain_parameter("model.embed_tokens.weight", table)
        self.layers = [DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
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
        x = ops.embedding(batch.token_ids, self.embed_tokens)  # [T, H]
        residual = None
        for layer in self.layers:
            if residual is None:
                residual, x = x, layer.input_layernorm(ops, x)
            else:
                x, residual = layer.input_layernorm.add(ops, x, residual)
            x = layer.self_attn(ops, x, batch)
            x, residual = layer.post_attention_layernorm.add(ops, x, residual)
            x = layer.mlp(ops, x)
        # The norm works row by row, so only the rows that are needed go through it.
        x = ops.select_rows(x, batch.logit_rows)
        hidden, _ = self.norm.add(ops, x, ops.select_rows(residual, batch.logit_rows))
        return hidden

    def logits(self, ops: Ops, hidden: Handle) -> Handle:
        """[R, H] -> [R, vocab_size]."""
        return ops.linear(hidden, self.lm_head)
