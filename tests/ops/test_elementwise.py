"""The ops without products and attention, against formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.arrays import pack, to_tensor
from torch import Tensor

from streamkv import _cpu
from streamkv._cpu import ops

# Odd, smaller than a vector, whole vectors, what is left over after several, and a real size.
WIDTHS = [1, 7, 16, 33, 100, 576]
NUM_TOKENS = [0, 1, 5, 90]
HEADS = [(9, 3, 64), (4, 4, 16), (6, 1, 80), (8, 2, 128), (2, 1, 6)]


def rms_norm_exactly(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_divides_by_the_root_mean_square(
    isa: str, team: _cpu.Team, num_tokens: int, width: int
) -> None:
    x, weight = torch.randn(num_tokens, width), torch.randn(width)
    exact = rms_norm_exactly(x, weight, 1e-5)
    normed = to_tensor(ops.rms_norm(team, x.numpy(), weight.numpy(), 1e-5, "float32"))
    assert normed.dtype is torch.float32
    torch.testing.assert_close(normed.double(), exact, rtol=4e-6, atol=2e-6)
    rounded = to_tensor(ops.rms_norm(team, x.numpy(), weight.numpy(), 1e-5, "bfloat16"))
    assert torch.equal(rounded, normed.bfloat16())


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_head_rms_norm_is_rms_norm_of_each_q_and_k_head_and_leaves_v(
    isa: str, team: _cpu.Team, num_tokens: int, heads: tuple[int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q_weight, k_weight = torch.randn(2, head_dim)
    before = qkv.clone()
    arguments = (qkv.flatten(1).numpy(), q_weight.numpy(), k_weight.numpy(), 1e-6)
    out = to_tensor(ops.head_rms_norm(team, *arguments, num_heads, num_kv_heads))
    assert out.dtype is torch.float32 and torch.equal(qkv, before)

    split = [num_heads, num_kv_heads, num_kv_heads]
    (*inputs, v), (*outputs, v_out) = (x.split(split, dim=1) for x in (qkv, out.view(qkv.shape)))
    assert torch.equal(v_out, v)
    for x, normed, weight in zip(inputs, outputs, (q_weight, k_weight), strict=True):
        exact = rms_norm_exactly(x, weight, 1e-6)
        torch.testing.assert_close(normed.double(), exact, rtol=4e-6, atol=2e-6)
        rows = x.reshape(-1, head_dim).contiguous().numpy()
        alone = to_tensor(ops.rms_norm(team, rows, weight.numpy(), 1e-6, "float32"))
        assert torch.equal(normed.reshape(alone.shape), alone)


def test_a_head_of_nan_is_nan_and_no_other(isa: str, team: _cpu.Team) -> None:
    qkv, ones = np.zeros((3, 5, 16), np.float32), np.ones(16, np.float32)
    qkv[1, 2, 7] = np.nan
    normed = ops.head_rms_norm(team, qkv.reshape(3, -1), ones, ones, 1e-6, 3, 1)
    expected = np.zeros_like(qkv)
    expected[1, 2] = np.nan
    np.testing.assert_array_equal(normed, expected.reshape(3, -1))


def test_rms_norm_of_zeros_is_zero_and_of_nan_is_nan(isa: str, team: _cpu.Team) -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, 5] = np.nan
    for out_dtype in ("float32", "bfloat16"):
        normed = to_tensor(ops.rms_norm(team, x, np.ones(64, np.float32), 1e-5, out_dtype))
        assert torch.equal(normed[0], torch.zeros_like(normed[0]))
        assert bool(normed[1].isnan().all())


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rotary_turns_q_and_k_pairs_as_complex_numbers_and_leaves_v(
    isa: str, team: _cpu.Team, num_tokens: int, heads: tuple[int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    half = head_dim // 2
    angles = torch.arange(50)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    positions = torch.randint(50, (num_tokens,), dtype=torch.int32)

    split = qkv.double().unflatten(1, (-1, head_dim))
    turned = torch.complex(split[..., :half], split[..., half:])
    turned *= torch.complex(*cos_sin.double()[positions].chunk(2, dim=-1))[:, None]
    exact = torch.cat([turned.real, turned.imag], dim=-1)

    before = qkv.clone()
    arguments = (qkv.numpy(), positions.numpy(), cos_sin.numpy(), num_heads, num_kv_heads)
    out = to_tensor(ops.rotary(team, *arguments)).unflatten(1, (-1, head_dim))
    rotated = num_heads + num_kv_heads
    torch.testing.assert_close(out[:, :rotated].double(), exact[:, :rotated], rtol=4e-6, atol=2e-6)
    assert torch.equal(out[:, rotated:], qkv.unflatten(1, (-1, head_dim))[:, rotated:])
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (80, 40), (700, 576)], ids=str)
def test_embedding_takes_rows_of_a_packed_weight(
    isa: str, team: _cpu.Team, dtype: str, shape: tuple[int, int], is_paired: bool
) -> None:
    table = torch.randn(shape)
    if dtype == "bfloat16":
        table = table.bfloat16()
    packed = pack(table, is_paired=is_paired)
    for num_tokens in NUM_TOKENS:
        ids = torch.randint(shape[0], (num_tokens,), dtype=torch.int32)
        rows = to_tensor(ops.embedding(team, ids.numpy(), packed))
        assert torch.equal(rows, table[ids].float())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [[], [3], [6, 0, 0, 5], [2] * 100], ids=len)
def test_select_rows_copies_rows(isa: str, team: _cpu.Team, width: int, rows: list[int]) -> None:
    x = torch.randn(7, width)
    selected = ops.select_rows(team, x.numpy(), np.array(rows, np.int32))
    assert torch.equal(to_tensor(selected), x[rows])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads(
    isa: str, num_threads: int
) -> None:
    x, weight = np.random.default_rng(0).standard_normal((200, 960)), np.ones(960, np.float32)
    x = x.astype(np.float32)
    cos_sin = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    position = np.full(200, 5, np.int32)
    team, alone = _cpu.Team(num_threads), _cpu.Team(1)
    normed = ops.rms_norm(team, x, weight, 1e-5, "float32")
    norms = (cos_sin[0], cos_sin[1], 1e-6, 9, 3)
    heads = ops.head_rms_norm(team, x, *norms)
    turned = ops.rotary(team, x, position, cos_sin, 9, 3)
    for i in range(0, 200, 7):
        row = x[i : i + 1]
        assert np.array_equal(ops.rms_norm(alone, row, weight, 1e-5, "float32")[0], normed[i])
        assert np.array_equal(ops.head_rms_norm(alone, row, *norms)[0], heads[i])
        assert np.array_equal(ops.rotary(alone, row, position[:1], cos_sin, 9, 3)[0], turned[i])
