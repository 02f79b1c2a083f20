"""KernelTable: one implementation of every op of the vocabulary, on torch tensors.

Owns the signatures. An interpreter resolves parameters and batch handles to tensors and calls the
table it was given; which table that is gets decided once, at start. Knows nothing of models,
batches or devices. Invariant: the fields after `detail` are exactly `ops.VOCABULARY`.

Shapes: T tokens in the step, B rows, R rows that want logits, H hidden size, W = shape.qkv_width.
x, weights, qkv and kv_cache share one dtype, float32 or bfloat16; index tensors are int32. Each
element is computed in float32 and rounded to that dtype once. Tensors are contiguous, on one
device.

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
    """(token_ids [T], weight [V, H]) -> [T, H]"""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [T, H], weight [H], eps) -> [T, H]"""

    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x [T, H], residual [T, H], weight [H], eps) -> (normed, new residual), both [T, H].

    The new residual is rounded to its dtype first; normed is the norm of what was kept.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x [T, K], weight [N, K], bias [N] or None) -> [T, N]"""

    rotary: Callable[[Tensor, Tensor, Tensor, AttentionShape], Tensor]
    """(qkv [T, W], positions [T], cos_sin [max_positions, head_dim] float32, shape) -> [T, W].

    A row of cos_sin is head_dim/2 cosines, then as many sines.
    """

    store_kv: Callable[[Tensor, Tensor, Tensor, int, AttentionShape], None]
    """(qkv [T, W], kv_cache, slots [T], layer, shape): writes kv_cache"""

    paged_attention: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, int, AttentionShape, float], Tensor
    ]
    """(qkv [T, W], kv_cache, query_start [B + 1], context_lens [B], block_tables [B, M], layer,
    shape, scale) -> [T, num_heads * head_dim]"""

    silu_mul: Callable[[Tensor], Tensor]
    """(gate_up [T, 2 * I]) -> [T, I]"""

    select_rows: Callable[[Tensor, Tensor], Tensor]
    """(x [T, H], rows [R]) -> [R, H]"""

    def describe(self) -> str:
        """The line logged at start and shown to people, such as "native (avx512, 2 threads)"."""
        return f"{self.name} ({self.detail})"
