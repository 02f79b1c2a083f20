"""Quantized weights and inputs for the tests: blocks of any bits, and what they mean.

The oracle of the formats is the `gguf` package; int8 and groups of inputs, which are ours, are
written out in numpy here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from streamkv import _cpu

Array = NDArray[Any]

FORMATS = ["int8", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

# Where a block's float16 numbers lie.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}

# A group of inputs as the kernels have it.
GROUP_DEPTH = 32
INPUT_GROUP = np.dtype(
    [
        ("values", np.int8, GROUP_DEPTH),
        ("scale", np.float32),
        ("negative_sum", np.int32),
        ("scaled_sum", np.float32),
    ]
)


def block_depth(format: str) -> int:
    """What depths are multiples of."""
    return 1 if format == "int8" else int(GGML_QUANT_SIZES[GGMLQuantizationType[format]][0])


def random_blocks(format: str, num_rows: int, depth: int, rng: np.random.Generator) -> Array:
    """Raw rows as a file has them, of any bits but for the float16 numbers, which are finite."""
    if format == "int8":
        scales = rng.standard_normal((num_rows, 1)).astype(np.float32)
        values = rng.integers(-127, 128, (num_rows, depth)).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), values.view(np.uint8)], axis=1)
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    num_blocks = num_rows * depth // block_depth(format)
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), np.uint8)
    for at in HALVES[format]:
        numbers = rng.standard_normal(num_blocks) * 10.0 ** rng.integers(-7, 4, num_blocks)
        blocks[:, at : at + 2] = numbers.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_rows, -1)


def dequantize(format: str, blocks: Array) -> Array:
    """Raw rows as float32."""
    if format == "int8":
        scales = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
        return blocks[:, 4:].view(np.int8).astype(np.float32) * scales
    return quants.dequantize(blocks, GGMLQuantizationType[format])


def pack_blocks(
    formats: list[str], parts: list[Array], depth: int, *, is_paired: bool = False
) -> _cpu.QuantizedWeight:
    weight = _cpu.QuantizedWeight(formats, [len(part) for part in parts], depth, is_paired)
    for index, part in enumerate(parts):
        weight.pack(part, index, 0)
    return weight


def quantize_rows(x: Array) -> Array:
    """float32 [rows, width] as INPUT_GROUPs [rows, groups]."""
    num_rows, width = x.shape
    num_groups = -(-width // GROUP_DEPTH)
    padded = np.zeros((num_rows, num_groups * GROUP_DEPTH), np.float32)
    padded[:, :width] = x
    padded = padded.reshape(num_rows, num_groups, GROUP_DEPTH)
    greatest = np.abs(padded).max(axis=-1)
    is_finite = np.isfinite(greatest)
    counted = np.where(is_finite & (greatest >= 2.0**-119), greatest, np.float32(0))
    with np.errstate(divide="ignore"):
        inverse = np.where(counted > 0, np.float32(127) / counted, np.float32(0))
    groups = np.zeros((num_rows, num_groups), INPUT_GROUP)
    groups["values"] = np.rint(np.where(is_finite[..., None], padded, 0) * inverse[..., None])
    sums = groups["values"].sum(axis=-1, dtype=np.int32)
    groups["negative_sum"] = -sums
    groups["scale"] = np.where(is_finite, counted / np.float32(127), np.float32(np.nan))
    groups["scaled_sum"] = groups["scale"] * sums.astype(np.float32)
    return groups


def as_groups(rows: Array) -> Array:
    """The bytes of rows of inputs, as an op gives them, as INPUT_GROUPs [rows, groups]."""
    assert rows.dtype == np.uint8
    return rows.view(INPUT_GROUP)
