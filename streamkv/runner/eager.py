"""Eager: runs each op of a model's forward at once on the native kernels, for debugging.

Owns the binding of names to weights and of a Rope to its table. Values are numpy arrays that can
be looked at between any two ops, but for inputs of products (`Inputs`), which are computed when a
product says what it takes. Imports no torch. Invariant: the bits are those of the recorded program,
which runs the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.rope import rope_table
from ..ops import AttentionShape, Batch, Parameter, Rope
from .inputs import attention_makes, gating_makes

Array = NDArray[Any]  # float32; of inputs also uint16 bits of bfloat16, uint8 groups of int8


class Inputs:
    """What an op gives to products: computed for each dtype that one of them takes."""

    def __init__(self, make: Callable[[str], Array]) -> None:
        self._make = make
        self._made: dict[str, Array] = {}

    def as_dtype(self, dtype: str) -> Array:
        if dtype not in self._made:
            self._made[dtype] = self._make(dtype)
        return self._made[dtype]


class Eager:
    """Implements `ops.Ops` on arrays, over a `_cpu.Team`, weights of either kind by parameter name
    and a `_cpu.KvCache`."""

    def __init__(
        self, team: Any, weights: Mapping[str, Any], cache: Any, *, max_model_len: int
    ) -> None:
        from streamkv import _cpu

        self._cpu = _cpu
        self._team = team
        self._weights = weights
        self._cache = cache
        self._max_model_len = max_model_len
        self._rope_tables: dict[Rope, Array] = {}
        self._native_batch: tuple[Batch, Any] | None = None

    def embedding(self, token_ids: Array, weight: Parameter) -> Array:
        return self._cpu.ops.embedding(self._team, token_ids, self._weights[weight.name])

    def rms_norm(self, x: Array, weight: Parameter, eps: float) -> Inputs:
        norm = self._weights[weight.name]
        return Inputs(lambda dtype: self._cpu.ops.rms_norm(self._team, x, norm, eps, dtype))

    def linear(
        self,
        x: Inputs,
        weight: Parameter,
        bias: Parameter | None = None,
        residual: Array | None = None,
    ) -> Array:
        matrix = self._weights[weight.name]
        taken = x.as_dtype(matrix.input_dtype)
        return self._cpu.ops.linear(self._team, taken, matrix, self._find(bias), residual)

    def linear_silu_mul(
        self, x: Inputs, weight: Parameter, bias: Parameter | None = None
    ) -> Inputs:
        matrix = self._weights[weight.name]
        taken = x.as_dtype(matrix.input_dtype)

        def make(dtype: str) -> Array:
            return self._cpu.ops.linear_silu_mul(
                self._team, taken, matrix, self._find(bias), out_dtype=dtype
            )

        return self._quantized_after(make, lambda dtype: gating_makes(dtype, matrix))

    def head_rms_norm(
        self,
        qkv: Array,
        q_weight: Parameter,
        k_weight: Parameter,
        eps: float,
        shape: AttentionShape,
    ) -> Array:
        q_norm, k_norm = self._weights[q_weight.name], self._weights[k_weight.name]
        return self._cpu.ops.head_rms_norm(
            self._team, qkv, q_norm, k_norm, eps, shape.num_heads, shape.num_kv_heads
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
    ) -> Inputs:
        native_batch = self._as_native(batch)

        def make(dtype: str) -> Array:
            return self._cpu.ops.paged_attention(
                self._team, qkv, self._cache, native_batch, layer, shape.num_heads, scale, dtype
            )

        return self._quantized_after(make, lambda dtype: attention_makes(dtype, shape))

    def select_rows(self, x: Array, rows: Array) -> Array:
        return self._cpu.ops.select_rows(self._team, x, rows)

    def _quantized_after(
        self, make: Callable[[str], Array], makes: Callable[[str], bool]
    ) -> Inputs:
        """Of an op that may not make int8: then they are made of its float32."""
        return Inputs(
            lambda dtype: (
                make(dtype) if makes(dtype) else self._cpu.ops.quantize(self._team, make("float32"))
            )
        )

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
