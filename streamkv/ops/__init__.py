"""The closed op vocabulary: all that a model file may compute with.

A model's `forward(ops, batch)` calls the methods of `Ops` on opaque handles; an interpreter of
that protocol runs them at once (runner/eager.py) or records them. Nothing here imports torch, so
neither does a model file. Each op has a plain-torch oracle (reference.py) and may have a native
kernel (native.py, the C++ extension); `select` in the runner picks one table at start.

Shapes: T tokens in the step, B rows in the batch, R rows that want logits, H hidden size.
Ops are functional: no handle is changed, except that `store_kv` writes the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Handle = Any  # a tensor for eager interpreters, a symbolic buffer for a recorder

VOCABULARY = (
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "linear",
    "rotary",
    "store_kv",
    "paged_attention",
    "silu_mul",
    "select_rows",
)


@dataclass(frozen=True)
class Parameter:
    """A weight by name. `parts` are the checkpoint tensors stacked along dim 0 to make it.

    A plain weight has one part, its own checkpoint name; a fused one (QKV, gate+up) has several.
    """

    name: str
    shape: tuple[int, ...]  # [out_features, in_features], [vocab, hidden] or [hidden]
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # (checkpoint name, shape), in order


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, NeoX style: the first half of a head pairs with the second."""

    theta: float
    head_dim: int
    max_positions: int
    scaling: tuple[tuple[str, float], ...] = ()  # reserved for scaled variants; () = plain


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a fused [T, (num_heads + 2 * num_kv_heads) * head_dim] QKV handle: Q, K, V."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Batch(NamedTuple):
    """Handles of one step's inputs, all int32."""

    token_ids: Handle  # [T]
    positions: Handle  # [T] position of each token in its sequence
    slots: Handle  # [T] where its KV goes: block_id * block_size + offset in block
    query_start: Handle  # [B + 1] row b owns tokens query_start[b] .. query_start[b+1]-1
    context_lens: Handle  # [B] tokens in the row's context after this step
    block_tables: Handle  # [B, max_blocks] unused entries are 0
    logit_rows: Handle  # [R] indices into T whose hidden state wants logits


class Ops(Protocol):
    """The vocabulary as an interpreter offers it to a model."""

    def embedding(self, token_ids: Handle, weight: Parameter) -> Handle:
        """[T] -> [T, H]: rows of the table."""

    def rms_norm(self, x: Handle, weight: Parameter, eps: float) -> Handle:
        """[T, H] -> [T, H]: x / sqrt(mean(x²) + eps) * weight, statistics in float32."""

    def add_rms_norm(
        self, x: Handle, residual: Handle, weight: Parameter, eps: float
    ) -> tuple[Handle, Handle]:
        """(rms_norm(x + residual), x + residual), both [T, H]."""

    def linear(self, x: Handle, weight: Parameter, bias: Parameter | None = None) -> Handle:
        """[T, K] -> [T, N]: x @ weight.T (+ bias), accumulated in float32."""

    def rotary(self, qkv: Handle, positions: Handle, rope: Rope, shape: AttentionShape) -> Handle:
        """[T, qkv_width] -> same: rotates the Q and K heads, V as it was."""

    def store_kv(self, qkv: Handle, batch: Batch, layer: int, shape: AttentionShape) -> None:
        """Writes the K and V heads of each token to its slot of this layer's cache."""

    def paged_attention(
        self, qkv: Handle, batch: Batch, layer: int, shape: AttentionShape, scale: float
    ) -> Handle:
        """[T, qkv_width] -> [T, num_heads * head_dim]: causal attention over the cached context.

        The token at position p of row b reads positions 0 .. p of its block table; its own K and
        V were stored before.
        """

    def silu_mul(self, gate_up: Handle) -> Handle:
        """[T, 2 * I] -> [T, I]: silu(first half) * second half."""

    def select_rows(self, x: Handle, rows: Handle) -> Handle:
        """[T, H], [R] -> [R, H]."""
