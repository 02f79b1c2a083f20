"""Float rows become blocks: byte for byte as gguf's where it rounds alone, better where it looks
for scales."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize
from ops.arrays import Array

from streamkv import _cpu

SEARCHED = ["Q4_0", "Q4_1"]
FORMATS = ["int8", "Q8_0", *SEARCHED]
# Deviations of numbers from block to block as weights have them, with a few far out.
Numbers = Callable[[np.random.Generator, tuple[int, int]], Array]
NUMBERS: dict[str, Numbers] = {
    "normal": lambda random, shape: random.normal(size=shape) * 0.05,
    "far out": lambda random, shape: random.standard_t(3, size=shape) * 0.02,
    "shifted": lambda random, shape: random.normal(size=shape) * 0.01 + 0.3,
    "tiny": lambda random, shape: random.normal(size=shape) * 1e-6,
}


def make(kind: str, num_rows: int = 64, depth: int = 256) -> Array:
    numbers = NUMBERS[kind](np.random.default_rng(7), (num_rows, depth))
    return numbers.astype(np.float32)


def decode(blocks: Array, name: str) -> Array:
    """float32 of quantized rows, by gguf."""
    if name == "int8":
        scale = blocks[:, :4].copy().view(np.float32)
        return blocks[:, 4:].view(np.int8).astype(np.float32) * scale
    return dequantize(blocks, GGMLQuantizationType[name])


def square_errors(x: Array, blocks: Array, name: str) -> Array:
    """Of each block of 32."""
    error = x.astype(np.float64) - decode(blocks, name)
    return (error**2).reshape(-1, 32).sum(axis=1)


@pytest.mark.parametrize("kind", NUMBERS)
def test_q8_0_is_just_what_gguf_makes(kind: str) -> None:
    x = make(kind)
    x[3, :32] = 0
    x[5, 32:64] = np.arange(-16, 16) + 0.5  # ties
    expected = gguf_quantize(x, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(_cpu.quantize(x, "Q8_0"), expected)


@pytest.mark.parametrize("depth", [1, 3, 33, 256])
@pytest.mark.parametrize("kind", NUMBERS)
def test_int8_has_one_scale_a_row(kind: str, depth: int) -> None:
    x = make(kind, depth=depth)
    x[2] = 0
    blocks = _cpu.quantize(x, "int8")
    largest = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        factor = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    np.testing.assert_array_equal(blocks[:, :4].copy().view(np.float32), largest / np.float32(127))
    np.testing.assert_array_equal(blocks[:, 4:].view(np.int8), np.rint(x * factor))


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", SEARCHED)
def test_no_block_is_worse_than_the_plain_one(name: str, kind: str) -> None:
    x = make(kind)
    plain = square_errors(x, gguf_quantize(x, GGMLQuantizationType[name]), name)
    assert np.all(square_errors(x, _cpu.quantize(x, name), name) <= plain * 1.0001 + 1e-20)


@pytest.mark.parametrize(("name", "most"), [("Q4_0", 0.92), ("Q4_1", 0.83)])
def test_the_search_lessens_the_error_of_normal_numbers(name: str, most: float) -> None:
    x = make("normal", num_rows=256)
    plain = square_errors(x, gguf_quantize(x, GGMLQuantizationType[name]), name)
    assert square_errors(x, _cpu.quantize(x, name), name).sum() < most * plain.sum()


@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_finds_nearly_the_best_of_a_fine_grid(name: str) -> None:
    """Scales on a fine grid, each with its best minimum: slow, and little better."""
    x = make("normal", num_rows=4).reshape(-1, 32).astype(np.float64)
    low, high, bottom = x.min(axis=1), x.max(axis=1), 0 if name == "Q4_1" else -8
    best = np.full(len(x), np.inf)
    for step in np.linspace(0.7, 1.15, 91):
        if name == "Q4_1":
            scale = step * (high - low)[:, None] / 15
            minima = [low[:, None] + shift * scale for shift in np.linspace(-0.5, 2.5, 31)]
        else:
            largest = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
            scale, minima = largest / -8 * step, [np.zeros((len(x), 1))]
        for minimum in minima:
            level = np.clip(np.rint((x - minimum) / scale), bottom, bottom + 15)
            best = np.minimum(best, ((level * scale + minimum - x) ** 2).sum(axis=1))
    flat = x.astype(np.float32)
    found = square_errors(flat, _cpu.quantize(flat, name), name)
    assert found.sum() < 1.06 * best.sum()


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_has_exactly_comes_back(name: str) -> None:
    levels = np.random.default_rng(3).integers(-7, 8, (8, 64)).astype(np.float32)
    levels[:, ::32], levels[:, 1::32] = -8, 7
    scale = np.float32(2.0**-6)
    if name in ("int8", "Q8_0"):
        levels[:, ::32] = 127
    np.testing.assert_array_equal(decode(_cpu.quantize(levels * scale, name), name), levels * scale)


@pytest.mark.parametrize("name", FORMATS)
def test_constant_rows_and_zeros_stay_so(name: str) -> None:
    x = np.zeros((3, 64), np.float32)
    x[1], x[2] = 0.25, -0.5
    np.testing.assert_allclose(decode(_cpu.quantize(x, name), name), x, rtol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_narrow_sources_are_taken_as_the_floats_they_are(name: str) -> None:
    x = make("normal")
    half = x.astype(np.float16)
    half[0, :4] = [6e-8, -3e-6, 0, 2e-5]  # denormals
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    for narrow, wide in [(half, half.astype(np.float32)), (bits, widened)]:
        np.testing.assert_array_equal(_cpu.quantize(narrow, name), _cpu.quantize(wide, name))


@pytest.mark.parametrize("name", FORMATS)
def test_threads_change_no_byte(name: str) -> None:
    x = make("far out", num_rows=333)
    np.testing.assert_array_equal(_cpu.quantize(x, name, _cpu.Team(3)), _cpu.quantize(x, name))
    one = np.concatenate([_cpu.quantize(x[i : i + 1], name) for i in range(20)])
    np.testing.assert_array_equal(_cpu.quantize(x, name)[:20], one)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_makes_scales_that_are_not(name: str, bad: float) -> None:
    """So that a broken checkpoint fails where it is used, instead of giving other words."""
    x = make("normal", num_rows=2)
    x[1, 40] = bad
    decoded = decode(_cpu.quantize(x, name), name)
    assert np.isfinite(decoded[0]).all()
    if name != "int8":  # a scale a block
        assert np.isnan(decoded[1, 32:64]).all() and np.isfinite(decoded[1, 64:]).all()
    elif bad != 3e38:  # float32 scales reach that far
        assert np.isnan(decoded[1]).all()


def report(x: Array, name: str) -> tuple[float, float]:
    blocks, largest, lost = _cpu.quantize_reporting(x, name)
    np.testing.assert_array_equal(blocks, _cpu.quantize(x, name))
    assert largest == np.abs(x[np.isfinite(x)]).max()
    return largest, lost


@pytest.mark.parametrize("factor", [0.03, 1.0, 1e3])
@pytest.mark.parametrize("kind", ["normal", "far out", "shifted"])
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_lost_where_float16_has_the_scales(name: str, kind: str, factor: float) -> None:
    x = make(kind) * np.float32(factor)
    x[3], x[4], x[5, 32:64] = 0, 0.25, 0
    assert report(x, name)[1] == 0


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_too_large_or_too_small_for_float16_are_reported(name: str) -> None:
    x = make("normal")
    with_scale = 0 if name == "int8" else np.inf  # a float32 a row
    x[7, 64:96] *= 1e9
    assert report(x, name)[1] == with_scale
    x[7, 64:96] *= 1e-19
    lost = report(x, name)[1]
    if name == "int8":
        assert lost == 0
    else:
        blocks = square_errors(x, _cpu.quantize(x, name), name).reshape(64, 8)
        # at least the error, and no more than all that was there
        assert np.sqrt(blocks[7, 2] / 32) <= lost <= np.abs(x[7, 64:96]).max()


@pytest.mark.parametrize("name", SEARCHED)
def test_what_is_reported_is_a_block_that_plain_scales_hold_far_better(name: str) -> None:
    x = make("normal", num_rows=256) * np.float32(2e-6)  # scales of about a step of float16
    found = square_errors(x, _cpu.quantize(x, name), name)
    exact = square_errors(x * 2.0**20, _cpu.quantize(x * np.float32(2**20), name), name) / 2.0**40
    assert (found > 16 * exact).any()
    lost = report(x, name)[1]
    assert lost == pytest.approx(np.sqrt(found[found > 6 * exact].max() / 32), rel=1e-3)
    assert report(x * np.float32(2**20), name)[1] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_is_no_loss(name: str, bad: float) -> None:
    x = make("normal")
    x[1, 40] = bad
    blocks, largest, lost = _cpu.quantize_reporting(x, name, _cpu.Team(2))
    assert np.isfinite(largest) and lost == 0


@pytest.mark.parametrize(
    ("name", "depth", "expected"),
    [
        ("int8", 5, 9),
        ("Q4_0", 64, 36),
        ("Q4_1", 64, 40),
        ("Q5_0", 64, 44),
        ("Q5_1", 64, 48),
        ("Q8_0", 64, 68),
        ("Q4_K", 512, 288),
        ("Q5_K", 512, 352),
        ("Q6_K", 512, 420),
    ],
)
def test_rows_take_as_many_bytes_as_in_files(name: str, depth: int, expected: int) -> None:
    assert _cpu.row_bytes(name, depth) == expected


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (make("normal"), "Q4_K", r"format: expected 'int8', 'Q4_0', 'Q4_1' or 'Q8_0', got 'Q4_K'"),
        (make("normal"), "q4_0", r"format: expected one of int8, Q4_0, .*, got 'q4_0'"),
        (make("normal", depth=48), "Q4_0", r"depth: .* multiple of 32 .* for Q4_0, got 48"),
        (np.zeros((2, 0), np.float32), "int8", r"depth: .* positive multiple of 1 .* got 0"),
        (np.zeros((2, 64)), "int8", r"source: expected float32, .* got float64 \[2, 64\]"),
        (np.zeros(64, np.float32), "int8", r"source: expected C-.*\[rows, depth\], got .* \[64\]"),
        (np.zeros((64, 64), np.float32).T[:32], "int8", r"source: .* strided"),
    ],
)
def test_what_can_not_be_quantized_is_an_error(source: Array, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^quantize: {message}"):
        _cpu.quantize(source, name)


@pytest.mark.parametrize("name", ["Q4_K", "int8"])
@pytest.mark.parametrize("depth", [-256, 0, 2**31])
def test_row_bytes_of_no_row_are_an_error(name: str, depth: int) -> None:
    with pytest.raises(ValueError, match=rf"^row_bytes: depth: .* for {name}, got {depth}"):
        _cpu.row_bytes(name, depth)
