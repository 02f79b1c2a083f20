"""Whatever is wrong with an argument is an error that names it, never a crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from ops.arrays import Array

from streamkv import _cpu
from streamkv._cpu import ops

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
W = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
STRIDED = np.zeros((16, 3), np.float32).T


def x(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def int32(values: Sequence[int]) -> Array:
    return np.array(values, np.int32)


def weight(num_outputs: int, depth: int, *, is_paired: bool = False) -> _cpu.PackedWeight:
    return _cpu.PackedWeight("float32", num_outputs, depth, is_paired)


def quantized(num_outputs: int, depth: int, *, is_paired: bool = False) -> _cpu.QuantizedWeight:
    outputs = [num_outputs // 2] * 2 if is_paired else [num_outputs]
    return _cpu.QuantizedWeight(["Q4_0"] * len(outputs), outputs, depth, is_paired)


def groups(num_rows: int, width: int) -> Array:
    """Inputs of int8, all zero."""
    return np.zeros((num_rows, 44 * -(-width // 32)), np.uint8)


def cache() -> _cpu.KvCache:
    return _cpu.KvCache("float32", 4, 1, NUM_KV_HEADS, 8, HEAD_DIM)


def one_token() -> _cpu.Batch:
    zero = int32([0])
    return _cpu.Batch(zero, zero, zero, int32([0, 1]), int32([1]), int32([[0]]), zero)


def rotary(**changes: Any) -> tuple[Any, ...]:
    arguments = {"qkv": x(1, W), "positions": int32([0]), "cos_sin": x(8, HEAD_DIM)}
    arguments |= {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    assert changes.keys() <= arguments.keys()
    return tuple((arguments | changes).values())


def head_rms_norm(**changes: Any) -> tuple[Any, ...]:
    arguments = {"qkv": x(1, W), "q_weight": x(HEAD_DIM), "k_weight": x(HEAD_DIM), "eps": 1e-6}
    arguments |= {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    assert changes.keys() <= arguments.keys()
    return tuple((arguments | changes).values())


BAD_CALLS: list[tuple[str, Callable[[], tuple[Any, ...]], str]] = [
    ("embedding", lambda: (int32([0, 7]), weight(7, 4)), r"token_ids: .* 0 to 6, got 7 at 1"),
    ("embedding", lambda: (int32([-1]), weight(7, 4)), r"token_ids: .* got -1 at 0"),
    (
        "embedding",
        lambda: (np.array([0]), weight(7, 4)),
        r"token_ids: .*int32 \[any\], got int64 \[1\]",
    ),
    ("select_rows", lambda: (x(3, 4), int32([3])), r"rows: .* 0 to 2, got 3 at 0"),
    ("select_rows", lambda: (x(3, 4), x(1)), r"rows: expected int32 \[any\], got float32 \[1\]"),
    (
        "select_rows",
        lambda: (x(3), int32([0])),
        r"x: expected float32 \[any, any\], got float32 \[3\]",
    ),
    ("rms_norm", lambda: (x(3, 4), x(5), 1e-5, "float32"), r"weight: .* \[4\], got float32 \[5\]"),
    (
        "rms_norm",
        lambda: (x(3, 4, dtype="e"), x(4), 1e-5, "float32"),
        r"x: .* got float16 \[3, 4\]",
    ),
    ("rms_norm", lambda: (STRIDED, x(16), 1e-5, "float32"), r"x: expected a C-contiguous array"),
    ("rms_norm", lambda: (x(3, 4), x(4), 1e-5, "float16"), r"out_dtype: .* got 'float16'"),
    (
        "linear",
        lambda: (x(3, 5), weight(8, 4)),
        r"x: expected float32 \[any, 4\], got float32 \[3, 5\]",
    ),
    (
        "linear",
        lambda: (x(3, 4, dtype=np.uint16), weight(8, 4)),
        r"x: expected float32.*, got uint16",
    ),
    ("linear", lambda: (x(4, 3).T, weight(8, 4)), r"x: expected a C-contiguous array"),
    (
        "linear",
        lambda: (x(3, 4), weight(8, 4), x(7)),
        r"bias: expected float32 \[8\], got .* \[7\]",
    ),
    (
        "linear",
        lambda: (x(3, 4), weight(8, 4), None, x(3, 4)),
        r"residual: expected float32 \[3, 8\]",
    ),
    (
        "linear",
        lambda: (x(3, 4), weight(8, 4, is_paired=True)),
        r"weight: expected one .* not paired",
    ),
    ("linear_silu_mul", lambda: (x(3, 4), weight(8, 4)), r"weight: expected a paired one"),
    (
        "linear_silu_mul",
        lambda: (x(3, 4), weight(8, 4, is_paired=True), None, "int8"),
        r"out_dtype: expected 'float32' or 'bfloat16', got 'int8'",
    ),
    (
        "linear_silu_mul",
        lambda: (groups(3, 32), quantized(8, 32, is_paired=True), None, "int4"),
        r"out_dtype: expected 'float32', 'bfloat16' or 'int8', got 'int4'",
    ),
    ("linear_silu_mul", lambda: (groups(3, 32), quantized(8, 32)), r"weight: expected a paired"),
    (
        "linear",
        lambda: (groups(3, 32), quantized(8, 32, is_paired=True)),
        r"weight: expected one .* not paired",
    ),
    ("linear", lambda: (x(3, 64), quantized(8, 64)), r"x: expected uint8 \[any, 88\], got float32"),
    (
        "linear",
        lambda: (groups(3, 32), quantized(8, 64)),
        r"x: expected uint8 \[any, 88\], got uint8 \[3, 44\]",
    ),
    (
        "linear",
        lambda: (np.zeros(89, np.uint8)[1:].reshape(2, 44), quantized(8, 32)),
        r"x: expected an array aligned to 4 bytes",
    ),
    ("linear", lambda: (groups(3, 32), quantized(8, 32), x(7)), r"bias: expected float32 \[8\]"),
    (
        "linear",
        lambda: (groups(3, 32), quantized(8, 32), None, x(3, 7)),
        r"residual: expected float32 \[3, 8\]",
    ),
    ("embedding", lambda: (int32([0, 8]), quantized(8, 32)), r"token_ids: .* 0 to 7, got 8 at 1"),
    ("rms_norm", lambda: (x(3, 4), x(4), 1e-5, "int4"), r"out_dtype: .* or 'int8', got 'int4'"),
    ("quantize", lambda: (x(4),), r"x: expected float32 \[any, any\], got float32 \[4\]"),
    ("quantize", lambda: (x(3, 4, dtype="e"),), r"x: .* got float16 \[3, 4\]"),
    ("quantize", lambda: (STRIDED,), r"x: expected a C-contiguous array"),
    ("linear_silu_mul", lambda: (x(3, 4), weight(8, 4, is_paired=True), x(4)), r"bias: .* \[8\]"),
    (
        "head_rms_norm",
        lambda: head_rms_norm(q_weight=x(8), k_weight=x(8)),
        r"qkv: expected float32 \[any, 64\], got float32 \[1, 128\]",
    ),
    (
        "head_rms_norm",
        lambda: head_rms_norm(q_weight=x(HEAD_DIM, dtype="e")),
        r"q_weight: expected float32 \[any\], got float16 \[16\]",
    ),
    (
        "head_rms_norm",
        lambda: head_rms_norm(q_weight=x(1, HEAD_DIM)),
        r"q_weight: expected float32 \[any\], got float32 \[1, 16\]",
    ),
    ("head_rms_norm", lambda: head_rms_norm(k_weight=x(8)), r"k_weight: .* \[16\], got .* \[8\]"),
    (
        "head_rms_norm",
        lambda: head_rms_norm(qkv=STRIDED, q_weight=x(2), k_weight=x(2)),
        r"qkv: expected a C-contiguous array",
    ),
    (
        "head_rms_norm",
        lambda: head_rms_norm(num_heads=0),
        r"num_heads: expected at least 1 .* got 0 and 2",
    ),
    ("head_rms_norm", lambda: head_rms_norm(num_heads=2**60), rf"num_heads: .* got {2**60} and 2"),
    (
        "head_rms_norm",
        lambda: head_rms_norm(num_kv_heads=2**60),
        rf"num_heads: .* got 4 and {2**60}",
    ),
    ("rotary", lambda: rotary(positions=int32([8])), r"positions: .* 0 to 7, got 8 at 0"),
    ("rotary", lambda: rotary(positions=int32([-1])), r"positions: .* got -1 at 0"),
    (
        "rotary",
        lambda: rotary(positions=int32([1, 2])),
        r"positions: expected int32 \[1\], got .* \[2\]",
    ),
    ("rotary", lambda: rotary(cos_sin=x(8, 8)), r"qkv: expected float32 \[any, 64\]"),
    ("rotary", lambda: rotary(cos_sin=x(8, 7)), r"cos_sin: expected an even number .* got 7"),
    ("rotary", lambda: rotary(num_heads=0), r"num_heads: expected at least 1 .* got 0 and 2"),
    ("rotary", lambda: rotary(num_heads=2**58), rf"num_heads: .* got {2**58} and 2"),
    ("rotary", lambda: rotary(num_kv_heads=2**60), rf"num_heads: .* got 4 and {2**60}"),
    (
        "rotary",
        lambda: rotary(qkv=x(0, W), positions=int32([]), cos_sin=x(0, 2**40)),
        rf"cos_sin: .* up to .* got {2**40}",
    ),
    (
        "paged_attention",
        lambda: (x(1, W), cache(), one_token(), 0, NUM_HEADS, 1.0, "int8"),
        r"out_dtype: expected 'float32' or 'bfloat16' of heads of 16, got 'int8'",
    ),
    # 64 bytes a head: 2**58 of them are none in 64 bits.
    (
        "store_kv",
        lambda: (x(1, W), cache(), int32([0]), 0, NUM_HEADS + 2**58),
        rf"num_heads: .* up to .* got {NUM_HEADS + 2**58}",
    ),
]


@pytest.mark.parametrize(
    ("op", "arguments", "message"), BAD_CALLS, ids=[f"{op}-{text}" for op, _, text in BAD_CALLS]
)
def test_a_bad_argument_is_an_error_that_names_it(
    op: str, arguments: Callable[[], tuple[Any, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        getattr(ops, op)(_cpu.Team(1), *arguments())


MAKING: list[tuple[tuple[Any, ...], str]] = [
    (([], [], 32), r"formats: expected one for each part, 1 to 4, got 0"),
    ((["Q4_0"] * 5, [32] * 5, 32), r"formats: .* 1 to 4, got 5"),
    ((["Q4_0"] * 3, [32] * 3, 32, True), r"formats: expected two for a paired weight, got 3"),
    ((["Q4_0"], [32], 32, True), r"formats: expected two for a paired weight, got 1"),
    ((["Q4_2"], [32], 32), r"formats: expected one of int8, Q4_0, .*, Q6_K, got 'Q4_2'"),
    ((["Q4_0", "Q4_1"], [32], 32), r"outputs: expected one number for each of the 2 .* got 1"),
    ((["Q4_0"], [0], 32), r"outputs: expected positive numbers up to .*, got 0"),
    ((["Q4_0"], [2**60], 32), rf"outputs: expected positive numbers up to .*, got {2**60}"),
    ((["int8"] * 2, [2**30, 2**30], 1), rf"outputs: .* together, got {2**30}"),
    ((["Q4_0"] * 2, [32, 64], 32, True), r"outputs: expected as many gates .* got 32 and 64"),
    ((["Q4_0"], [32], 48), r"depth: expected .* multiple of 32 .* for Q4_0, got 48"),
    ((["Q8_0", "Q6_K"], [32, 32], 288), r"depth: .* multiple of 256 .* for Q6_K, got 288"),
    ((["int8"], [32], 0), r"depth: .* positive .* for int8, got 0"),
    ((["int8"], [32], 2**62), rf"depth: .* for int8, got {2**62}"),
    ((["int8"], [2**31 - 1], 2**31 - 1), r"outputs: expected at most .* of depth 2147483647"),
]


@pytest.mark.parametrize(("arguments", "message"), MAKING, ids=[text for _, text in MAKING])
def test_a_quantized_weight_that_can_not_be_is_an_error(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^QuantizedWeight: {message}"):
        _cpu.QuantizedWeight(*arguments)


ROW = _cpu.row_bytes("Q4_0", 64)


@pytest.mark.parametrize(
    ("source", "part", "first", "message"),
    [
        (
            x(32, ROW - 1, dtype="u1"),
            0,
            0,
            r"source: expected uint8 \[any, 36\], got .* 35\]",
        ),
        (x(32, ROW), 0, 0, r"source: expected uint8 .*, got float32"),
        (x(ROW, 32, dtype="u1").T, 0, 0, r"source: expected a C-contiguous array"),
        (x(32, ROW, dtype="u1"), 2, 0, r"part: expected 0 to 1, got 2"),
        (x(32, ROW, dtype="u1"), -1, 0, r"part: expected 0 to 1, got -1"),
        (x(32, ROW, dtype="u1"), 1, 32, r"first_output: .* the part's 40 outputs, got 32 from 32"),
        (x(32, ROW, dtype="u1"), 0, -32, r"first_output: .* got 32 from -32"),
        (x(32, ROW, dtype="u1"), 0, 2**63 - 32, r"first_output: .* got 32 from 9"),
        (x(32, ROW, dtype="u1"), 0, 8, r"first_output: expected whole panels of 32 .* 32 from 8"),
        (x(31, ROW, dtype="u1"), 0, 0, r"first_output: expected whole panels of 32 .* 31 from 0"),
    ],
    ids=str,
)
def test_blocks_that_do_not_fit_are_an_error(
    source: Array, part: int, first: int, message: str
) -> None:
    weight = _cpu.QuantizedWeight(["Q4_0", "Q4_0"], [64, 40], 64)
    with pytest.raises(ValueError, match=f"^QuantizedWeight.pack: {message}"):
        weight.pack(source, part, first)


@pytest.mark.parametrize(("first", "count"), [(2**63 - 1, 1), (1, 2**63 - 1), (-1, 1), (0, -1)])
def test_rows_outside_a_quantized_weight_are_not_unpacked(first: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"8 outputs, got {count} from {first}$"):
        quantized(8, 32).unpack(first, count)


def test_a_quantized_weight_says_what_it_is() -> None:
    weight = _cpu.QuantizedWeight(["Q4_K", "int8"], [70, 3], 512)
    assert (weight.formats, weight.outputs) == (["Q4_K", "int8"], [70, 3])
    assert (weight.num_outputs, weight.depth, weight.is_paired) == (73, 512, False)
    assert weight.input_dtype == "int8" and quantized(8, 32, is_paired=True).is_paired
    sizes = [len(part) for part in weight.buffers()]
    assert sum(sizes) == weight.num_bytes
    assert 96 * 288 <= sizes[0] < 96 * 300 and 32 * 516 <= sizes[1] < 32 * 530


def test_packed_bytes_are_all_there_is_to_a_weight() -> None:
    """Copied to another one, and kept by who holds them."""
    formats, outputs = ["Q4_1", "Q8_0"], [64, 33]
    random = np.random.default_rng(5)
    rows = [random.normal(size=(n, 96)).astype(np.float32) for n in outputs]
    first, second = (_cpu.QuantizedWeight(formats, outputs, 96) for _ in range(2))
    for part, (name, source) in enumerate(zip(formats, rows, strict=True)):
        first.pack(_cpu.quantize(source, name), part, 0, _cpu.Team(2))
    copies = second.buffers()
    for copy, original in zip(copies, first.buffers(), strict=True):
        assert copy.dtype == np.uint8 and copy.ctypes.data % 64 == 0
        copy[:] = original
    np.testing.assert_array_equal(second.unpack(0, 97), first.unpack(0, 97))
    assert np.abs(first.unpack(0, 97)).max() > 1
    kept = copies[1].copy()
    del first, second
    np.testing.assert_array_equal(copies[1], kept)


def test_a_quantized_weight_belongs_to_the_instruction_set_that_packed_it() -> None:
    best, *others = _cpu.available_isas()
    weight = quantized(8, 32)
    try:
        for isa in others:
            _cpu.set_isa(isa)
            with pytest.raises(ValueError, match=f"expected one packed for {isa}, got {best}"):
                ops.linear(_cpu.Team(1), groups(1, 32), weight)
    finally:
        _cpu.set_isa(best)


RUNNER = {"num_rows": 4, "max_model_len": 16, "vocab_size": 64, "max_tokens": 16}


@pytest.mark.parametrize("size", RUNNER)
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**61])
def test_sizes_of_a_runner_are_bounded(size: str, value: int) -> None:
    sizes = RUNNER | {size: value}
    with pytest.raises(ValueError, match=rf"{size}: expected .*, got {value}|less than 2\^31"):
        _cpu.Runner(None, _cpu.Team(1), cache(), 0, **sizes)


@pytest.mark.parametrize("num_threads", [0, -1, 4097, 2**31, 2**62])
def test_the_size_of_a_team_is_bounded(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads expected 1 to 4096, got {num_threads}"):
        _cpu.Team(num_threads)


def test_waiting_for_no_number_of_seconds_is_not_waiting() -> None:
    assert _cpu.Channel().receive(float("nan")) is None
