"""Attention over a scattered cache, each implementation against torch's dense attention."""

from __future__ import annotations

import pytest
import torch
from ops.paged import PagedContext, int32, random_context
from torch import Tensor

from streamkv.ops import AttentionShape
from streamkv.ops.kernels import KernelTable

SHAPES = [
    AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64),
    AttentionShape(num_heads=4, num_kv_heads=4, head_dim=16),
    AttentionShape(num_heads=7, num_kv_heads=1, head_dim=80),
    AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128),
    AttentionShape(num_heads=2, num_kv_heads=1, head_dim=256),
]


def attend_densely(row: Tensor, shape: AttentionShape) -> Tensor:
    """All queries of one row, in float64, without pages: [context_len, num_heads * head_dim]."""
    heads = row.double().unflatten(1, (-1, shape.head_dim)).transpose(0, 1)
    queries, keys, values = heads.split(
        [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=0
    )
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    return attended[0].transpose(0, 1).flatten(1)


def assert_attends(
    kernels: KernelTable, context: PagedContext, *batches: list[tuple[int, int, int]]
) -> None:
    dtype = context.kv_cache.dtype
    rtol, atol = (1e-5, 4e-6) if dtype is torch.float32 else (2**-8, 1e-5)
    exact = [attend_densely(row, context.shape) for row in context.rows]
    for queries in batches:
        actual = context.attend(kernels, queries)
        expected = torch.cat([exact[row][start:end] for row, start, end in queries])
        assert actual.dtype is dtype
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_prompts_and_chunks_of_every_boundary_length_in_one_batch(
    kernels: KernelTable, dtype: torch.dtype, shape: AttentionShape, block_size: int
) -> None:
    """What was never stored is NaN, so a finite answer also says that nothing else was read."""
    lengths = [1, 2, block_size, block_size + 1, 31, 63, 64, 65, 128, 129, 200]
    context = random_context(lengths, shape, dtype, block_size=block_size)
    decodes = [(row, length - 1, length) for row, length in enumerate(lengths)]
    prompts = [(row, 0, length) for row, length in enumerate(lengths)]
    chunks = [(row, length // 2, length) for row, length in enumerate(lengths)]
    assert_attends(kernels, context, decodes, prompts + decodes + chunks)


def test_no_rows_and_rows_without_queries_give_no_tokens(
    kernels: KernelTable, dtype: torch.dtype
) -> None:
    shape = SHAPES[0]
    context = random_context([20, 30], shape, dtype)
    arguments = (0, shape, context.scale)
    no_qkv = context.rows[0][:0]
    no_rows = kernels.paged_attention(
        no_qkv, context.kv_cache, int32([0]), int32([]), int32([]).view(0, 3), *arguments
    )
    idle_rows = kernels.paged_attention(
        no_qkv, context.kv_cache, int32([0, 0]), int32([0]), int32([0]).view(1, 1), *arguments
    )
    assert no_rows.shape == idle_rows.shape == (0, 9 * 64)
    assert_attends(kernels, context, [(0, 19, 20), (1, 30, 30), (1, 29, 30)])


def test_one_dominant_key_far_back_is_found(kernels: KernelTable, dtype: torch.dtype) -> None:
    """Partitions after it add weights of exactly zero, before it they are scaled away."""
    shape = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=16)
    context = random_context([300], shape, dtype)
    row = context.rows[0].clone()
    row[:, :16], row[:, 16:32] = 1.0, -1.0
    row[100, 16:32] = 100.0
    big = PagedContext(shape, [row], context.kv_cache, context.block_tables)
    slots = [context.block_tables[0][p // 16] * 16 + p % 16 for p in range(300)]
    kernels.store_kv(row, big.kv_cache, int32(slots), 1, shape)
    attended = big.attend(kernels, [(0, 299, 300)])
    assert torch.equal(attended, row[100:101, 32:])


def test_equal_keys_average_the_values(kernels: KernelTable, dtype: torch.dtype) -> None:
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16)
    context = random_context([130], shape, dtype)
    row = context.rows[0].clone()
    row[:, 32:48] = 0.5
    slots = [context.block_tables[0][p // 16] * 16 + p % 16 for p in range(130)]
    kernels.store_kv(row, context.kv_cache, int32(slots), 1, shape)
    even = PagedContext(shape, [row], context.kv_cache, context.block_tables)
    mean = row[:, 48:].double().mean(dim=0).repeat(2)
    rtol = 1e-5 if dtype is torch.float32 else 2**-8
    attended = even.attend(kernels, [(0, 129, 130)])[0].double()
    torch.testing.assert_close(attended, mean, rtol=rtol, atol=1e-6)
