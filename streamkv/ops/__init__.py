"""The closed op vocabulary: all that a model file may compute with.

A model's `forward(ops, batch)` calls the methods of `Ops` on opaque handles. Three interpreters
implement that protocol (runner/): the Recorder writes a program down, Eager runs the native ops
one by one, TorchOps runs a table of torch kernels (kernels.py, reference.py). Nothing here imports
torch, so neither does a model file.

Shapes: T tokens in the step, B rows in the batch, R rows that want logits, H hidden size.
Ops are functional: no handle is changed, except that `store_kv` writes the KV cache.

Activations are float32. Left sides of matrix products, called inputs, may be narrower: what
`rms_norm`, `linear_silu_mul` and `paged_attention` give may go into a product and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Handle = Any  # an array for interpreters that compute, a symbol for one that records

VOCABULARY = (
    "embedding",
    "rms_norm",
    "linear",
    "linear_silu_mul",
    "head_rms_norm",
    "rotary",
    "store_kv",
    "paged_attention",
    "select_rows",
)


@dataclass(frozen=True)
class Parameter:
    """A weight by name. `parts` are the checkpoint tensors stacked along dim 0 to make it.

    A plain weight has one part, its own checkpoint name; a fused one (QKV, gate+up) has several.
    A paired one is a matrix whose first half of outputs gates the second, for `linear_silu_mul`.
    """

    name: str
    shape: tuple[int, ...]  # [out_features, in_features], [vocab, hidden] or [hidden]
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # (checkpoint name, shape), in order
    is_paired: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, NeoX style: the first half of a head pairs with the second.

    Pair i of a head at position p is turned by p * frequencies[i]; its cosine and sine are
    multiplied by `magnitude`. How a checkpoint's scaling becomes these is models/rope.py's.
    """

    frequencies: tuple[float, ...]  # [head_dim / 2], float32 values
    magnitude: float
    max_positions: int

    @property
    def head_dim(self) -> int:
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a fused [T, (num_heads + 2 * num_kv_heads) * head_dim] QKV handle: Q, K, V."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

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
        """[T, H] -> inputs [T, H]: x / sqrt(mean(x²) + eps) * weight."""

    def linear(
        self,
        x: Handle,
        weight: Parameter,
        bias: Parameter | None = None,
        residual: Handle | None = None,
    ) -> Handle:
        """Inputs [T, K] -> [T, N]: x @ weight.T (+ bias) (+ residual [T, N])."""

    def linear_silu_mul(
        self, x: Handle, weight: Parameter, bias: Parameter | None = None
    ) -> Handle:
        """Inputs [T, K] -> inputs [T, N / 2]: silu(gate) * up, the halves of a paired product."""

    def head_rms_norm(
        self,
        qkv: Handle,
        q_weight: Parameter,
        k_weight: Parameter,
        eps: float,
        shape: AttentionShape,
    ) -> Handle:
        """[T, qkv_width] -> same: `rms_norm` of each Q head by q_weight and of each K head by
        k_weight, both [head_dim]; V as it was."""

    def rotary(self, qkv: Handle, positions: Handle, rope: Rope, shape: AttentionShape) -> Handle:
        """[T, qkv_width] -> same: rotates the Q and K heads, V as it was."""

    def store_kv(self, qkv: Handle, batch: Batch, layer: int, shape: AttentionShape) -> None:
        """Writes the K and V heads of each token to its slot of this layer's cache."""

    def paged_attention(
        self, qkv: Handle, batch: Batch, layer: int, shape: AttentionShape, scale: float
    ) -> Handle:
        """[T, qkv_width] -> inputs [T, q_width]: causal attention over the cached context.

        The token at position p of row b reads positions 0 .. p of its block table; its own K and
        V were stored before.
        """

    def select_rows(self, x: Handle, rows: Handle) -> Handle:
        """[T, H], [R] -> [R, H]."""
