"""ProgramSpec: a model's forward as data: ops over buffers, and where the buffers lie.

Owns the liveness of buffers and their places in the arena. Knows no model, no weights and no
kernels, and imports neither torch nor the extension. Invariant: two buffers that are needed at
once never overlap, however many tokens and logit rows a step has.

A buffer has a row per token or per row that wants logits, and each kind has its own region. A
place is counted in bytes per row of the region: with T tokens a buffer lies at place * T, so what
is disjoint for one token is disjoint for any number. Places are multiples of 64, so that buffers
are aligned whatever T is.

What the inputs of products are depends on the weights: a spec is recorded without knowing
(INPUT), and inputs.py fills it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from ..ops import AttentionShape, Parameter, Rope

ALIGNMENT = 64  # bytes
ACTIVATION_BYTES = 4  # float32
NO_BUFFER = -1
OPERANDS = ("x", "residual", "out")  # the fields of ops that name buffers

INPUT = "input"  # of a buffer: what the products that read it take, not yet known
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# int8 inputs come in groups of so many values that share a scale (quantized.h).
GROUP_VALUES = 32
GROUP_BYTES = 44


def row_bytes(dtype: str, width: int) -> int:
    """Of `width` values as an op gives or takes them."""
    if dtype == "int8":
        return -(-width // GROUP_VALUES) * GROUP_BYTES
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"buffer: expected a dtype of values, got {dtype!r}: resolve inputs first")
    return width * DTYPE_BYTES[dtype]


class Extent(Enum):
    """What a buffer has a row for."""

    TOKENS = "tokens"
    LOGIT_ROWS = "logit_rows"


@dataclass(frozen=True)
class Buffer:
    """Rows of `width` values: float32, or what products take: any dtype, INPUT until then."""

    extent: Extent
    width: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.dtype, self.width)


# One class for each op of the vocabulary. `x`, `residual` and `out` are indices of buffers; what
# ops read of the batch is part of their meaning.


@dataclass(frozen=True)
class Embedding:
    name: ClassVar[str] = "embedding"
    weight: Parameter
    out: int


@dataclass(frozen=True)
class RmsNorm:
    name: ClassVar[str] = "rms_norm"
    x: int
    weight: Parameter
    eps: float
    out: int


@dataclass(frozen=True)
class Linear:
    name: ClassVar[str] = "linear"
    x: int
    weight: Parameter
    bias: Parameter | None
    residual: int  # or NO_BUFFER; may be `out`
    out: int


@dataclass(frozen=True)
class LinearSiluMul:
    name: ClassVar[str] = "linear_silu_mul"
    x: int
    weight: Parameter
    bias: Parameter | None
    out: int


@dataclass(frozen=True)
class HeadRmsNorm:
    name: ClassVar[str] = "head_rms_norm"
    x: int  # may be `out`
    q_weight: Parameter
    k_weight: Parameter
    eps: float
    shape: AttentionShape
    out: int


@dataclass(frozen=True)
class Rotary:
    name: ClassVar[str] = "rotary"
    x: int  # may be `out`
    rope: Rope
    num_positions: int  # rows of the table
    shape: AttentionShape
    out: int


@dataclass(frozen=True)
class StoreKv:
    name: ClassVar[str] = "store_kv"
    x: int
    layer: int
    shape: AttentionShape


@dataclass(frozen=True)
class PagedAttention:
    name: ClassVar[str] = "paged_attention"
    x: int
    layer: int
    shape: AttentionShape
    scale: float
    out: int


@dataclass(frozen=True)
class SelectRows:
    name: ClassVar[str] = "select_rows"
    x: int
    out: int


@dataclass(frozen=True)
class Quantize:
    """No model asks for it: it makes int8 inputs of what an op gives that can't make them."""

    name: ClassVar[str] = "quantize"
    x: int
    out: int


# What models ask for.
ModelOp = (
    Embedding
    | RmsNorm
    | Linear
    | LinearSiluMul
    | HeadRmsNorm
    | Rotary
    | StoreKv
    | PagedAttention
    | SelectRows
)
Op = ModelOp | Quantize
OP_TYPES: tuple[type[ModelOp], ...] = (
    Embedding,
    RmsNorm,
    Linear,
    LinearSiluMul,
    HeadRmsNorm,
    Rotary,
    StoreKv,
    PagedAttention,
    SelectRows,
)


def buffers_of(op: Op) -> Iterator[int]:
    """The buffers that an op reads or writes, some maybe twice."""
    for field in OPERANDS:
        buffer = getattr(op, field, NO_BUFFER)
        if buffer != NO_BUFFER:
            yield buffer


class Layout(NamedTuple):
    """Where each buffer of a program lies."""

    row_bytes: tuple[int, ...]  # of each buffer
    places: tuple[int, ...]  # of each buffer
    bytes_per_token: int  # of the region of buffers with a row per token
    bytes_per_logit_row: int


@dataclass(frozen=True)
class ProgramSpec:
    """Ops in order, over buffers. `logits` is the buffer that holds what the model gives."""

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    logits: int

    def lifetimes(self) -> list[tuple[int, int]]:
        """Of each buffer, the first and the last op that needs it; the logits are needed after."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for buffer in buffers_of(op):
                first.setdefault(buffer, index)
                last[buffer] = index
        last[self.logits] = len(self.ops)
        return [(first[buffer], last[buffer]) for buffer in range(len(self.buffers))]

    def layout(self) -> Layout:
        """Each buffer gets the lowest place that is free while it lives, in order of birth.
        ValueError if there are INPUTs."""
        lifetimes = self.lifetimes()
        row_bytes = [buffer.row_bytes for buffer in self.buffers]
        places = [0] * len(self.buffers)
        ends = dict.fromkeys(Extent, 0)
        living: dict[Extent, list[int]] = {extent: [] for extent in Extent}
        for buffer in sorted(range(len(self.buffers)), key=lambda index: lifetimes[index]):
            extent, birth = self.buffers[buffer].extent, lifetimes[buffer][0]
            neighbours = [other for other in living[extent] if lifetimes[other][1] >= birth]
            taken = sorted((places[other], _aligned(row_bytes[other])) for other in neighbours)
            places[buffer] = _lowest_gap(taken, row_bytes[buffer])
            ends[extent] = max(ends[extent], places[buffer] + _aligned(row_bytes[buffer]))
            living[extent] = [*neighbours, buffer]
        return Layout(tuple(row_bytes), tuple(places), ends[Extent.TOKENS], ends[Extent.LOGIT_ROWS])


def _lowest_gap(taken: list[tuple[int, int]], num_bytes: int) -> int:
    """The lowest place with room beside `taken`, (place, bytes) in order."""
    place = 0
    for start, taken_bytes in taken:
        if start - place >= num_bytes:
            break
        place = max(place, start + taken_bytes)
    return place


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
