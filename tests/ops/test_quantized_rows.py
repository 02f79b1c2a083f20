"""Rows of inputs for quantized weights: every bit of them, whichever op made them."""

from __future__ import annotations

import numpy as np
import pytest
from ops.quantized import INPUT_GROUP, Array, as_groups, quantize_rows

from streamkv import _cpu
from streamkv._cpu import ops

pytestmark = pytest.mark.usefixtures("isa")

# Less than a group, whole ones, and what is left over, in whole vectors and in parts of one.
WIDTHS = [1, 7, 31, 32, 33, 48, 100, 576]
NUM_ROWS = [0, 1, 90]


def random_rows(num_rows: int, width: int) -> Array:
    """Of every magnitude that float32 has."""
    rng = np.random.default_rng(width)
    magnitudes = 10.0 ** rng.integers(-44, 37, (num_rows, 1))
    return (rng.standard_normal((num_rows, width)) * magnitudes).astype(np.float32)


def assert_same_groups(actual: Array, expected: Array) -> None:
    for field in INPUT_GROUP.names or ():
        np.testing.assert_array_equal(actual[field], expected[field], err_msg=field)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_group_is_scaled_by_its_greatest_magnitude(team: _cpu.Team, width: int) -> None:
    for num_rows in NUM_ROWS:
        x = random_rows(num_rows, width)
        assert_same_groups(as_groups(ops.quantize(team, x)), quantize_rows(x))


def test_values_are_rounded_to_the_nearest_even(team: _cpu.Team) -> None:
    row = np.zeros(32, np.float32)
    row[:8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 125.5]
    group = as_groups(ops.quantize(team, row[None]))[0, 0]
    assert group["values"][:8].tolist() == [127, 0, 2, 2, 0, -2, -126, 126]
    assert group["scale"] == 1
    assert (group["negative_sum"], group["scaled_sum"]) == (-129, 129)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -(2.0**-120)])
def test_zeros_and_what_has_no_finite_inverse_are_zero(team: _cpu.Team, value: float) -> None:
    groups = ops.quantize(team, np.full((1, 64), value, np.float32))
    assert_same_groups(as_groups(groups), np.zeros((1, 2), INPUT_GROUP))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_has_no_finite_scale(team: _cpu.Team, value: float) -> None:
    x = random_rows(32, 96)
    x[np.arange(32), 32 + np.arange(32)] = value
    groups = as_groups(ops.quantize(team, x))
    assert np.isnan(groups["scale"]).tolist() == [[False, True, False]] * 32
    assert np.isnan(groups["scaled_sum"]).tolist() == [[False, True, False]] * 32
    assert_same_groups(groups, quantize_rows(x))


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_to_int8_is_rms_norm_quantized(team: _cpu.Team, width: int) -> None:
    weight = np.random.default_rng(1).standard_normal(width).astype(np.float32)
    for num_rows in NUM_ROWS:
        x = random_rows(num_rows, width)
        x[:1] = np.nan
        normed = ops.rms_norm(team, x, weight, 1e-5, "float32")
        groups = ops.rms_norm(team, x, weight, 1e-5, "int8")
        assert np.array_equal(groups, ops.quantize(team, normed))
        assert_same_groups(as_groups(groups), quantize_rows(normed))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads(
    num_threads: int,
) -> None:
    x, weight = random_rows(200, 960), np.ones(960, np.float32)
    team, alone = _cpu.Team(num_threads), _cpu.Team(1)
    quantized = ops.quantize(team, x)
    normed = ops.rms_norm(team, x, weight, 1e-5, "int8")
    for i in range(0, 200, 7):
        row = x[i : i + 1]
        assert np.array_equal(ops.quantize(alone, row)[0], quantized[i])
        assert np.array_equal(ops.rms_norm(alone, row, weight, 1e-5, "int8")[0], normed[i])
