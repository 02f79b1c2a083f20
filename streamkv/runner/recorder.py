"""Recorder: runs a model's forward on symbols, and writes down what it would compute.

Owns the way from a model to a ProgramSpec (which values share a buffer) and from a spec to a
program of the extension. Computes nothing; imports no torch. Invariant: a program computes what
the same forward computes op by op: a value is overwritten only by the op that reads it last, where
that op allows it (rotary and norms of heads over their input, a product over its residual).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from ..models.rope import rope_table
from ..ops import AttentionShape, Batch, Handle, Ops, Parameter, Rope
from .inputs import resolve_inputs
from .program import (
    INPUT,
    NO_BUFFER,
    OPERANDS,
    Buffer,
    Embedding,
    Extent,
    HeadRmsNorm,
    Layout,
    Linear,
    LinearSiluMul,
    Op,
    PagedAttention,
    ProgramSpec,
    Quantize,
    RmsNorm,
    Rotary,
    SelectRows,
    StoreKv,
)


class Model(Protocol):
    """What can be recorded."""

    def forward(self, ops: Ops, batch: Batch) -> Handle: ...

    def logits(self, ops: Ops, hidden: Handle) -> Handle: ...


class Input(Enum):
    """The handles of the batch."""

    TOKEN_IDS = "token_ids"
    POSITIONS = "positions"
    SLOTS = "slots"
    QUERY_START = "query_start"
    CONTEXT_LENS = "context_lens"
    BLOCK_TABLES = "block_tables"
    LOGIT_ROWS = "logit_rows"


BATCH = Batch(*(Input(name) for name in Batch._fields))


@dataclass(frozen=True)
class Value:
    """The handle of what an op gives; written once, so its index is that of its buffer at first."""

    index: int
    buffer: Buffer


class Recorder:
    """Implements `ops.Ops` on symbols. `record` may be called for one model after another."""

    def __init__(self, *, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._ops: list[Op] = []
        self._values: list[Value] = []

    def record(self, model: Model) -> ProgramSpec:
        """The model's forward and logits as a program whose inputs of products are INPUT.
        ValueError if the model misuses an op."""
        self._ops, self._values = [], []
        logits = model.logits(self, model.forward(self, BATCH))
        _check("logits", "the model", logits, is_input=False)
        buffers = [value.buffer for value in self._values]
        return _share_buffers(ProgramSpec(tuple(self._ops), tuple(buffers), logits.index))

    def embedding(self, token_ids: Handle, weight: Parameter) -> Value:
        _check_batch("embedding", token_ids, Input.TOKEN_IDS)
        out = self._value(Extent.TOKENS, weight.shape[1])
        self._ops.append(Embedding(weight, out.index))
        return out

    def rms_norm(self, x: Value, weight: Parameter, eps: float) -> Value:
        _check("rms_norm", "x", x, is_input=False, width=weight.shape[0])
        out = self._value(x.buffer.extent, x.buffer.width, is_input=True)
        self._ops.append(RmsNorm(x.index, weight, eps, out.index))
        return out

    def linear(
        self,
        x: Value,
        weight: Parameter,
        bias: Parameter | None = None,
        residual: Value | None = None,
    ) -> Value:
        _check_product("linear", x, weight, bias, is_paired=False)
        out = self._value(x.buffer.extent, weight.shape[0])
        if residual is not None:
            _check("linear", "residual", residual, is_input=False, width=weight.shape[0])
            if residual.buffer.extent is not x.buffer.extent:
                raise _unexpected("linear", "residual", f"rows as x, {x.buffer}", residual.buffer)
        added = NO_BUFFER if residual is None else residual.index
        self._ops.append(Linear(x.index, weight, bias, added, out.index))
        return out

    def linear_silu_mul(self, x: Value, weight: Parameter, bias: Parameter | None = None) -> Value:
        _check_product("linear_silu_mul", x, weight, bias, is_paired=True)
        out = self._value(x.buffer.extent, weight.shape[0] // 2, is_input=True)
        self._ops.append(LinearSiluMul(x.index, weight, bias, out.index))
        return out

    def head_rms_norm(
        self,
        qkv: Value,
        q_weight: Parameter,
        k_weight: Parameter,
        eps: float,
        shape: AttentionShape,
    ) -> Value:
        _check_qkv("head_rms_norm", qkv, shape)
        for argument, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight.shape != (shape.head_dim,):
                expected = f"shape {[shape.head_dim]}"
                raise _unexpected("head_rms_norm", argument, expected, list(weight.shape))
        out = self._value(Extent.TOKENS, qkv.buffer.width)
        self._ops.append(HeadRmsNorm(qkv.index, q_weight, k_weight, eps, shape, out.index))
        return out

    def rotary(self, qkv: Value, positions: Handle, rope: Rope, shape: AttentionShape) -> Value:
        _check_qkv("rotary", qkv, shape)
        _check_batch("rotary", positions, Input.POSITIONS)
        if rope.head_dim != shape.head_dim:
            raise _unexpected("rotary", "rope", f"heads of {shape.head_dim}", rope.head_dim)
        out = self._value(Extent.TOKENS, qkv.buffer.width)
        num_positions = min(rope.max_positions, self._max_model_len)
        self._ops.append(Rotary(qkv.index, rope, num_positions, shape, out.index))
        return out

    def store_kv(self, qkv: Value, batch: Batch, layer: int, shape: AttentionShape) -> None:
        _check_qkv("store_kv", qkv, shape)
        _check_batch("store_kv", batch.slots, Input.SLOTS)
        self._ops.append(StoreKv(qkv.index, layer, shape))

    def paged_attention(
        self, qkv: Value, batch: Batch, layer: int, shape: AttentionShape, scale: float
    ) -> Value:
        _check_qkv("paged_attention", qkv, shape)
        _check_batch("paged_attention", batch.query_start, Input.QUERY_START)
        _check_batch("paged_attention", batch.context_lens, Input.CONTEXT_LENS)
        _check_batch("paged_attention", batch.block_tables, Input.BLOCK_TABLES)
        out = self._value(Extent.TOKENS, shape.q_width, is_input=True)
        self._ops.append(PagedAttention(qkv.index, layer, shape, scale, out.index))
        return out

    def select_rows(self, x: Value, rows: Handle) -> Value:
        _check("select_rows", "x", x, is_input=False)
        _check_batch("select_rows", rows, Input.LOGIT_ROWS)
        if x.buffer.extent is not Extent.TOKENS:
            raise _unexpected("select_rows", "x", "a row per token", x.buffer)
        out = self._value(Extent.LOGIT_ROWS, x.buffer.width)
        self._ops.append(SelectRows(x.index, out.index))
        return out

    def _value(self, extent: Extent, width: int, *, is_input: bool = False) -> Value:
        value = Value(len(self._values), Buffer(extent, width, INPUT if is_input else "float32"))
        self._values.append(value)
        return value


def _check(
    op: str, argument: str, value: Handle, *, is_input: bool, width: int | None = None
) -> None:
    kind = "inputs of products" if is_input else "float32 activations"
    expected = f"{kind} of width {width}" if width is not None else kind
    if not isinstance(value, Value):
        raise _unexpected(op, argument, expected, value)
    if (value.buffer.dtype == INPUT) is not is_input or width not in (None, value.buffer.width):
        raise _unexpected(op, argument, expected, value.buffer)


def _check_product(
    op: str, x: Value, weight: Parameter, bias: Parameter | None, *, is_paired: bool
) -> None:
    _check(op, "x", x, is_input=True, width=weight.shape[1])
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _unexpected(op, "bias", f"shape {list(weight.shape[:1])}", list(bias.shape))
    if is_paired and not weight.is_paired:
        raise _unexpected(op, "weight", "a paired parameter", weight.name)
    if weight.is_paired and not is_paired:
        raise _unexpected(op, "weight", "a parameter that isn't paired", weight.name)


def _check_qkv(op: str, qkv: Value, shape: AttentionShape) -> None:
    _check(op, "qkv", qkv, is_input=False, width=shape.qkv_width)
    if qkv.buffer.extent is not Extent.TOKENS:
        raise _unexpected(op, "qkv", "a row per token", qkv.buffer)


def _check_batch(op: str, handle: Handle, expected: Input) -> None:
    """A program reads the batch itself: an op can be given nothing but its own part of it."""
    if handle is not expected:
        raise _unexpected(op, expected.value, f"the batch's {expected.value}", handle)


def _unexpected(op: str, argument: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{op}: {argument} expected {expected}, got {got}")


def _share_buffers(spec: ProgramSpec) -> ProgramSpec:
    """From a buffer for each value to one for each chain of values that overwrite each other."""
    last_use = [end for _, end in spec.lifetimes()]
    buffers: list[Buffer] = []
    buffer_of: dict[int, int] = {NO_BUFFER: NO_BUFFER}  # value -> buffer
    ops: list[Op] = []
    for index, op in enumerate(spec.ops):
        if not isinstance(op, StoreKv):
            overwritten = _may_be_overwritten_by(op)
            if overwritten != NO_BUFFER and last_use[overwritten] == index:
                buffer_of[op.out] = buffer_of[overwritten]
            else:
                buffer_of[op.out] = len(buffers)
                buffers.append(spec.buffers[op.out])
        renamed: Any = op
        operands = [name for name in OPERANDS if hasattr(op, name)]
        changes = {name: buffer_of[getattr(op, name)] for name in operands}
        ops.append(dataclasses.replace(renamed, **changes))
    return ProgramSpec(tuple(ops), tuple(buffers), buffer_of[spec.logits])


def _may_be_overwritten_by(op: Op) -> int:
    """The value over which the op may write its own."""
    match op:
        case HeadRmsNorm(x=x) | Rotary(x=x):
            return x
        case Linear(residual=residual):
            return residual
        case _:
            return NO_BUFFER


def build_program(spec: ProgramSpec, weights: Mapping[str, Any], cache: Any) -> Any:
    """The spec as a `_cpu.Program` over a `_cpu.KvCache`; its buffers have the spec's indices.

    `weights` holds a `_cpu.PackedWeight` or `_cpu.QuantizedWeight` for each matrix and a float32
    array for each vector, by parameter name. Inputs are resolved by them.
    """
    from streamkv import _cpu

    spec = resolve_inputs(spec, weights)
    program = _cpu.Program(cache)
    _add_buffers(program, spec, spec.layout())
    tables: dict[tuple[Rope, int], Any] = {}
    for op in spec.ops:
        _add_op(program, spec, op, weights, tables)
    return program


def _add_op(
    program: Any,
    spec: ProgramSpec,
    op: Op,
    weights: Mapping[str, Any],
    tables: dict[tuple[Rope, int], Any],
) -> None:
    out_dtype = "" if isinstance(op, StoreKv) else spec.buffers[op.out].dtype
    match op:
        case Embedding():
            program.add_embedding(weights[op.weight.name], op.out)
        case RmsNorm():
            program.add_rms_norm(op.x, weights[op.weight.name], op.eps, op.out, out_dtype)
        case Linear():
            weight, bias = weights[op.weight.name], _find(weights, op.bias)
            program.add_linear(op.x, weight, bias, op.residual, out=op.out)
        case LinearSiluMul():
            weight, bias = weights[op.weight.name], _find(weights, op.bias)
            program.add_linear_silu_mul(op.x, weight, bias, op.out, out_dtype)
        case HeadRmsNorm():
            norms = (weights[op.q_weight.name], weights[op.k_weight.name])
            num_heads, num_kv_heads = op.shape.num_heads, op.shape.num_kv_heads
            program.add_head_rms_norm(op.x, *norms, op.eps, num_heads, num_kv_heads, op.out)
        case Rotary():
            key = (op.rope, op.num_positions)
            if key not in tables:
                tables[key] = rope_table(*key)
            num_heads, num_kv_heads = op.shape.num_heads, op.shape.num_kv_heads
            program.add_rotary(op.x, tables[key], num_heads, num_kv_heads, op.out)
        case StoreKv():
            program.add_store_kv(op.x, op.layer, op.shape.num_heads)
        case PagedAttention():
            num_heads = op.shape.num_heads
            program.add_paged_attention(op.x, op.layer, num_heads, op.scale, op.out, out_dtype)
        case SelectRows():
            program.add_select_rows(op.x, op.out)
        case Quantize():
            program.add_quantize(op.x, spec.buffers[op.x].width, op.out)


def _add_buffers(program: Any, spec: ProgramSpec, layout: Layout) -> None:
    for index, buffer in enumerate(spec.buffers):
        given = program.add_buffer(
            buffer.extent.value, layout.row_bytes[index], layout.places[index]
        )
        if given != index:
            raise ValueError(f"program: expected buffer {index}, got {given}: it isn't empty")


def _find(weights: Mapping[str, Any], parameter: Parameter | None) -> Any:
    return None if parameter is None else weights[parameter.name]
