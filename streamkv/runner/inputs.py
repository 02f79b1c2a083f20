"""What the inputs of products are: from a recorded ProgramSpec to one that can run.

Owns the pass that gives each buffer of inputs the dtype that the weights of its readers take, and
where an op can't make that, puts a Quantize after it. Knows weights by their `input_dtype` alone.
Invariant: afterwards every buffer has a dtype, and no op is asked for what it can't make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from ..ops import AttentionShape
from .program import (
    GROUP_VALUES,
    INPUT,
    Buffer,
    Linear,
    LinearSiluMul,
    Op,
    PagedAttention,
    ProgramSpec,
    Quantize,
    StoreKv,
)


class TakesInputs(Protocol):
    """A matrix: a weight, or what is planned to be one."""

    @property
    def input_dtype(self) -> str: ...


def resolve_inputs(spec: ProgramSpec, weights: Mapping[str, Any]) -> ProgramSpec:
    """The spec with a dtype for each buffer; one that has them already comes back unchanged.

    `weights` has a `TakesInputs` for the weight of each product, by name. ValueError if products
    that read the same inputs take different ones. No buffer gets another index.
    """
    taken = _taken(spec, weights)
    buffers = list(spec.buffers)
    for index, buffer in enumerate(spec.buffers):
        if buffer.dtype == INPUT:
            buffers[index] = dataclasses.replace(buffer, dtype=taken.get(index, "float32"))
    quantized: dict[int, int] = {}  # buffer of float32 -> that of the same as inputs
    ops: list[Op] = []
    for op in spec.ops:
        renamed: Any = op
        x = getattr(op, "x", None)
        ops.append(dataclasses.replace(renamed, x=quantized[x]) if x in quantized else op)
        if not isinstance(op, StoreKv) and not _makes(buffers[op.out].dtype, op, weights):
            made = buffers[op.out]
            quantized[op.out] = len(buffers)
            buffers.append(made)
            buffers[op.out] = Buffer(made.extent, made.width, "float32")
            ops.append(Quantize(op.out, quantized[op.out]))
    return ProgramSpec(tuple(ops), tuple(buffers), spec.logits)


def gating_makes(dtype: str, weight: TakesInputs) -> bool:
    """Whether linear_silu_mul with this weight gives such inputs."""
    return dtype != "int8" or weight.input_dtype == "int8"


def attention_makes(dtype: str, shape: AttentionShape) -> bool:
    """Whether paged_attention gives such inputs: a group of int8 must not span two heads."""
    return dtype != "int8" or shape.head_dim % GROUP_VALUES == 0


def _makes(dtype: str, op: Op, weights: Mapping[str, Any]) -> bool:
    match op:
        case LinearSiluMul():
            return gating_makes(dtype, weights[op.weight.name])
        case PagedAttention():
            return attention_makes(dtype, op.shape)
        case _:
            return True


def _taken(spec: ProgramSpec, weights: Mapping[str, Any]) -> dict[int, str]:
    """Of each buffer that products read, what they take."""
    taken: dict[int, str] = {}
    for op in spec.ops:
        if isinstance(op, (Linear, LinearSiluMul)):
            dtype = str(weights[op.weight.name].input_dtype)
            known = spec.buffers[op.x].dtype
            expected = taken.setdefault(op.x, dtype if known == INPUT else known)
            if expected != dtype:
                raise ValueError(
                    f"{op.name}: {op.weight.name} expected to take {expected} inputs as others "
                    f"that read them, got a weight that takes {dtype}"
                )
    return taken
