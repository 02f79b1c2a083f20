"""A paged KV cache for tests: rows of random context, scattered over blocks full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.ops import AttentionShape
from streamkv.ops.kernels import KernelTable
from streamkv.ops.reference import REFERENCE

NUM_LAYERS = 2
LAYER = 1


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class PagedContext:
    """Each row's QKV of every position (float32 or bf16 [context_len, qkv_width]), and where the
    K and V of it lie: every slot outside the rows' contexts, and every other layer, is NaN."""

    shape: AttentionShape
    rows: list[Tensor]
    kv_cache: Tensor
    block_tables: list[list[int]]

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def attend(self, kernels: KernelTable, queries: Sequence[tuple[int, int, int]]) -> Tensor:
        """One call: for each (row, start, end), the queries at positions start..end-1."""
        qkv = torch.cat([self.rows[row][start:end] for row, start, end in queries])
        query_start = [0]
        for _, start, end in queries:
            query_start.append(query_start[-1] + end - start)
        width = max(len(self.block_tables[row]) for row, _, _ in queries)
        tables = [self.block_tables[row] for row, _, _ in queries]
        return kernels.paged_attention(
            qkv,
            self.kv_cache,
            int32(query_start),
            int32([end for _, _, end in queries]),
            int32([table + [0] * (width - len(table)) for table in tables]),
            LAYER,
            self.shape,
            self.scale,
        )


def random_context(
    context_lens: Sequence[int],
    shape: AttentionShape,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    seed: int = 0,
) -> PagedContext:
    """Equal seeds give equal rows, whatever the block size; blocks are dealt at random."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(length, shape.qkv_width, generator=generator).to(dtype)
        for length in context_lens
    ]
    num_blocks = sum(-(-length // block_size) for length in context_lens) + 2
    free = random.Random(seed + block_size).sample(range(num_blocks), num_blocks)
    cache_shape = (num_blocks, NUM_LAYERS, 2, shape.num_kv_heads, block_size, shape.head_dim)
    kv_cache = torch.full(cache_shape, float("nan"), dtype=dtype)
    block_tables = []
    for row in rows:
        table = [free.pop() for _ in range(-(-len(row) // block_size))]
        slots = [table[p // block_size] * block_size + p % block_size for p in range(len(row))]
        REFERENCE.store_kv(row, kv_cache, int32(slots), LAYER, shape)
        block_tables.append(table)
    return PagedContext(shape, rows, kv_cache, block_tables)
