"""A paged KV cache for tests: rows of random context, scattered over blocks full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from streamkv import _cpu

NUM_LAYERS = 2
LAYER = 1
Array = np.ndarray[Any, Any]


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def rounded(values: Array, dtype: str) -> Array:
    """float32 heads [..., head_dim] as a cache of this type holds them; int8: whole numbers to 127
    times a scale each."""
    if dtype == "int8":
        highest = np.abs(values).max(axis=-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = np.rint(
                values * np.where(highest > 0, np.float32(127) / highest, np.float32(0))
            )
            return whole * (highest / np.float32(127))
    if dtype == "bfloat16":
        return torch.from_numpy(values).bfloat16().float().numpy()
    return values


def int32(values: Sequence[int] | Sequence[Sequence[int]]) -> Array:
    return np.array(values, dtype=np.int32)


@dataclass(frozen=True)
class PagedContext:
    """Each row's QKV of every position (float32 [context_len, qkv_width]), and where the K and V of
    it lie: every slot outside the rows' contexts, and every other layer, is NaN."""

    shape: Shape
    rows: list[Array]
    cache: _cpu.KvCache
    block_tables: list[list[int]]

    def slots(self, row: int, start: int, end: int) -> Array:
        size, table = self.cache.block_size, self.block_tables[row]
        return int32([table[p // size] * size + p % size for p in range(start, end)])

    def store(self, team: _cpu.Team, row: int, start: int, end: int) -> None:
        qkv = np.ascontiguousarray(self.rows[row][start:end])
        slots = self.slots(row, start, end)
        _cpu.ops.store_kv(team, qkv, self.cache, slots, LAYER, self.shape.num_heads)

    def batch(self, queries: Sequence[tuple[int, int, int]]) -> _cpu.Batch:
        tables = [self.block_tables[row] for row, _, _ in queries]
        width = max((len(table) for table in tables), default=0)
        positions = [p for _, start, end in queries for p in range(start, end)]
        query_start = np.cumsum([0] + [end - start for _, start, end in queries], dtype=np.int32)
        slots = [self.slots(row, start, end) for row, start, end in queries]
        return _cpu.Batch(
            token_ids=np.zeros(len(positions), np.int32),
            positions=int32(positions),
            slots=np.concatenate([*slots, int32([])]),
            query_start=query_start,
            context_lens=int32([end for _, _, end in queries]),
            block_tables=int32([t + [0] * (width - len(t)) for t in tables]).reshape(
                len(tables), width
            ),
            logit_rows=int32([]),
        )

    def attend(
        self,
        team: _cpu.Team,
        queries: Sequence[tuple[int, int, int]],
        out_dtype: str = "float32",
    ) -> Array:
        """One call: for each (row, start, end), the queries at positions start..end-1."""
        qkv = [self.rows[row][start:end] for row, start, end in queries]
        empty = np.zeros((0, self.shape.qkv_width), np.float32)
        attended = _cpu.ops.paged_attention(
            team,
            np.concatenate([*qkv, empty]),
            self.cache,
            self.batch(queries),
            LAYER,
            self.shape.num_heads,
            self.shape.head_dim**-0.5,
            out_dtype,
        )
        return np.asarray(attended)


def random_context(
    team: _cpu.Team,
    context_lens: Sequence[int],
    shape: Shape,
    dtype: str,
    *,
    block_size: int = 16,
    seed: int = 0,
    prefixes: dict[int, tuple[int, int]] | None = None,
    copies: bool = False,
) -> PagedContext:
    """Equal seeds give equal rows, whatever the block size; blocks are dealt at random.

    `prefixes` says {row: (earlier row, tokens)}: the row begins with those tokens of the other, in
    the same blocks (those that are full), or, with `copies`, in its own.
    """
    generator = np.random.default_rng(seed)
    rows = [generator.standard_normal((n, shape.qkv_width), np.float32) for n in context_lens]
    num_blocks = sum(-(-length // block_size) for length in context_lens) + 2
    cache = _cpu.KvCache(
        dtype, num_blocks, NUM_LAYERS, shape.num_kv_heads, block_size, shape.head_dim
    )
    slots = int32(range(num_blocks * block_size))
    nan = np.full((len(slots), shape.qkv_width), np.nan, np.float32)
    for layer in range(NUM_LAYERS):
        _cpu.ops.store_kv(team, nan, cache, slots, layer, shape.num_heads)
    free = random.Random(seed + block_size).sample(range(num_blocks), num_blocks)
    context = PagedContext(shape, rows, cache, [])
    for row, length in enumerate(context_lens):
        source, num_tokens = (prefixes or {}).get(row, (0, 0))
        rows[row][:num_tokens] = rows[source][:num_tokens]
        shared = 0 if copies else num_tokens // block_size
        table = context.block_tables[source][:shared] if shared else []
        table = table + [free.pop() for _ in range(-(-length // block_size) - len(table))]
        context.block_tables.append(table)
        context.store(team, row, 0, length)
    return context
