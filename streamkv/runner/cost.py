"""What a program costs: bytes moved and operations of each op, for a step of any shape.

Owns the model, not the measuring. Knows no machine. Invariant: the numbers follow from the spec
(its inputs resolved), the formats and the step alone: each weight is read once in a step, each
activation once where it is read and once where it is written, each row's context once. What caches
save isn't in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..ops import AttentionShape, Parameter
from ..words import counted
from .formats import ModelFormats
from .kv_cache import kv_token_bytes
from .program import (
    ACTIVATION_BYTES,
    Embedding,
    Extent,
    HeadRmsNorm,
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

LAYER_NUMBER = re.compile(r"\.\d+\.")


class StepShape(NamedTuple):
    """The numbers of a step that its cost depends on."""

    num_tokens: int
    num_logit_rows: int
    context_tokens: int  # over rows, how long their contexts are: what attention reads
    attended_tokens: int  # over tokens, how many each attends to

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int]], num_logit_rows: int) -> StepShape:
        """From each row's (number of tokens, context length after the step)."""
        attended = sum(tokens * context - tokens * (tokens - 1) // 2 for tokens, context in rows)
        return cls(
            num_tokens=sum(tokens for tokens, _ in rows),
            num_logit_rows=num_logit_rows,
            context_tokens=sum(context for _, context in rows),
            attended_tokens=attended,
        )


class Cost(NamedTuple):
    """Of an op, or of several together."""

    num_bytes: int
    num_operations: int  # a multiplication and an addition are two

    def plus(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.num_operations + other.num_operations)


def cost_of(spec: ProgramSpec, op: Op, step: StepShape, formats: ModelFormats) -> Cost:
    """An op without rows costs nothing."""
    if not isinstance(op, StoreKv) and not _num_rows(spec, op.out, step):
        return Cost(0, 0)

    def moved(*buffers: int) -> int:
        return sum(
            _num_rows(spec, index, step) * spec.buffers[index].row_bytes
            for index in buffers
            if index >= 0
        )

    def kv_bytes(num_tokens: int, shape: AttentionShape) -> int:
        each = kv_token_bytes(shape.num_kv_heads, shape.head_dim, formats.kv_dtype)
        return num_tokens * each

    match op:
        case Embedding():
            row_bytes = formats.matrices[op.weight.name].num_bytes // op.weight.shape[0]
            return Cost(step.num_tokens * row_bytes + moved(op.out), 0)
        case RmsNorm():
            (width,) = op.weight.shape
            num_values = _num_rows(spec, op.x, step) * width
            return Cost(moved(op.x, op.out) + width * ACTIVATION_BYTES, 4 * num_values)
        case Linear() | LinearSiluMul():
            outputs, depth = op.weight.shape
            residual = op.residual if isinstance(op, Linear) else -1
            vector = outputs * ACTIVATION_BYTES if op.bias is not None else 0
            return Cost(
                formats.matrices[op.weight.name].num_bytes + vector + moved(op.x, residual, op.out),
                2 * _num_rows(spec, op.x, step) * outputs * depth,
            )
        case HeadRmsNorm():
            norms = 2 * op.shape.head_dim * ACTIVATION_BYTES
            return Cost(moved(op.x, op.out) + norms, 4 * step.num_tokens * _qk_width(op.shape))
        case Rotary():
            table = step.num_tokens * op.shape.head_dim * ACTIVATION_BYTES
            return Cost(moved(op.x, op.out) + table, 3 * step.num_tokens * _qk_width(op.shape))
        case StoreKv():
            width = 2 * op.shape.num_kv_heads * op.shape.head_dim
            read = step.num_tokens * width * ACTIVATION_BYTES
            return Cost(read + kv_bytes(step.num_tokens, op.shape), 0)
        case PagedAttention():
            queries = step.num_tokens * op.shape.q_width * ACTIVATION_BYTES
            context = kv_bytes(step.context_tokens, op.shape)
            return Cost(
                queries + context + moved(op.out), 4 * step.attended_tokens * op.shape.q_width
            )
        case SelectRows():
            return Cost(2 * moved(op.out), 0)
        case Quantize():
            num_values = _num_rows(spec, op.x, step) * spec.buffers[op.x].width
            return Cost(moved(op.x, op.out), 2 * num_values)


def _qk_width(shape: AttentionShape) -> int:
    return (shape.num_heads + shape.num_kv_heads) * shape.head_dim


def _num_rows(spec: ProgramSpec, buffer: int, step: StepShape) -> int:
    is_tokens = spec.buffers[buffer].extent is Extent.TOKENS
    return step.num_tokens if is_tokens else step.num_logit_rows


def label(op: Op) -> str:
    """What the op works with, the same for all layers: "model.layers.*.mlp.down_proj"."""
    weight: Parameter | None = getattr(op, "weight", None)
    if weight is not None:
        return LAYER_NUMBER.sub(".*.", weight.name.removesuffix(".weight"))
    if isinstance(op, (HeadRmsNorm, Rotary, StoreKv, PagedAttention)):
        shape = op.shape
        return f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
    return "to int8" if isinstance(op, Quantize) else "rows that want logits"


def describe(
    spec: ProgramSpec,
    *,
    num_tokens: int,
    num_logit_rows: int,
    context: int,
    formats: ModelFormats,
) -> str:
    """A table of what a step costs, ops of all layers together.

    The tokens are spread evenly over the rows that want logits (or are one row's, if none does),
    and after the step each row has `context` tokens.
    """
    num_rows = max(1, min(num_logit_rows, num_tokens))
    counts = [(num_tokens + index) // num_rows for index in range(num_rows)]
    step = StepShape.of_rows([(count, max(context, count)) for count in counts], num_logit_rows)
    groups: dict[tuple[str, str], list[Cost]] = {}
    for op in spec.ops:
        cost = cost_of(spec, op, step, formats)
        groups.setdefault((op.name, label(op)), []).append(cost)
    totals = {key: _sum(costs) for key, costs in groups.items()}
    everything = _sum(totals.values())
    name_width = max(len(f"{name} {of}") for name, of in groups)
    layout = spec.layout()
    lines = [
        f"{counted(len(spec.ops), 'op')}, {counted(len(spec.buffers), 'buffer')}, "
        f"arena {layout.bytes_per_token:,} bytes per token and {layout.bytes_per_logit_row:,} per "
        "logit row",
        f"a step of {counted(num_tokens, 'token')} in {counted(num_rows, 'row')} with "
        f"{counted(context, 'token')} of context, "
        f"{num_logit_rows} want{'s' if num_logit_rows == 1 else ''} logits, "
        f"{formats.describe()}:",
        f"{'op':{name_width}}  times {'MB':>10} {'MFLOP':>10} {'FLOP/byte':>10}",
    ]
    for (name, of), total in totals.items():
        times = len(groups[name, of])
        lines.append(_line(f"{name} {of}", name_width, times, total))
    lines.append(_line("all", name_width, len(spec.ops), everything))
    return "\n".join(lines)


def _sum(costs: Iterable[Cost]) -> Cost:
    total = Cost(0, 0)
    for cost in costs:
        total = total.plus(cost)
    return total


def _line(title: str, width: int, times: int, cost: Cost) -> str:
    intensity = cost.num_operations / max(1, cost.num_bytes)
    return (
        f"{title:{width}}  {times:5} {cost.num_bytes / 1e6:10.3f} "
        f"{cost.num_operations / 1e6:10.3f} {intensity:10.1f}"
    )
