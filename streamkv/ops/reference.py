"""The plain-torch implementation of every op: the oracle of all others, on any device.

Written for reading, not for speed. Owns no state. Invariant: nothing is clever here; what the
kernels must compute is what these lines say. Signatures and shapes are those of `KernelTable`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import AttentionShape
from .kernels import KernelTable


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of the table."""
    return weight[token_ids].float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich, 2019)."""
    return _normed(x, weight, eps).to(weight.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * weight.float()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x @ weight.T (+ bias) (+ residual)."""
    out = _product(x, weight)
    if bias is not None:
        out = out + bias
    if residual is not None:
        out = out + residual
    return out


def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up, of the two halves of a product (Shazeer, 2020)."""
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32: products of bfloat16 numbers are exact in it, so widening both
    sides and accumulating wide are the same but for the order of the sum."""
    if x.is_cuda and x.dtype is torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def head_rms_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, shape: AttentionShape
) -> Tensor:
    """rms_norm of each Q and K head by itself (query-key norms, Henry et al., 2020)."""
    heads = qkv.unflatten(1, (-1, shape.head_dim))  # [T, Q heads + K heads + V heads, head_dim]
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    normed = [_normed(q, q_weight, eps), _normed(k, k_weight, eps), v]
    return torch.cat(normed, dim=1).flatten(1)


def rotary(qkv: Tensor, positions: Tensor, cos_sin: Tensor, shape: AttentionShape) -> Tensor:
    """Rotary position embedding of Q and K (Su et al., 2021), NeoX pairs: (i, i + head_dim/2)."""
    num_rotated = shape.num_heads + shape.num_kv_heads
    heads = qkv.unflatten(1, (-1, shape.head_dim))  # [T, Q heads + K heads + V heads, head_dim]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, head_dim / 2] each
    first, second = heads[:, :num_rotated].chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated, heads[:, num_rotated:]], dim=1).flatten(1)


def store_kv(
    qkv: Tensor, kv_cache: Tensor, slots: Tensor, layer: int, shape: AttentionShape
) -> None:
    """Each token's K and V heads to its slot: a block, and an offset in it."""
    block_size = kv_cache.shape[4]
    heads = qkv.unflatten(1, (-1, shape.head_dim))
    # [T, 2, num_kv_heads, head_dim]
    kv = heads[:, shape.num_heads :].unflatten(1, (2, shape.num_kv_heads))
    at = (slots // block_size, slice(None), slice(None), slots % block_size)
    kv_cache[:, layer][at] = kv.to(kv_cache.dtype)


def paged_attention(
    qkv: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    layer: int,
    shape: AttentionShape,
    scale: float,
) -> Tensor:
    """Causal softmax(q · k * scale) v over each row's blocks; heads share KV heads in groups."""
    num_heads, head_dim = shape.num_heads, shape.head_dim
    out = kv_cache.new_empty(len(qkv), shape.q_width)
    starts = query_start.tolist()
    for row, context_len in enumerate(context_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        keys, values = _gather_context(kv_cache[:, layer], block_tables[row], context_len)
        keys = keys.repeat_interleave(num_heads // shape.num_kv_heads, dim=0)
        values = values.repeat_interleave(num_heads // shape.num_kv_heads, dim=0)

        queries = qkv[start:end, : shape.q_width]
        queries = queries.view(-1, num_heads, head_dim).transpose(0, 1)  # [heads, q_len, head_dim]
        scores = queries @ keys.transpose(1, 2) * scale  # [heads, q_len, context_len]

        # The row's queries are the last tokens of its context.
        positions = torch.arange(context_len, device=qkv.device)
        query_positions = positions[context_len - (end - start) :]
        scores.masked_fill_(positions[None, :] > query_positions[:, None], float("-inf"))
        attended = scores.softmax(dim=-1) @ values  # [heads, q_len, head_dim]
        out[start:end] = attended.transpose(0, 1).flatten(1)
    return out


def _gather_context(
    layer_cache: Tensor, block_table: Tensor, context_len: int
) -> tuple[Tensor, Tensor]:
    """One row's K and V, float32 [num_kv_heads, context_len, head_dim], from its blocks alone.

    layer_cache is [num_blocks, 2, num_kv_heads, block_size, head_dim].
    """
    num_used = -(-context_len // layer_cache.shape[3])
    blocks = layer_cache[block_table[:num_used]].float()
    # [2, num_kv_heads, num_used * block_size, head_dim], cut to what was stored
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context_len]
    return keys, values


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The named rows of x."""
    return x[rows]


REFERENCE = KernelTable(
    name="reference",
    detail=f"torch {torch.__version__}",
    embedding=embedding,
    rms_norm=rms_norm,
    linear=linear,
    linear_silu_mul=linear_silu_mul,
    head_rms_norm=head_rms_norm,
    rotary=rotary,
    store_kv=store_kv,
    paged_attention=paged_attention,
    select_rows=select_rows,
)
