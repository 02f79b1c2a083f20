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


def cache() -> _cpu.KvCache:
    return _cpu.KvCache("float32", 4, 1, NUM_KV_HEADS, 8, HEAD_DIM)


def rotary(**changes: Any) -> tuple[Any, ...]:
    arguments = {"qkv": x(1, W), "positions": int32([0]), "cos_sin": x(8, HEAD_DIM)}
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
    ("linear_silu_mul", lambda: (x(3, 4), weight(8, 4, is_paired=True), x(4)), r"bias: .* \[8\]"),
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
