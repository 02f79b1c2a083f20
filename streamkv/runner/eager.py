"""Eager: runs each op of a model's forward at once on the native kernels, for debugging.

Owns the binding of names to weights and of a Rope to its table. Values are numpy arrays that can
be looked at between any two ops. Imports no torch. Invariant: the bits are those of the recorded
program, which runs the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.rope import rope_table
from ..ops import AttentionShape, Batch, Parameter, Rope
from .recorder import input_dtype

Array = NDArray[Any]  # float32, or uint16 bits of bfloat16


class Eager:
    """Implements `ops.Ops` on arrays, over a `_cpu.Team`, packed weights and a `_cpu.KvCache`."""

    def __init__(
        self, team: Any, weights: Mapping[str, Any], cache: Any, *, max_model_len: int
    ) -> None:
        from streamkv import _cpu

        self._cpu = _cpu
        self._team = team
        self._weights = weights
        self._cache = cache
        self._input_dtype = input_dtype(weights)
        self._max_model_len = max_model_len
        self._rope_tables: dict[Rope, Array] = {}
        self._native_batch: tuple[Batch, Any] | None = None

    def embedding(self, token_ids: Array, weight: Parameter) -> Array:
        return self._cpu.ops.embedding(self._team, token_ids, self._weights[weight.name])

    def rms_norm(self, x: Array, weight: Parameter, eps: float) -> Array:
        return self._cpu.ops.rms_norm(
            self._team, x, self._weights[weight.name], eps, self._input_dtype
        )

    def linear(
        self,
        x: Array,
        weight: Parameter,
        bias: Parameter | None = None,
        residual: Array | None = None,
    ) -> Array:
        return self._cpu.ops.linear(
            self._team, x, self._weights[weight.name], self._find(bias), residual
        )

    def linear_silu_mul(self, x: Array, weight: Parameter, bias: Parameter | None = None) -> Array:
        return self._cpu.ops.linear_silu_mul(
            self._team, x, self._weights[weight.name], self._find(bias)
        )

    def rotary(self, qkv: Array, positions: Array, rope: Rope, shape: AttentionShape) -> Array:
        table = self._rope_tables.get(rope)
        if table is None:
            table = rope_table(rope, min(rope.max_positions, self._max_model_len))
            self._rope_tables[rope] = table
        return self._cpu.ops.rotary(
            self._team, qkv, positions, table, shape.num_heads, shape.num_kv_heads
        )

    def store_kv(self, qkv: Array, batch: Batch, layer: int, shape: AttentionShape) -> None:
        self._cpu.ops.store_kv(self._team, qkv, self._cache, batch.slots, layer, shape.num_heads)

    def paged_attention(
        self, qkv: Array, batch: Batch, layer: int, shape: AttentionShape, scale: float
    ) -> Array:
        return self._cpu.ops.paged_attention(
            self._team,
            qkv,
            self._cache,
            self._as_native(batch),
            layer,
            shape.num_heads,
            scale,
            self._input_dtype,
        )

    def select_rows(self, x: Array, rows: Array) -> Array:
        return self._cpu.ops.select_rows(self._team, x, rows)

    def _as_native(self, batch: Batch) -> Any:
        """The batch as a `_cpu.Batch`, made once for all layers."""
        if not isinstance(batch, Batch):
            return batch  # it is one already, with the same names for its arrays
        if self._native_batch is None or self._native_batch[0] is not batch:
            arrays = (np.ascontiguousarray(array, np.int32) for array in batch)
            self._native_batch = (batch, self._cpu.Batch(*arrays))
        return self._native_batch[1]

    def _find(self, parameter: Parameter | None) -> Any:
        return None if parameter is None else self._weights[parameter.name]
