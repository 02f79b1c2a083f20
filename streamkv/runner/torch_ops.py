"""TorchOps: runs each op of a model's forward at once, by calling a table of torch kernels.

Owns the binding of names to tensors: parameters to weights, layers to the KV cache, a Rope to its
table of angles. Knows nothing of models or steps. Invariant: it computes nothing itself; with the
reference table it is the oracle of the others, on any device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..models.rope import rope_table
from ..ops import AttentionShape, Batch, Parameter, Rope
from ..ops.kernels import KernelTable


class TorchOps:
    """Implements `ops.Ops` on tensors; weights and KV cache share a dtype and a device."""

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

    def linear(
        self,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return self._kernels.linear(x, self._weights[weight.name], self._find(bias), residual)

    def linear_silu_mul(
        self, x: Tensor, weight: Parameter, bias: Parameter | None = None
    ) -> Tensor:
        return self._kernels.linear_silu_mul(x, self._weights[weight.name], self._find(bias))

    def head_rms_norm(
        self,
        qkv: Tensor,
        q_weight: Parameter,
        k_weight: Parameter,
        eps: float,
        shape: AttentionShape,
    ) -> Tensor:
        q_norm, k_norm = self._weights[q_weight.name], self._weights[k_weight.name]
        return self._kernels.head_rms_norm(qkv, q_norm, k_norm, eps, shape)

    def rotary(self, qkv: Tensor, positions: Tensor, rope: Rope, shape: AttentionShape) -> Tensor:
        table = self._rope_tables.get(rope)
        if table is None:
            num_positions = min(rope.max_positions, self._max_model_len)
            table = torch.from_numpy(rope_table(rope, num_positions)).to(qkv.device)
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

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._kernels.select_rows(x, rows)

    def _find(self, parameter: Parameter | None) -> Tensor | None:
        return None if parameter is None else self._weights[parameter.name]
