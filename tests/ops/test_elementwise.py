"""The ops without attention, each implementation against formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from ops.paged import int32
from torch import Tensor

from streamkv.ops import AttentionShape
from streamkv.ops.kernels import KernelTable

# Odd, smaller than a vector, whole vectors, and real hidden sizes.
WIDTHS = [1, 7, 16, 33, 576]
NUM_TOKENS = [0, 1, 5]
SHAPES = [
    AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64),
    AttentionShape(num_heads=4, num_kv_heads=4, head_dim=16),
    AttentionShape(num_heads=6, num_kv_heads=1, head_dim=80),
    AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128),
]


def assert_rounds_to(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """`exact` is float64: float32 may be a few units off, bf16 is that, rounded once."""
    assert actual.dtype is dtype
    rtol = 4e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=2e-6)


def rms_norm_exactly(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_divides_by_the_root_mean_square(
    kernels: KernelTable, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    x, weight = torch.randn(num_tokens, width).to(dtype), torch.randn(width).to(dtype)
    actual = kernels.rms_norm(x, weight, 1e-5)
    assert_rounds_to(actual, rms_norm_exactly(x, weight, 1e-5), dtype)


def test_rms_norm_of_zeros_is_zero(kernels: KernelTable, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 64, dtype=dtype)
    assert torch.equal(kernels.rms_norm(x, torch.ones(64, dtype=dtype), 1e-5), x)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_norms_the_rounded_sum_and_changes_no_input(
    kernels: KernelTable, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    x, residual = torch.randn(2, num_tokens, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    x_before, residual_before = x.clone(), residual.clone()
    normed, new_residual = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, (x.double() + residual.double()).to(dtype))
    assert_rounds_to(normed, rms_norm_exactly(new_residual, weight, 1e-5), dtype)
    assert torch.equal(x, x_before) and torch.equal(residual, residual_before)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_gates_the_second_half_by_the_first(
    kernels: KernelTable, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    gate_up = (torch.randn(num_tokens, 2 * width) * 8).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounds_to(kernels.silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up, dtype)


def test_silu_mul_is_right_far_from_zero(kernels: KernelTable, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-3e38, -200.0, -87.0, -1e-30, 0.0, 1e-30, 87.0, 200.0, 3e38]])
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=-1).to(dtype)
    gate = gate_up[:, :9].double()
    assert_rounds_to(kernels.silu_mul(gate_up), gate * torch.sigmoid(gate), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rotary_turns_q_and_k_pairs_as_complex_numbers_and_leaves_v(
    kernels: KernelTable, dtype: torch.dtype, num_tokens: int, shape: AttentionShape
) -> None:
    head_dim, half = shape.head_dim, shape.head_dim // 2
    angles = torch.arange(50)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    qkv = torch.randn(num_tokens, shape.qkv_width).to(dtype)
    positions = torch.randint(50, (num_tokens,), dtype=torch.int32)

    heads = qkv.double().unflatten(1, (-1, head_dim))
    turned = torch.complex(heads[..., :half], heads[..., half:])
    turned *= torch.complex(*cos_sin.double()[positions].chunk(2, dim=-1))[:, None]
    exact = torch.cat([turned.real, turned.imag], dim=-1)
    exact[:, shape.num_heads + shape.num_kv_heads :] = heads[:, -shape.num_kv_heads :]

    before = qkv.clone()
    assert_rounds_to(kernels.rotary(qkv, positions, cos_sin, shape), exact.flatten(1), dtype)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_store_kv_writes_the_named_slots_of_the_layer_and_nothing_else(
    kernels: KernelTable, dtype: torch.dtype, block_size: int, shape: AttentionShape
) -> None:
    cache = torch.randn(6, 3, 2, shape.num_kv_heads, block_size, shape.head_dim).to(dtype)
    qkv = torch.randn(4, shape.qkv_width).to(dtype)
    slots = torch.randperm(6 * block_size)[:4].tolist()
    expected = cache.clone()
    for token, slot in enumerate(slots):
        kv = qkv[token, shape.num_heads * shape.head_dim :]
        kv = kv.view(2, shape.num_kv_heads, shape.head_dim)
        expected[slot // block_size, 1, :, :, slot % block_size] = kv
    kernels.store_kv(qkv, cache, int32(slots), 1, shape)
    assert torch.equal(cache, expected)


def test_store_kv_of_no_tokens_writes_nothing(kernels: KernelTable, dtype: torch.dtype) -> None:
    shape = SHAPES[0]
    cache = torch.randn(2, 1, 2, 3, 16, 64).to(dtype)
    before = cache.clone()
    kernels.store_kv(torch.empty(0, shape.qkv_width, dtype=dtype), cache, int32([]), 0, shape)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("indices", [[], [3], [6, 0, 0, 5]], ids=str)
def test_embedding_and_select_rows_pick_rows(
    kernels: KernelTable, dtype: torch.dtype, width: int, indices: list[int]
) -> None:
    table = torch.randn(7, width).to(dtype)
    expected = torch.stack([table[i] for i in indices]) if indices else table[:0]
    assert torch.equal(kernels.embedding(int32(indices), table), expected)
    assert torch.equal(kernels.select_rows(table, int32(indices)), expected)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_multiplies_by_the_transposed_weight(
    kernels: KernelTable, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(9, 40).to(dtype)
    bias = torch.randn(9).to(dtype) if with_bias else None
    exact = x.double() @ weight.double().T
    actual = kernels.linear(x, weight, bias)
    if bias is not None:
        exact += bias.double()
    scale = 1e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(actual.double(), exact, rtol=scale, atol=scale * math.sqrt(40))


def test_float32_rounds_to_bf16_to_the_nearest_even(native_table: KernelTable) -> None:
    x = torch.randn(64, 64).bfloat16()
    tiny = torch.full((64, 64), 2.0**-9).bfloat16()  # sums fall between two bf16 numbers
    _, rounded = native_table.add_rms_norm(x, tiny, torch.ones(64).bfloat16(), 1e-5)
    assert torch.equal(rounded, (x.double() + tiny.double()).bfloat16())
    nan = torch.full((1, 64), float("nan")).bfloat16()
    assert native_table.add_rms_norm(nan, nan, nan[0], 1e-5)[1].isnan().all()
