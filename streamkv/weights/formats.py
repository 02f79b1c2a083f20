"""In which format each matrix of a model will be kept: as the file has it, or as was asked for.

Owns that choice and what it takes in memory. Knows formats by name and no bytes of theirs.
Invariant: what is quantized in the file is never quantized a second time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from ..ops import Parameter
from .gguf_blocks import BLOCKS

Quantization = Literal["auto", "none", "int8", "int4"]

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
# What products take as a file has it, by GGUF's names.
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
NEAREST = "Q8_0"  # for a float part of a matrix whose other parts are quantized
INT8, INT4 = "int8", "Q4_1"  # what matrices are quantized to if asked for
MADE = (NEAREST, INT8, INT4)  # and what therefore is made of floats

# By matrix, the formats of its parts in the checkpoint; of a float one, the dtype alone.
Formats = Mapping[str, Sequence[str]]


class StoredTensors(Protocol):
    """A checkpoint, as far as it matters here."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def format(self, name: str) -> str: ...


def planned_formats(
    source: StoredTensors,
    parameters: Sequence[Parameter],
    *,
    dtype: str,
    quantization: Quantization,
) -> dict[str, tuple[str, ...]]:
    """Of each matrix. `quantization` is about parts that are floats in the file, but for "none",
    which makes all of them `dtype`."""
    return {
        one.name: _formats_of(source, one, dtype, quantization)
        for one in parameters
        if len(one.shape) == 2
    }


def packed_bytes(parameters: Sequence[Parameter], formats: Formats) -> int:
    """What `load_packed` will take, but for what fills up panels."""
    return sum(parameter_bytes(parameter, formats) for parameter in parameters)


def parameter_bytes(parameter: Parameter, formats: Formats) -> int:
    if len(parameter.shape) != 2:
        return 4 * math.prod(parameter.shape)
    own = part_formats(parameter, formats)
    return sum(
        num_rows * row_bytes(name, depth)
        for name, (_, (num_rows, depth)) in zip(own, parameter.parts, strict=True)
    )


def part_formats(parameter: Parameter, formats: Formats) -> tuple[str, ...]:
    """Of a matrix, one for each of its parts."""
    own = tuple(formats[parameter.name])
    return own if is_quantized(parameter, formats) else own * len(parameter.parts)


def is_quantized(parameter: Parameter, formats: Formats) -> bool:
    return len(parameter.shape) == 2 and formats[parameter.name][0] not in ITEM_BYTES


def is_made(source: StoredTensors, parameter: Parameter, formats: Formats) -> bool:
    """Whether any part of a quantized matrix is quantized only when it is loaded."""
    own = part_formats(parameter, formats)
    return any(
        source.format(name) != chosen
        for (name, _), chosen in zip(parameter.parts, own, strict=True)
    )


def row_bytes(name: str, depth: int) -> int:
    """Of a row in a format."""
    if name in ITEM_BYTES:
        return ITEM_BYTES[name] * depth
    if name == INT8:
        return 4 + depth
    dtype, size, _ = BLOCKS[name]
    return depth // size * dtype.itemsize


def _formats_of(
    source: StoredTensors, parameter: Parameter, dtype: str, quantization: Quantization
) -> tuple[str, ...]:
    stored = [source.format(name) for name, _ in parameter.parts]
    asked = quantization in ("int8", "int4")
    if quantization == "none" or not (asked or any(name in QUANTIZED for name in stored)):
        return (dtype,)
    target = _target(source, parameter, quantization) if asked else NEAREST
    return tuple(name if name in QUANTIZED else target for name in stored)


def _target(source: StoredTensors, parameter: Parameter, quantization: Quantization) -> str:
    """Four bits but for the embedding and the head, where they cost the most, and for depths that
    no blocks fill."""
    num_outputs, depth = parameter.shape
    if quantization == "int8" or num_outputs == source.config.get("vocab_size"):
        return INT8
    return INT8 if depth % BLOCKS[INT4].size else INT4
