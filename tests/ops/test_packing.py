"""Weights go in and come out: every source type, any rows in any order, nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.arrays import Array, to_array, to_tensor

from streamkv import _cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SOURCES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("source_dtype", SOURCES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (6, 10), (34, 36), (100, 250), (578, 64)], ids=str)
def test_what_is_packed_comes_out_rounded_once(
    isa: str,
    dtype: str,
    shape: tuple[int, int],
    source_dtype: torch.dtype,
    is_paired: bool,
) -> None:
    source = torch.randn(shape).to(source_dtype)
    weight = _cpu.PackedWeight(dtype, *shape, is_paired)
    weight.pack(to_array(source), 0, _cpu.Team(3))
    expected = source.to(DTYPES[dtype]).float()
    assert torch.equal(to_tensor(weight.unpack(0, shape[0])), expected)


@pytest.mark.parametrize("is_paired", [False, True])
def test_rows_may_come_in_any_pieces_and_order(isa: str, dtype: str, is_paired: bool) -> None:
    source = torch.randn(210, 36)
    weight = _cpu.PackedWeight(dtype, 210, 36, is_paired)
    for first, end in [(200, 210), (16, 17), (17, 120), (0, 16), (120, 200)]:
        weight.pack(source[first:end].numpy(), first)
    expected = source.to(DTYPES[dtype]).float()
    assert torch.equal(to_tensor(weight.unpack(0, 210)), expected)
    assert torch.equal(to_tensor(weight.unpack(101, 8)), expected[101:109])


def test_packing_again_changes_no_other_row(isa: str, dtype: str) -> None:
    source = torch.randn(100, 20)
    weight = _cpu.PackedWeight(dtype, 100, 20)
    weight.pack(source.numpy(), 0)
    weight.pack(source[:40].numpy(), 30)
    source[30:70] = source[:40].clone()
    assert torch.equal(to_tensor(weight.unpack(0, 100)), source.to(DTYPES[dtype]).float())


def every_half() -> Array:
    """All float16 numbers, 64 rows of 1024."""
    return np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16).reshape(64, 1024)


def test_every_float16_is_exact_in_float32(isa: str) -> None:
    weight = _cpu.PackedWeight("float32", 64, 1024)
    weight.pack(every_half(), 0)
    np.testing.assert_array_equal(weight.unpack(0, 64), every_half().astype(np.float32))


def test_float32_rounds_to_bfloat16_to_the_nearest_even(isa: str) -> None:
    """Ties, what is just beside them, denormals, infinities, overflow and NaN, as torch does."""
    bits = np.arange(0, 2**32, 2**15, dtype=np.uint64).reshape(-1, 1)
    source = (bits + np.array([0, 1], np.uint64)).astype(np.uint32).view(np.float32)
    source = np.ascontiguousarray(source.reshape(64, -1))
    expected = torch.from_numpy(source).bfloat16().float().numpy()
    weight = _cpu.PackedWeight("bfloat16", *source.shape)
    weight.pack(source, 0)
    np.testing.assert_array_equal(weight.unpack(0, 64), expected)


def test_a_weight_says_what_it_is(isa: str, dtype: str) -> None:
    weight = _cpu.PackedWeight(dtype, 100, 20, is_paired=True)
    assert (weight.dtype, weight.num_outputs, weight.depth) == (dtype, 100, 20)
    assert weight.is_paired and not _cpu.PackedWeight(dtype, 100, 20).is_paired
    widened = dtype == "float32" or isa != "avx512_bf16"
    assert weight.input_dtype == ("float32" if widened else "bfloat16")
    assert weight.num_bytes >= 100 * 20 * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float16", 8, 8), "dtype: expected 'float32' or 'bfloat16', got 'float16'"),
        (("float32", 0, 8), "num_outputs: expected a positive number up to .*, got 0"),
        (("float32", 2**31, 8), f"num_outputs: expected .* up to .*, got {2**31}"),
        (("float32", 2**60, 16), f"num_outputs: expected .* up to .*, got {2**60}"),
        (("float32", 7, 8, True), "num_outputs: expected a positive even .* paired .* got 7"),
        (("bfloat16", 2**31, 8, True), f"num_outputs: expected .* paired .* got {2**31}"),
        (("float32", 8, 7), "depth: expected a positive even number up to .*, got 7"),
        (("float32", 8, 0), "depth: expected a positive even number up to .*, got 0"),
        (("float32", 16, 2**60), f"depth: expected .* up to .*, got {2**60}"),
        (("float32", 2**31 - 1, 2**31 - 2), "num_outputs: expected at most .* of depth 2147483646"),
        (("bfloat16", 2**30, 2**30, True), "num_outputs: expected at most .* of depth 1073741824"),
    ],
    ids=str,
)
def test_a_weight_that_can_not_be_is_an_error(
    arguments: tuple[str, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^PackedWeight: {message}"):
        _cpu.PackedWeight(*arguments)


@pytest.mark.parametrize(
    ("source", "first", "message"),
    [
        (np.zeros((8, 5), np.float32), 0, r"source: .*\[rows, 4\], got float32 \[8, 5\]"),
        (np.zeros(4, np.float32), 0, r"source: .*\[rows, 4\], got float32 \[4\]"),
        (np.zeros((8, 4), np.float64), 0, r"source: .* got float64 \[8, 4\]"),
        (np.zeros((4, 8), np.float32).T, 0, r"source: .* strided"),
        (np.zeros((8, 4), np.float32), 1, r"first_output: .* 8 outputs, got 8 from 1"),
        (np.zeros((1, 4), np.float32), -1, r"first_output: .* 8 outputs, got 1 from -1"),
        (np.zeros((1, 4), np.float32), 2**63 - 1, r"first_output: .* 8 outputs, got 1 from 9"),
    ],
)
def test_rows_that_do_not_fit_are_an_error(source: Array, first: int, message: str) -> None:
    weight = _cpu.PackedWeight("float32", 8, 4)
    with pytest.raises(ValueError, match=f"^PackedWeight.pack: {message}"):
        weight.pack(source, first)


@pytest.mark.parametrize(("first", "count"), [(2**63 - 1, 1), (1, 2**63 - 1), (-1, 1), (0, -1)])
def test_rows_outside_a_weight_are_not_unpacked(first: int, count: int) -> None:
    weight = _cpu.PackedWeight("float32", 8, 4)
    with pytest.raises(ValueError, match=f"8 outputs, got {count} from {first}$"):
        weight.unpack(first, count)


def test_baseline_is_always_there_and_the_best_comes_first() -> None:
    isas = _cpu.available_isas()
    assert isas[-1] == ("baseline" if "neon" not in isas else "neon")
    assert _cpu.isa() == isas[0]


def test_an_unknown_instruction_set_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected .*\(.*\), got 'sse9'"):
        _cpu.set_isa("sse9")


def test_a_weight_belongs_to_the_instruction_set_that_packed_it() -> None:
    best, *others = _cpu.available_isas()
    weight = _cpu.PackedWeight("float32", 8, 4)
    x = np.zeros((1, 4), np.float32)
    try:
        for isa in others:
            _cpu.set_isa(isa)
            with pytest.raises(ValueError, match=f"expected one packed for {isa}, got {best}"):
                _cpu.ops.linear(_cpu.Team(1), x, weight)
    finally:
        _cpu.set_isa(best)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_an_arena_share_memory_and_nothing_else(dtype):
    arena = _cpu.WeightArena()
    shapes = [(8 + 3 * index, 2 + 2 * (index % 5)) for index in range(40)] + [(70_000, 600)]
    sources = [np.full(shape, index + 1, np.float32) for index, shape in enumerate(shapes)]
    weights = [_cpu.PackedWeight(dtype, *shape, False, arena) for shape in shapes]
    del arena  # the weights keep what they lie in
    for weight, source in zip(weights, sources, strict=True):
        weight.pack(source, 0)
    for weight, source in zip(weights, sources, strict=True):
        np.testing.assert_array_equal(weight.unpack(0, len(source)), source)
