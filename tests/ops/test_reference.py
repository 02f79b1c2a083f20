"""The plain-torch ops against formulas in float64: the oracle of all others has one itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamkv.ops import AttentionShape
from streamkv.ops.reference import REFERENCE

WIDTHS = [1, 7, 33, 576]
NUM_TOKENS = [0, 1, 5]
SHAPES = [
    AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64),
    AttentionShape(num_heads=4, num_kv_heads=4, head_dim=16),
    AttentionShape(num_heads=6, num_kv_heads=1, head_dim=10),
]
LAYER = 1


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def int32(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def assert_rounds_to(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """`exact` is float64: float32 may be a few units off, bf16 is that, rounded once."""
    assert actual.dtype is dtype
    rtol = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=1e-5)


def test_embedding_and_select_rows_are_rows(dtype: torch.dtype) -> None:
    table = torch.randn(9, 6).to(dtype)
    found = REFERENCE.embedding(int32([3, 3, 0]), table)
    assert found.dtype is torch.float32
    assert torch.equal(found, table.float()[[3, 3, 0]])
    assert torch.equal(REFERENCE.select_rows(found, int32([2, 0])), found[[2, 0]])
    assert REFERENCE.select_rows(found, int32([])).shape == (0, 6)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_divides_by_the_root_mean_square(
    dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    x, weight = torch.randn(num_tokens, width), torch.randn(width).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_rounds_to(REFERENCE.rms_norm(x, weight, 1e-5), exact, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_head_rms_norm_is_rms_norm_of_each_q_and_k_head_and_leaves_v(
    dtype: torch.dtype, num_tokens: int, shape: AttentionShape
) -> None:
    qkv = torch.randn(num_tokens, shape.qkv_width)
    q_weight, k_weight = torch.randn(2, shape.head_dim).to(dtype)
    exact = qkv.double().unflatten(1, (-1, shape.head_dim))
    for first, count, weight in (
        (0, shape.num_heads, q_weight),
        (shape.num_heads, shape.num_kv_heads, k_weight),
    ):
        heads = exact[:, first : first + count]
        heads[:] = torch.nn.functional.rms_norm(heads, weight.shape, weight.double(), 1e-6)
    before = qkv.clone()
    found = REFERENCE.head_rms_norm(qkv, q_weight, k_weight, 1e-6, shape)
    assert_rounds_to(found, exact.flatten(1), torch.float32)
    assert torch.equal(
        found[:, -shape.num_kv_heads * shape.head_dim :],
        qkv[:, -shape.num_kv_heads * shape.head_dim :],
    )
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_adds_bias_and_residual_in_float32(
    dtype: torch.dtype, num_tokens: int, has_bias: bool, has_residual: bool
) -> None:
    x, weight = torch.randn(num_tokens, 40).to(dtype), torch.randn(12, 40).to(dtype)
    bias = torch.randn(12).to(dtype) if has_bias else None
    residual = torch.randn(num_tokens, 12) if has_residual else None
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    if residual is not None:
        exact += residual.double()
        before = residual.clone()
    assert_rounds_to(REFERENCE.linear(x, weight, bias, residual), exact, torch.float32)
    assert residual is None or torch.equal(residual, before)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_silu_mul_gates_the_second_half_by_the_first(
    dtype: torch.dtype, num_tokens: int, has_bias: bool
) -> None:
    x, weight = torch.randn(num_tokens, 40).to(dtype), torch.randn(14, 40).to(dtype)
    bias = torch.randn(14).to(dtype) if has_bias else None
    gate, up = (x.double() @ weight.double().T + (bias.double() if has_bias else 0)).split(7, -1)
    exact = gate / (1 + torch.exp(-gate)) * up
    assert_rounds_to(REFERENCE.linear_silu_mul(x, weight, bias), exact, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rotary_turns_q_and_k_pairs_as_complex_numbers_and_leaves_v(
    num_tokens: int, shape: AttentionShape
) -> None:
    head_dim, half = shape.head_dim, shape.head_dim // 2
    angles = torch.arange(50)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    qkv = torch.randn(num_tokens, shape.qkv_width)
    positions = torch.randint(50, (num_tokens,), dtype=torch.int32)
    heads = qkv.double().unflatten(1, (-1, head_dim))
    turned = torch.complex(heads[..., :half], heads[..., half:])
    turned *= torch.complex(*cos_sin.double()[positions].chunk(2, dim=-1))[:, None]
    exact = torch.cat([turned.real, turned.imag], dim=-1)
    exact[:, shape.num_heads + shape.num_kv_heads :] = heads[:, -shape.num_kv_heads :]
    before = qkv.clone()
    found = REFERENCE.rotary(qkv, positions, cos_sin, shape)
    assert_rounds_to(found, exact.flatten(1), torch.float32)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_store_kv_writes_the_slots_of_one_layer_and_nothing_else(
    dtype: torch.dtype, block_size: int, shape: AttentionShape
) -> None:
    num_slots = 4 * block_size
    slots = torch.randperm(num_slots)[: max(1, num_slots - 3)].int()
    qkv = torch.randn(len(slots), shape.qkv_width)
    kv_cache = torch.full((4, 2, 2, shape.num_kv_heads, block_size, shape.head_dim), 7.0)
    kv_cache = kv_cache.to(dtype)
    REFERENCE.store_kv(qkv, kv_cache, slots, LAYER, shape)
    expected = torch.full_like(kv_cache, 7.0)
    heads = qkv.to(dtype).unflatten(1, (-1, shape.head_dim))
    for token, slot in enumerate(slots.tolist()):
        for head in range(shape.num_kv_heads):
            at = (head, slot % block_size)
            block = expected[slot // block_size, LAYER]
            block[0][at] = heads[token, shape.num_heads + head]
            block[1][at] = heads[token, shape.num_heads + shape.num_kv_heads + head]
    assert torch.equal(kv_cache, expected)


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention_is_causal_attention_over_scattered_blocks(
    dtype: torch.dtype, block_size: int, shape: AttentionShape
) -> None:
    """A prompt, a chunk, a decode and an idle row; what was never stored is NaN."""
    lengths, num_queries = [17, 23, 40, 3], [17, 6, 1, 0]
    rows = [torch.randn(length, shape.qkv_width) for length in lengths]
    widest = -(-max(lengths) // block_size)
    blocks = torch.randperm(4 * widest).int().reshape(4, widest)
    size = (4 * widest, 2, 2, shape.num_kv_heads, block_size, shape.head_dim)
    kv_cache = torch.full(size, float("nan"), dtype=dtype)
    for row, table in zip(rows, blocks, strict=True):
        positions = torch.arange(len(row))
        slots = table[positions // block_size] * block_size + positions % block_size
        REFERENCE.store_kv(row, kv_cache, slots, LAYER, shape)
    latest = [row[len(row) - count :] for row, count in zip(rows, num_queries, strict=True)]
    found = REFERENCE.paged_attention(
        torch.cat(latest),
        kv_cache,
        int32([0, 17, 23, 24, 24]),
        int32(lengths),
        blocks,
        LAYER,
        shape,
        0.3,
    )
    exact = [
        attend_densely(row, dtype, shape, 0.3)[len(row) - count :]
        for row, count in zip(rows, num_queries, strict=True)
    ]
    assert_rounds_to(found, torch.cat(exact), dtype)


def attend_densely(row: Tensor, dtype: torch.dtype, shape: AttentionShape, scale: float) -> Tensor:
    """All queries of one row in float64, without pages; K and V as rounded as they are stored."""
    heads = row.unflatten(1, (-1, shape.head_dim)).transpose(0, 1)
    queries, keys, values = heads.split(
        [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=0
    )
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries[None].double(),
        keys[None].to(dtype).double(),
        values[None].to(dtype).double(),
        is_causal=True,
        enable_gqa=True,
        scale=scale,
    )
    return attended[0].transpose(0, 1).flatten(1)
