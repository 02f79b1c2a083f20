"""Eager: runs each op of a model's forward at once, by calling a table of kernels.

Owns the binding of names to tensors: parameters to weights, layers to the KV cache, a Rope to its
table of angles. Knows nothing of models or steps. Invariant: it computes nothing itself; with the
reference table it is the oracle on any device, with the native table it is the CPU's engine.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..ops import AttentionShape, Batch, Parameter, Rope
from ..ops.kernels import KernelTable


class Eager:
    """Implements `ops.Ops` on tensors; handles are tensors of the weights' dtype and device."""

    def __init__(
        self,
        kernels: KernelTable,
        weights: Mapping[str, Tensor],
        kv_cache: Tensor,
        *,
        max_model_len: int,
    ) -> None:
        self._kernels = kernels
        self._weights = weights
        self._kv_cache = kv_cache  # [blocks, layers, 2, num_kv_heads, block_size, head_dim]
        self._max_model_len = max_model_len
        self._rope_tables: dict[Rope, Tensor] = {}

    def embedding(self, token_ids: Tensor, weight: Parameter) -> Tensor:
        return self._kernels.embedding(token_ids, self._weights[weight.name])

    def rms_norm(self, x: Tensor, weight: Parameter, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, self._weights[weight.name], eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Parameter, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, self._weights[weight.name], eps)

    def linear(self, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
        bias_tensor = None if bias is None else self._weights[bias.name]
        return self._kernels.linear(x, self._weights[weight.name], bias_tensor)

    def rotary(self, qkv: Tensor, positions: Tensor, rope: Rope, shape: AttentionShape) -> Tensor:
        table = self._rope_tables.get(rope)
        if table is None:
            num_positions = min(rope.max_positions, self._max_model_len)
            table = rope_table(rope, num_positions).to(qkv.device)
            self._rope_tables[rope] = table
        return self._kernels.rotary(qkv, positions, table, shape)

    def store_kv(self, qkv: Tensor, batch: Batch, layer: int, shape: AttentionShape) -> None:
        self._kernels.store_kv(qkv, self._kv_cache, batch.slots, layer, shape)

    def paged_attention(
        self, qkv: Tensor, batch: Batch, layer: int, shape: AttentionShape, scale: float
    ) -> Tensor:
        return self._kernels.paged_attention(
            qkv,
            self._kv_cache,
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            layer,
            shape,
            scale,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_mul(gate_up)

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._kernels.select_rows(x, rows)


def rope_table(rope: Rope, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: head_dim/2 cosines, then head_dim/2 sines.

    The angle is a float32 product of position and frequency, as in the training code of these
    models: a more exact one would rotate far positions differently from what they learnt.
    """
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    frequencies = 1.0 / rope.theta**exponents  # [head_dim / 2]
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
