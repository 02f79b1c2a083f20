"""Whatever is wrong with an argument is an error that names it, never a crash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.paged import int32

from streamkv.ops import AttentionShape, native
from streamkv.ops.kernels import KernelTable

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
W = SHAPE.qkv_width


@pytest.fixture
def table() -> KernelTable:
    return native.load(1)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(**changes: Any) -> tuple[Any, ...]:
    """Two rows: 3 queries of a context of 5, and 1 of 9; 2 layers, 3 blocks of 8 tokens."""
    arguments: dict[str, Any] = {
        "qkv": x(4, W),
        "kv_cache": x(3, 2, 2, 2, 8, 16),
        "query_start": int32([0, 3, 4]),
        "context_lens": int32([5, 9]),
        "block_tables": int32([0, 0, 1, 2]).view(2, 2),
        "layer": 1,
        "shape": SHAPE,
        "scale": 0.25,
    }
    assert changes.keys() <= arguments.keys()
    return tuple((arguments | changes).values())


NOT_CONTIGUOUS = torch.zeros(16, 3).T
BAD_CALLS: list[tuple[str, tuple[Any, ...], str]] = [
    ("embedding", (int32([0, 7]), x(7, 4)), r"token_ids\[1\] .* less than 7, got 7"),
    ("embedding", (int32([-1]), x(7, 4)), r"token_ids\[0\] .* got -1"),
    ("embedding", (torch.tensor([0]), x(7, 4)), r"token_ids .* torch.int32, got torch.int64"),
    ("embedding", (int32([0]), x(7, 4).half()), r"weight .* got torch.float16"),
    ("embedding", (int32([0]), x(7)), r"weight expected 2 dimensions, got shape \[7\]"),
    ("embedding", (int32([0]), NOT_CONTIGUOUS), r"weight .* contiguous"),
    ("select_rows", (x(3, 4), int32([3])), r"rows\[0\] .* less than 3, got 3"),
    ("select_rows", (x(3, 4), x(1)), r"rows .* torch.int32, got torch.float32"),
    ("rms_norm", (x(3, 4), x(5), 1e-5), r"weight expected shape \[4\], got \[5\]"),
    ("rms_norm", (x(3, 4), x(4).bfloat16(), 1e-5), r"weight .*float32, got torch.bfloat16"),
    ("rms_norm", (NOT_CONTIGUOUS, x(16), 1e-5), r"x .* contiguous"),
    ("rms_norm", (x(3, 4, dtype=torch.int32), x(4), 1e-5), r"x .* got torch.int32"),
    ("rms_norm", (x(3, 4).to("meta"), x(4), 1e-5), r"x expected a CPU tensor, got one on meta"),
    ("add_rms_norm", (x(3, 4), x(2, 4), x(4), 1e-5), r"residual expected shape \[3, 4\]"),
    ("silu_mul", (x(2, 5),), r"gate_up expected an even width, got 5"),
    ("rotary", (x(1, W), int32([8]), x(8, 16), SHAPE), r"positions\[0\] .* less than 8, got 8"),
    ("rotary", (x(1, W), int32([-1]), x(8, 16), SHAPE), r"positions\[0\] .* got -1"),
    ("rotary", (x(1, W), int32([0]), x(8, 8), SHAPE), r"cos_sin expected shape \[8, 16\]"),
    ("rotary", (x(1, W - 16), int32([0]), x(8, 16), SHAPE), r"qkv expected shape \[1, 128\]"),
    ("store_kv", (x(1, W), x(3, 2, 2, 2, 8, 16), int32([24]), 0, SHAPE), r"slots\[0\] .* 24"),
    ("store_kv", (x(1, W), x(3, 2, 2, 2, 8, 16), int32([-1]), 0, SHAPE), r"slots\[0\] .* -1"),
    ("store_kv", (x(1, W), x(3, 2, 2, 2, 8, 16), int32([0]), 2, SHAPE), r"layer .* 0 to 1, got 2"),
    ("store_kv", (x(1, W), x(3, 2, 2, 4, 8, 16), int32([0]), 0, SHAPE), r"kv_cache .* shape"),
    ("paged_attention", attention(kv_cache=x(3, 2, 2, 2, 8, 16).bfloat16()), r"kv_cache .* dtype"),
    ("paged_attention", attention(layer=-1), r"layer expected 0 to 1, got -1"),
    ("paged_attention", attention(query_start=int32([0, 4])), r"query_start expected shape \[3\]"),
    ("paged_attention", attention(query_start=int32([1, 3, 4])), r"query_start\[0\] expected 0"),
    ("paged_attention", attention(query_start=int32([0, 5, 4])), r"query_start\[2\] .* got 4"),
    ("paged_attention", attention(query_start=int32([0, 3, 5])), r"query_start\[2\] .* got 5"),
    ("paged_attention", attention(context_lens=int32([2, 9])), r"context_lens\[0\] .* got 2"),
    ("paged_attention", attention(context_lens=int32([5, 17])), r"context_lens\[1\] .* got 17"),
    (
        "paged_attention",
        attention(block_tables=int32([0, 0, 1, 3]).view(2, 2)),
        r"block_tables expected ids of the 3 blocks .* row 1",
    ),
    (
        "paged_attention",
        attention(block_tables=int32([-1, 0, 1, 2]).view(2, 2)),
        r"block_tables expected ids of the 3 blocks .* row 0",
    ),
]


@pytest.mark.parametrize(
    ("op", "arguments", "message"), BAD_CALLS, ids=[f"{op}-{text}" for op, _, text in BAD_CALLS]
)
def test_a_bad_argument_is_an_error_that_names_it(
    table: KernelTable, op: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        getattr(table, op)(*arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (AttentionShape(4, 2, 24), "head_dim expected a multiple of 16 up to 256, got 24"),
        (AttentionShape(4, 2, 272), "head_dim expected a multiple of 16 up to 256, got 272"),
        (AttentionShape(5, 2, 16), "num_heads expected .* got 5"),
        (AttentionShape(130, 1, 16), "num_heads expected .* got 130"),
    ],
    ids=str,
)
def test_heads_that_attention_does_not_do_are_an_error(
    table: KernelTable, shape: AttentionShape, message: str
) -> None:
    cache = x(3, 2, 2, shape.num_kv_heads, 8, shape.head_dim)
    with pytest.raises(ValueError, match=message):
        table.paged_attention(*attention(qkv=x(4, shape.qkv_width), kv_cache=cache, shape=shape))


def test_unused_entries_of_a_block_table_may_hold_anything(table: KernelTable) -> None:
    block_tables = int32([0, 99, 1, 2]).view(2, 2)
    assert table.paged_attention(*attention(block_tables=block_tables)).shape == (4, 64)
