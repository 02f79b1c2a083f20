"""`streamkv._cpu` in numpy: the same calls on the same arrays, as plainly as it can be said.

A program computes in an arena, where its buffers were placed, and the arena is NaN before each run:
a value that is overwritten too early, or read where none was written, changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def to_bf16(values: Array) -> Array:
    """float32 -> the bits of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# Of 32 values that share a scale, as quantized.h has it.
GROUP = np.dtype([("values", "i1", 32), ("scale", "f4"), ("negative_sum", "i4"), ("scaled", "f4")])


def quantize(team, x: Array) -> Array:
    """float32 [T, W] -> bytes of groups, uint8 [T, 44 * ceil(W / 32)]."""
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % 32)))
    parts = padded.reshape(len(x), -1, 32)
    largest = np.abs(parts).max(axis=2, initial=0)
    groups = np.zeros(parts.shape[:2], GROUP)
    with np.errstate(all="ignore"):
        factors = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        values = np.rint(parts * factors[:, :, None])
        groups["values"] = np.nan_to_num(values)
        groups["scale"] = np.where(np.isfinite(largest), largest / np.float32(127), np.nan)
    sums = groups["values"].sum(axis=2, dtype=np.int32)
    groups["negative_sum"], groups["scaled"] = -sums, groups["scale"] * sums
    return groups.view(np.uint8).reshape(len(x), -1)


def as_inputs(values: Array, dtype: str) -> Array:
    if dtype == "int8":
        return quantize(None, values)
    return to_bf16(values) if dtype == "bfloat16" else values.astype(np.float32)


def widened(values: Array) -> Array:
    """Inputs of any kind as float32; of int8 with what fills up the last group."""
    if values.dtype == np.uint8:
        groups = np.ascontiguousarray(values).view(GROUP)
        return (groups["values"] * groups["scale"][:, :, None]).reshape(len(values), -1)
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


class PackedWeight:
    def __init__(self, values: Array, *, is_paired: bool = False, input_dtype: str = "float32"):
        self.values = values  # float32 [num_outputs, depth]
        self.num_outputs, self.depth = values.shape
        self.is_paired = is_paired
        self.dtype, self.num_bytes = "float32", values.nbytes
        self.input_dtype = input_dtype


class QuantizedWeight(PackedWeight):
    """By what its blocks stand for."""

    def __init__(self, values: Array, *, is_paired: bool = False, formats: tuple[str, ...] = ()):
        super().__init__(values, is_paired=is_paired, input_dtype="int8")
        self.formats = list(formats)


INPUT_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.uint8}


def rounded(values: Array, dtype: str) -> Array:
    """Keys, values or queries as a cache of `dtype` keeps them: int8 with a scale for each head
    [..., head_dim]."""
    if dtype == "bfloat16":
        return widened(to_bf16(values))
    if dtype == "int8":
        scale = np.abs(values).max(axis=-1, keepdims=True) / 127
        return np.rint(values / np.maximum(scale, 1e-30)) * scale
    return values


class KvCache:
    """What was never stored is NaN."""

    def __init__(
        self, num_blocks, num_layers, num_kv_heads, block_size, head_dim, *, kv_dtype="float32"
    ):
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        self.kv_dtype = kv_dtype
        self.data = np.full(shape, np.nan, np.float64 if kv_dtype != "float32" else np.float32)
        self.num_kv_heads, self.block_size, self.head_dim = num_kv_heads, block_size, head_dim


class Batch:
    def __init__(
        self, token_ids, positions, slots, query_start, context_lens, block_tables, logit_rows
    ):
        self.token_ids, self.positions, self.slots = token_ids, positions, slots
        self.query_start, self.context_lens = query_start, context_lens
        self.block_tables, self.logit_rows = block_tables, logit_rows
        self.num_tokens, self.num_logit_rows = len(token_ids), len(logit_rows)


def embedding(team, token_ids, weight):
    return weight.values[token_ids]


def rms_norm(team, x, weight, eps, out_dtype):
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return as_inputs(x * scale * weight, out_dtype)


def _product(x, weight, bias):
    assert x.dtype == INPUT_TYPES[weight.input_dtype]
    out = widened(x)[:, : weight.depth] @ weight.values.T
    return out if bias is None else out + bias


def linear(team, x, weight, bias=None, residual=None):
    assert not weight.is_paired
    out = _product(x, weight, bias)
    return out if residual is None else out + residual


def linear_silu_mul(team, x, weight, bias=None, out_dtype=None):
    assert weight.is_paired
    out_dtype = out_dtype or weight.input_dtype
    assert out_dtype != "int8" or isinstance(weight, QuantizedWeight)
    gate, up = np.split(_product(x, weight, bias), 2, axis=1)
    return as_inputs(gate / (1 + np.exp(-gate)) * up, out_dtype)


def head_rms_norm(team, qkv, q_weight, k_weight, eps, num_heads, num_kv_heads):
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, len(q_weight))
    weights = [q_weight] * num_heads + [k_weight] * num_kv_heads
    normed = heads.copy()
    for head, weight in enumerate(weights):
        normed[:, head] = rms_norm(team, heads[:, head], weight, eps, "float32")
    return normed.reshape(qkv.shape)


def rotary(team, qkv, positions, cos_sin, num_heads, num_kv_heads):
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, cos_sin.shape[1])
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions, None, :half], cos_sin[positions, None, half:]
    first, second = heads[..., :half], heads[..., half:]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned[:, num_heads + num_kv_heads :] = heads[:, num_heads + num_kv_heads :]
    return turned.reshape(qkv.shape)


def store_kv(team, qkv, cache, slots, layer, num_heads):
    heads = qkv.reshape(len(qkv), -1, cache.head_dim)
    kv = heads[:, num_heads:].reshape(len(qkv), 2, cache.num_kv_heads, cache.head_dim)
    for token, slot in zip(rounded(kv, cache.kv_dtype), slots.tolist(), strict=True):
        block, offset = divmod(slot, cache.block_size)
        cache.data[block, layer, :, :, offset] = token


def paged_attention(team, qkv, cache, batch, layer, num_heads, scale, out_dtype):
    head_dim, group = cache.head_dim, num_heads // cache.num_kv_heads
    assert out_dtype != "int8" or head_dim % 32 == 0
    queries = qkv[:, : num_heads * head_dim].reshape(-1, num_heads, head_dim)
    if cache.kv_dtype == "int8":  # they are multiplied as whole numbers
        queries = rounded(queries, "int8")
    out = np.empty_like(queries)
    for row, context_len in enumerate(batch.context_lens.tolist()):
        start, end = batch.query_start[row : row + 2].tolist()
        blocks = cache.data[batch.block_tables[row], layer]  # [blocks, 2, heads, offset, dim]
        kv = blocks.transpose(1, 2, 0, 3, 4).reshape(2, cache.num_kv_heads, -1, head_dim)
        keys, values = kv[0].repeat(group, 0), kv[1].repeat(group, 0)
        for token in range(start, end):
            length = context_len - (end - 1 - token)
            scores = np.einsum("hd,hnd->hn", queries[token], keys[:, :length]) * scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[token] = np.einsum("hn,hnd->hd", weights, values[:, :length])
    return as_inputs(out.reshape(len(qkv), -1), out_dtype)


def select_rows(team, x, rows):
    return x[rows]


OPS = SimpleNamespace(
    embedding=embedding,
    rms_norm=rms_norm,
    linear=linear,
    linear_silu_mul=linear_silu_mul,
    quantize=quantize,
    head_rms_norm=head_rms_norm,
    rotary=rotary,
    store_kv=store_kv,
    paged_attention=paged_attention,
    select_rows=select_rows,
)


class Program:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._buffers: list[tuple[str, int, int]] = []
        self._ops: list[Callable[[Batch], None]] = []
        self._views: list[Array] = []
        self.tables: list[Array] = []

    def add_buffer(self, extent, row_bytes, place):
        assert extent in ("tokens", "logit_rows")
        self._buffers.append((extent, row_bytes, place))
        return len(self._buffers) - 1

    def add_embedding(self, weight, out):
        self._add(out, lambda batch: embedding(None, batch.token_ids, weight))

    def add_rms_norm(self, x, weight, eps, out, out_dtype):
        self._add(out, lambda batch: rms_norm(None, self._read(x), weight, eps, out_dtype))

    def add_quantize(self, x, width, out):
        assert self._buffers[x][1] == 4 * width
        self._add(out, lambda batch: quantize(None, self._read(x)))

    def add_linear(self, x, weight, bias, residual=-1, *, out):
        self._add(
            out,
            lambda batch: linear(
                None,
                self._read(x, weight.input_dtype),
                weight,
                bias,
                None if residual < 0 else self._read(residual),
            ),
            over=residual,
        )

    def add_linear_silu_mul(self, x, weight, bias, out, out_dtype):
        self._add(
            out,
            lambda batch: linear_silu_mul(
                None, self._read(x, weight.input_dtype), weight, bias, out_dtype
            ),
        )

    def add_head_rms_norm(self, qkv, q_weight, k_weight, eps, num_heads, num_kv_heads, out):
        arguments = (q_weight, k_weight, eps, num_heads, num_kv_heads)
        self._add(out, lambda batch: head_rms_norm(None, self._read(qkv), *arguments), over=qkv)

    def add_rotary(self, qkv, cos_sin, num_heads, num_kv_heads, out):
        self.tables.append(cos_sin)
        self._add(
            out,
            lambda batch: rotary(
                None, self._read(qkv), batch.positions, cos_sin, num_heads, num_kv_heads
            ),
            over=qkv,
        )

    def add_store_kv(self, qkv, layer, num_heads):
        self._ops.append(
            lambda batch: store_kv(
                None, self._read(qkv), self._cache, batch.slots, layer, num_heads
            )
        )

    def add_paged_attention(self, qkv, layer, num_heads, scale, out, out_dtype):
        self._add(
            out,
            lambda batch: paged_attention(
                None, self._read(qkv), self._cache, batch, layer, num_heads, scale, out_dtype
            ),
        )

    def add_select_rows(self, x, out):
        self._add(out, lambda batch: select_rows(None, self._read(x), batch.logit_rows))

    @property
    def num_ops(self):
        return len(self._ops)

    def run(self, batch: Batch) -> None:
        num_rows = {"tokens": batch.num_tokens, "logit_rows": batch.num_logit_rows}
        arenas = {}
        for extent, rows in num_rows.items():
            ends = [place + size for own, size, place in self._buffers if own == extent]
            arenas[extent] = np.full(max(ends, default=0) * rows + 64, 0xFF, np.uint8)
        self._views = []
        for extent, row_bytes, place in self._buffers:
            start = -(-place * num_rows[extent] // 64) * 64
            end = start + row_bytes * num_rows[extent]
            self._views.append(arenas[extent][start:end].reshape(num_rows[extent], row_bytes))
        for op in self._ops:
            op(batch)

    def read(self, buffer: int) -> Array:
        return self._views[buffer].copy()

    def _read(self, buffer: int, dtype: str = "float32") -> Array:
        return self._views[buffer].view(INPUT_TYPES[dtype])

    def _add(self, out: int, compute: Callable[[Batch], Array], over: int = -1) -> None:
        """An op may write while it reads: `out` is NaN before, unless it is to go over `over`."""

        def run(batch: Batch) -> None:
            if out != over:
                self._views[out][:] = 0xFF
            rows = np.ascontiguousarray(compute(batch))
            self._views[out][:] = rows.view(np.uint8).reshape(self._views[out].shape)

        self._ops.append(run)


MODULE = SimpleNamespace(Program=Program, Batch=Batch, ops=OPS)
