"""A row's bits don't depend on its neighbours, its chunks, its blocks or the threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops.paged import random_context
from torch import Tensor

from streamkv import _cpu
from streamkv.ops import AttentionShape
from streamkv.ops.kernels import KernelTable

SHAPE = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64)
SHAPES = [
    SHAPE,
    AttentionShape(num_heads=4, num_kv_heads=4, head_dim=80),
    AttentionShape(num_heads=10, num_kv_heads=2, head_dim=128),
]
THREADS = [2, 3, 5]


def row_ops(
    kernels: KernelTable, width: int, dtype: torch.dtype
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Each op that computes a row from a row, with the same other arguments for every row."""
    weight = torch.randn(width).to(dtype)
    cos_sin = torch.randn(8, SHAPE.head_dim)
    return {
        "rms_norm": lambda x: kernels.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda x: kernels.add_rms_norm(x, x.neg().roll(1, 1), weight, 1e-5)[0],
        "silu_mul": kernels.silu_mul,
        "rotary": lambda x: kernels.rotary(
            x, torch.full((len(x),), 5, dtype=torch.int32), cos_sin, SHAPE
        ),
    }


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "silu_mul", "rotary"])
def test_a_row_alone_equals_the_row_in_a_batch(
    native_table: KernelTable, dtype: torch.dtype, op: str
) -> None:
    x = torch.randn(13, SHAPE.qkv_width).to(dtype)
    run = row_ops(native_table, SHAPE.qkv_width, dtype)[op]
    together = run(x)
    for row in range(13):
        assert torch.equal(run(x[row : row + 1]), together[row : row + 1]), row


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "silu_mul", "rotary"])
def test_more_threads_change_no_bit_of_a_row(
    native_table: KernelTable, dtype: torch.dtype, op: str
) -> None:
    x = torch.randn(700, SHAPE.qkv_width).to(dtype)  # enough bytes to be shared out
    run = row_ops(native_table, SHAPE.qkv_width, dtype)[op]
    alone = run(x)
    for num_threads in THREADS:
        _cpu.set_num_threads(num_threads)
        assert torch.equal(run(x), alone), num_threads


def test_copies_are_exact_on_any_number_of_threads(
    native_table: KernelTable, dtype: torch.dtype
) -> None:
    table = torch.randn(900, SHAPE.qkv_width).to(dtype)
    ids = torch.randperm(900).int()
    for num_threads in THREADS:
        _cpu.set_num_threads(num_threads)
        assert torch.equal(native_table.embedding(ids, table), table[ids])
        cache = torch.zeros(60, 1, 2, 3, 16, 64, dtype=dtype)
        native_table.store_kv(table, cache, ids, 0, SHAPE)
        stored = cache[:, 0].permute(0, 3, 1, 2, 4).flatten(0, 1)[ids].flatten(1)
        assert torch.equal(stored, table[:, 9 * 64 :])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_a_row_alone_equals_the_row_in_a_batch(
    native_table: KernelTable, dtype: torch.dtype, shape: AttentionShape
) -> None:
    lengths = [1, 40, 64, 65, 150, 300]
    context = random_context(lengths, shape, dtype)
    queries = [(row, max(0, length - 23), length) for row, length in enumerate(lengths)]
    together = context.attend(native_table, queries)
    alone = [context.attend(native_table, [query]) for query in queries]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_in_chunks_or_token_by_token_equals_the_whole_prompt(
    native_table: KernelTable, dtype: torch.dtype, shape: AttentionShape
) -> None:
    context = random_context([200], shape, dtype)
    whole = context.attend(native_table, [(0, 0, 200)])
    for bounds in ([0, 1, 64, 128, 200], [0, 63, 130, 147, 199, 200], list(range(201))):
        chunks = [
            context.attend(native_table, [(0, start, end)])
            for start, end in zip(bounds, bounds[1:], strict=False)
        ]
        assert torch.equal(torch.cat(chunks), whole), bounds[:4]


def test_attention_of_a_prompt_depends_on_no_later_token(
    native_table: KernelTable, dtype: torch.dtype
) -> None:
    context = random_context([150], SHAPE, dtype)
    longer = context.attend(native_table, [(0, 0, 150)])
    assert torch.equal(context.attend(native_table, [(0, 0, 101)]), longer[:101])


def test_attention_does_not_depend_on_block_size_or_placement(
    native_table: KernelTable, dtype: torch.dtype
) -> None:
    lengths = [70, 129, 200]
    queries = [(0, 69, 70), (1, 100, 129), (2, 0, 200)]
    expected = random_context(lengths, SHAPE, dtype, block_size=16).attend(native_table, queries)
    for block_size in (1, 7, 64, 256):
        context = random_context(lengths, SHAPE, dtype, block_size=block_size)
        assert torch.equal(context.attend(native_table, queries), expected), block_size


def test_more_threads_change_no_bit_of_attention(
    native_table: KernelTable, dtype: torch.dtype
) -> None:
    lengths = [300, 17, 450]
    context = random_context(lengths, SHAPE, dtype)
    queries = [(0, 0, 300), (1, 16, 17), (2, 430, 450)]
    alone = context.attend(native_table, queries)
    for num_threads in THREADS:
        _cpu.set_num_threads(num_threads)
        for _ in range(3):
            assert torch.equal(context.attend(native_table, queries), alone), num_threads


def test_attention_is_the_same_whatever_an_earlier_call_left_in_scratch(
    native_table: KernelTable,
) -> None:
    """Scratch is reused between calls: what a bigger tile left behind must not matter."""
    small = random_context([70], AttentionShape(2, 1, 32), torch.float32)
    before = small.attend(native_table, [(0, 60, 70)])
    big = random_context([190], AttentionShape(4, 1, 256), torch.float32, seed=1)
    big.rows[0].mul_(1e30)
    assert len(big.attend(native_table, [(0, 0, 190)])) == 190
    assert torch.equal(small.attend(native_table, [(0, 60, 70)]), before)
