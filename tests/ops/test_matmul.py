"""Matrix products against float64, and the same bits however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.arrays import pack, to_inputs, to_tensor
from torch import Tensor

from streamkv import _cpu
from streamkv._cpu import ops

# (outputs, depth): less than a vector, just over a panel, odd, and depths that are cut in blocks.
SHAPES = [(1, 2), (7, 6), (33, 40), (100, 250), (65, 258), (576, 576), (40, 1536)]
# A row alone, tiles that are whole, that begin and that are left over, rows cut in items.
NUM_ROWS = [0, 1, 2, 3, 4, 5, 7, 12, 13, 25, 130, 300]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def random_product(
    num_rows: int, num_outputs: int, depth: int, dtype: str, *, is_paired: bool = False
) -> tuple[Tensor, Tensor, _cpu.PackedWeight]:
    """x and weight as float32, both exact in the dtypes that they are used in."""
    weight = torch.randn(num_outputs, depth).to(DTYPES[dtype])
    x = torch.randn(num_rows, depth).to(DTYPES[dtype]).float()
    return x, weight.float(), pack(weight, is_paired=is_paired)


def assert_close_to_product(actual: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within what float32 sums of products may be off at the very most."""
    assert actual.dtype is torch.float32
    exact = x.double() @ weight.double().T
    bound = (x.abs().double() @ weight.abs().double().T) * (x.shape[1] * 2**-24) + 1e-30
    assert actual.shape == exact.shape
    assert bool(((actual.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_is_x_times_the_transposed_weight(
    isa: str, team: _cpu.Team, dtype: str, shape: tuple[int, int]
) -> None:
    x, weight, packed = random_product(max(NUM_ROWS), *shape, dtype)
    for num_rows in NUM_ROWS:
        out = ops.linear(team, to_inputs(x[:num_rows], packed), packed)
        assert_close_to_product(to_tensor(out), x[:num_rows], weight)


def test_a_product_of_whole_numbers_is_exact(isa: str, team: _cpu.Team, dtype: str) -> None:
    """No element is left out, counted twice or taken from another row."""
    weight = torch.randint(-4, 5, (90, 600)).to(DTYPES[dtype])
    x = torch.randint(-4, 5, (50, 600)).float()
    packed = pack(weight)
    out = ops.linear(team, to_inputs(x, packed), packed)
    assert torch.equal(to_tensor(out), x @ weight.float().T)


@pytest.mark.parametrize("num_rows", [1, 3, 13, 40])
@pytest.mark.parametrize("shape", [(33, 40), (576, 576)], ids=str)
def test_bias_then_residual_are_added_to_the_sum(
    isa: str, team: _cpu.Team, dtype: str, shape: tuple[int, int], num_rows: int
) -> None:
    x, _, packed = random_product(num_rows, *shape, dtype)
    inputs = to_inputs(x, packed)
    bias = np.random.default_rng(0).standard_normal(shape[0], np.float32)
    residual = np.random.default_rng(1).standard_normal((num_rows, shape[0]), np.float32)
    plain = ops.linear(team, inputs, packed)
    assert np.array_equal(ops.linear(team, inputs, packed, bias), plain + bias)
    assert np.array_equal(ops.linear(team, inputs, packed, residual=residual), plain + residual)
    both = ops.linear(team, inputs, packed, bias, residual)
    assert np.array_equal(both, plain + bias + residual)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("inner", [1, 31, 33, 100])
def test_linear_silu_mul_gates_the_second_half_by_the_first(
    isa: str, team: _cpu.Team, dtype: str, inner: int, with_bias: bool
) -> None:
    for num_rows in NUM_ROWS:
        x, weight, packed = random_product(num_rows, 2 * inner, 72, dtype, is_paired=True)
        bias = torch.randn(2 * inner) if with_bias else None
        out = to_tensor(
            ops.linear_silu_mul(
                team, to_inputs(x, packed), packed, None if bias is None else bias.numpy()
            )
        )
        y = x.double() @ weight.double().T
        if bias is not None:
            y += bias.double()
        exact = torch.nn.functional.silu(y[:, :inner]) * y[:, inner:]
        expected_dtype = DTYPES[packed.input_dtype]
        assert out.dtype is expected_dtype
        rtol = 2**-8 if expected_dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=1e-4)


def test_silu_is_right_far_from_zero(isa: str, team: _cpu.Team) -> None:
    gate = torch.tensor([-3e38, -200.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 3e38])
    weight = torch.zeros(20, 10)
    weight[:10] = torch.eye(10)  # gate i is x[i]
    packed = pack(weight, is_paired=True)
    bias = np.concatenate([np.zeros(10, np.float32), np.ones(10, np.float32)])  # ups are 1
    out = to_tensor(ops.linear_silu_mul(team, gate[None].numpy(), packed, bias))
    exact = gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(out[0].double(), exact, rtol=4e-6, atol=1e-36)


@pytest.mark.parametrize("shape", [(100, 250), (576, 576), (40, 1536), (64, 5632)], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_number(
    isa: str, team: _cpu.Team, dtype: str, shape: tuple[int, int]
) -> None:
    x, _, packed = random_product(300, *shape, dtype)
    inputs = to_inputs(x, packed)
    alone = np.concatenate([ops.linear(team, inputs[i : i + 1], packed) for i in range(300)])
    for num_rows in NUM_ROWS[2:]:
        for first in {0, 300 - num_rows}:
            rows = slice(first, first + num_rows)
            together = ops.linear(team, inputs[rows], packed)
            assert np.array_equal(together, alone[rows]), (num_rows, first)


def test_a_gated_row_has_the_same_bits_alone_and_among_any_number(
    isa: str, team: _cpu.Team, dtype: str
) -> None:
    x, _, packed = random_product(130, 3072, 576, dtype, is_paired=True)
    inputs = to_inputs(x, packed)
    alone = np.concatenate(
        [ops.linear_silu_mul(team, inputs[i : i + 1], packed) for i in range(130)]
    )
    for num_rows in NUM_ROWS[2:-1]:
        together = ops.linear_silu_mul(team, inputs[:num_rows], packed)
        assert np.array_equal(together, alone[:num_rows]), num_rows


@pytest.mark.parametrize("num_rows", [1, 5, 33, 200])
def test_more_threads_change_no_bit(isa: str, dtype: str, num_rows: int) -> None:
    x, _, packed = random_product(num_rows, 700, 576, dtype)
    inputs = to_inputs(x, packed)
    expected = ops.linear(_cpu.Team(1), inputs, packed)
    for num_threads in (2, 3, 5):
        assert np.array_equal(ops.linear(_cpu.Team(num_threads), inputs, packed), expected)


def test_an_output_has_the_same_bits_in_any_matrix(isa: str, team: _cpu.Team, dtype: str) -> None:
    """Stacked with others or not, paired or not: a fused QKV gives what three products gave."""
    x, weight, packed = random_product(20, 96, 578, dtype)
    together = ops.linear(team, to_inputs(x, packed), packed)
    for first, end in [(0, 5), (5, 64), (64, 96)]:
        part = pack(weight[first:end].to(DTYPES[dtype]))
        out = ops.linear(team, to_inputs(x, part), part)
        assert np.array_equal(out, together[:, first:end])


@pytest.mark.parametrize("num_rows", [2, 20])
def test_what_is_not_finite_stays_in_its_row(
    isa: str, team: _cpu.Team, dtype: str, num_rows: int
) -> None:
    x, weight, packed = random_product(num_rows, 50, 64, dtype)
    x[1, 3] = float("nan")
    out = to_tensor(ops.linear(team, to_inputs(x, packed), packed))
    assert bool(out[1].isnan().all())
    others = [i for i in range(num_rows) if i != 1]
    assert_close_to_product(out[others], x[others], weight)
