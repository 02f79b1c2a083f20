"""KernelTable: one implementation of every op of the vocabulary, on torch tensors.

Owns the signatures. TorchOps resolves parameters and batch handles to tensors and calls the table
it was given; which table that is gets decided once, at start. Knows nothing of models, batches or
devices. Invariant: the fields after `detail` are exactly `ops.VOCABULARY`.

Shapes: T tokens in the step, B rows, R rows that want logits, H hidden size, W = shape.qkv_width.
Weights and kv_cache share one dtype D, float32 or bfloat16, and so do inputs (left sides of matrix
products); every other activation is float32; index tensors are int32. Each element is computed in
float32 and rounded once. Tensors are contiguous, on one device.

kv_cache is [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]: a block holds
all layers, so copying one is one byte range. Its memory is committed lazily and what was never
stored is garbage: no op reads a slot outside a row's context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import AttentionShape

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True)
class KernelTable:
    """One callable per op; `detail` says what it runs on, for the log line at start."""

    name: str
    detail: str

    embedding: Callable[[Tensor, Tensor], Tensor]
    """(token_ids [T], weight D [V, H]) -> float32 [T, H]"""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x float32 [T, H], weight D [H], eps) -> D [T, H]"""

    linear: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    """(x D [T, K], weight D [N, K], bias D [N] or None, residual float32 [T, N] or None)
    -> float32 [T, N]"""

    linear_silu_mul: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x D [T, K], weight D [2 * I, K], bias D [2 * I] or None) -> D [T, I]"""

    head_rms_norm: Callable[[Tensor, Tensor, Tensor, float, AttentionShape], Tensor]
    """(qkv float32 [T, W], q_weight D [head_dim], k_weight D [head_dim], eps, shape)
    -> float32 [T, W]"""

    rotary: Callable[[Tensor, Tensor, Tensor, AttentionShape], Tensor]
    """(qkv float32 [T, W], positions [T], cos_sin float32 [max_positions, head_dim], shape)
    -> float32 [T, W]. A row of cos_sin is head_dim / 2 cosines, then as many sines."""

    store_kv: Callable[[Tensor, Tensor, Tensor, int, AttentionShape], None]
    """(qkv float32 [T, W], kv_cache, slots [T], layer, shape): writes kv_cache"""

    paged_attention: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, int, AttentionShape, float], Tensor
    ]
    """(qkv float32 [T, W], kv_cache, query_start [B + 1], context_lens [B], block_tables [B, M],
    layer, shape, scale) -> D [T, num_heads * head_dim]"""

    select_rows: Callable[[Tensor, Tensor], Tensor]
    """(x float32 [T, H], rows [R]) -> float32 [R, H]"""

    def describe(self) -> str:
        """The line logged at start and shown to people, such as "reference (torch 2.13.0)"."""
        return f"{self.name} ({self.detail})"
