"""The C++ kernels of `streamkv._cpu` as a KernelTable.

Owns the border between tensors and addresses: every dtype, shape, device and contiguity check is
here, so that a kernel gets only what it can trust (ids, slots and lengths are checked in C++, where
that is cheap). Knows nothing of models or batches. Invariant: a call either raises ValueError
naming op, argument, expected and got, or computes what reference.py says; bits of a row don't
depend on the other rows, on chunking or on the number of threads.

`linear` is torch's for both tables.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from . import AttentionShape
from .cpu_count import num_usable_cores
from .kernels import KernelTable
from .reference import linear

_IS_BF16 = {torch.float32: False, torch.bfloat16: True}


def load(num_threads: int = 0) -> KernelTable:
    """The native table: the best instruction set here, or the one STREAMKV_CPU_ISA names.

    Both choices hold for the whole process; num_threads 0 is one for each physical core it may use.
    Raises ConfigError where the extension isn't built, or for an instruction set that is unknown
    or that this CPU lacks.
    """
    cpu = _import_extension()
    isas = cpu.available_isas()
    if not isas:
        raise ConfigError(
            "the native kernels expected SSE4.2, which this CPU lacks; use --ops reference"
        )
    try:
        cpu.set_isa(os.environ.get("STREAMKV_CPU_ISA") or isas[0])
    except ValueError as error:
        raise ConfigError(f"STREAMKV_CPU_ISA: {error}") from error
    cpu.set_num_threads(num_threads or num_usable_cores())
    return _Launchers(cpu).table()


def _import_extension() -> ModuleType:
    try:
        from streamkv import _cpu
    except ImportError as error:
        raise ConfigError(
            f"the native kernels can't be imported ({error}); "
            "build them with `pip install .`, or use --ops reference"
        ) from error
    return _cpu


def _is_bf16(op: str, argument: str, tensor: Tensor) -> bool:
    try:
        return _IS_BF16[tensor.dtype]
    except KeyError:
        raise ValueError(
            f"{op}: {argument} expected dtype float32 or bfloat16, got {tensor.dtype}"
        ) from None


def _check(
    op: str, argument: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The one check of a tensor whose address is about to cross."""
    if tensor.dtype is not dtype:
        problem = f"dtype {dtype}, got {tensor.dtype}"
    elif tensor.shape != shape:
        problem = f"shape {list(shape)}, got {list(tensor.shape)}"
    elif not tensor.is_cpu:
        problem = f"a CPU tensor, got one on {tensor.device}"
    elif not tensor.is_contiguous():
        problem = f"a contiguous tensor, got strides {tensor.stride()}"
    else:
        return
    raise ValueError(f"{op}: {argument} expected {problem}")


def _dims(op: str, argument: str, tensor: Tensor, count: int) -> Any:
    if tensor.ndim != count:
        raise ValueError(
            f"{op}: {argument} expected {count} dimensions, got shape {list(tensor.shape)}"
        )
    return tensor.shape


class _Launchers:
    """Checks, allocates the outputs, calls. Signatures and shapes are those of KernelTable."""

    def __init__(self, cpu: ModuleType) -> None:
        self._cpu = cpu

    def table(self) -> KernelTable:
        num_threads = self._cpu.num_threads()
        return KernelTable(
            name="native",
            detail=f"{self._cpu.isa()}, {num_threads} thread{'s' if num_threads > 1 else ''}",
            embedding=self.embedding,
            rms_norm=self.rms_norm,
            add_rms_norm=self.add_rms_norm,
            linear=linear,
            rotary=self.rotary,
            store_kv=self.store_kv,
            paged_attention=self.paged_attention,
            silu_mul=self.silu_mul,
            select_rows=self.select_rows,
        )

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        num_tokens, vocab_size, row_bytes = _check_gather(
            "embedding", "token_ids", token_ids, "weight", weight
        )
        out = weight.new_empty((num_tokens, weight.shape[1]))
        self._cpu.embedding(
            weight.data_ptr(),
            token_ids.data_ptr(),
            out.data_ptr(),
            num_tokens,
            vocab_size,
            row_bytes,
        )
        return out

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        num_selected, num_rows, row_bytes = _check_gather("select_rows", "rows", rows, "x", x)
        out = x.new_empty((num_selected, x.shape[1]))
        self._cpu.select_rows(
            x.data_ptr(), rows.data_ptr(), out.data_ptr(), num_selected, num_rows, row_bytes
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_rows, hidden = _dims("rms_norm", "x", x, 2)
        is_bf16 = _is_bf16("rms_norm", "x", x)
        _check("rms_norm", "x", x, x.dtype, (num_rows, hidden))
        _check("rms_norm", "weight", weight, x.dtype, (hidden,))
        normed = torch.empty_like(x)
        self._cpu.rms_norm(
            is_bf16,
            x.data_ptr(),
            0,
            weight.data_ptr(),
            normed.data_ptr(),
            0,
            num_rows,
            hidden,
            eps,
        )
        return normed

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        num_rows, hidden = _dims("add_rms_norm", "x", x, 2)
        is_bf16 = _is_bf16("add_rms_norm", "x", x)
        _check("add_rms_norm", "x", x, x.dtype, (num_rows, hidden))
        _check("add_rms_norm", "residual", residual, x.dtype, (num_rows, hidden))
        _check("add_rms_norm", "weight", weight, x.dtype, (hidden,))
        normed, new_residual = torch.empty_like(x), torch.empty_like(x)
        self._cpu.rms_norm(
            is_bf16,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            new_residual.data_ptr(),
            num_rows,
            hidden,
            eps,
        )
        return normed, new_residual

    def rotary(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, shape: AttentionShape
    ) -> Tensor:
        num_tokens, _ = _dims("rotary", "qkv", qkv, 2)
        max_positions, _ = _dims("rotary", "cos_sin", cos_sin, 2)
        is_bf16 = _is_bf16("rotary", "qkv", qkv)
        _check("rotary", "qkv", qkv, qkv.dtype, (num_tokens, shape.qkv_width))
        _check("rotary", "positions", positions, torch.int32, (num_tokens,))
        _check("rotary", "cos_sin", cos_sin, torch.float32, (max_positions, shape.head_dim))
        out = torch.empty_like(qkv)
        self._cpu.rotary(
            is_bf16,
            qkv.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            out.data_ptr(),
            num_tokens,
            shape.num_heads + shape.num_kv_heads,
            shape.num_kv_heads,
            shape.head_dim,
            max_positions,
        )
        return out

    def store_kv(
        self, qkv: Tensor, kv_cache: Tensor, slots: Tensor, layer: int, shape: AttentionShape
    ) -> None:
        num_tokens, _ = _dims("store_kv", "qkv", qkv, 2)
        is_bf16 = _is_bf16("store_kv", "qkv", qkv)
        _check("store_kv", "qkv", qkv, qkv.dtype, (num_tokens, shape.qkv_width))
        _check("store_kv", "slots", slots, torch.int32, (num_tokens,))
        num_blocks, num_layers, block_size = _check_cache(
            "store_kv", kv_cache, qkv.dtype, layer, shape
        )
        self._cpu.store_kv(
            is_bf16,
            qkv.data_ptr(),
            kv_cache.data_ptr(),
            slots.data_ptr(),
            num_tokens,
            num_blocks,
            num_layers,
            block_size,
            layer,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
        )

    def paged_attention(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        layer: int,
        shape: AttentionShape,
        scale: float,
    ) -> Tensor:
        op = "paged_attention"
        num_tokens, _ = _dims(op, "qkv", qkv, 2)
        num_rows, max_blocks = _dims(op, "block_tables", block_tables, 2)
        is_bf16 = _is_bf16(op, "qkv", qkv)
        _check(op, "qkv", qkv, qkv.dtype, (num_tokens, shape.qkv_width))
        _check(op, "query_start", query_start, torch.int32, (num_rows + 1,))
        _check(op, "context_lens", context_lens, torch.int32, (num_rows,))
        _check(op, "block_tables", block_tables, torch.int32, (num_rows, max_blocks))
        num_blocks, num_layers, block_size = _check_cache(op, kv_cache, qkv.dtype, layer, shape)
        out = qkv.new_empty((num_tokens, shape.num_heads * shape.head_dim))
        self._cpu.paged_attention(
            is_bf16,
            qkv.data_ptr(),
            kv_cache.data_ptr(),
            out.data_ptr(),
            query_start.data_ptr(),
            context_lens.data_ptr(),
            block_tables.data_ptr(),
            num_tokens,
            num_rows,
            max_blocks,
            num_blocks,
            num_layers,
            block_size,
            layer,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            scale,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_rows, width = _dims("silu_mul", "gate_up", gate_up, 2)
        is_bf16 = _is_bf16("silu_mul", "gate_up", gate_up)
        if width % 2:
            raise ValueError(f"silu_mul: gate_up expected an even width, got {width}")
        _check("silu_mul", "gate_up", gate_up, gate_up.dtype, (num_rows, width))
        out = gate_up.new_empty((num_rows, width // 2))
        self._cpu.silu_mul(is_bf16, gate_up.data_ptr(), out.data_ptr(), num_rows, width // 2)
        return out


def _check_gather(
    op: str, ids_argument: str, ids: Tensor, table_argument: str, table: Tensor
) -> tuple[int, int, int]:
    """(number of ids, rows of the table, bytes of a row)."""
    (num_ids,) = _dims(op, ids_argument, ids, 1)
    num_rows, width = _dims(op, table_argument, table, 2)
    is_bf16 = _is_bf16(op, table_argument, table)
    _check(op, ids_argument, ids, torch.int32, (num_ids,))
    _check(op, table_argument, table, table.dtype, (num_rows, width))
    return num_ids, num_rows, width * (2 if is_bf16 else 4)


def _check_cache(
    op: str, kv_cache: Tensor, dtype: torch.dtype, layer: int, shape: AttentionShape
) -> tuple[int, int, int]:
    """(num_blocks, num_layers, block_size) of a cache that fits the heads and has the layer."""
    num_blocks, num_layers, _, _, block_size, _ = _dims(op, "kv_cache", kv_cache, 6)
    expected = (num_blocks, num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
    _check(op, "kv_cache", kv_cache, dtype, expected)
    if not 0 <= layer < num_layers:
        raise ValueError(f"{op}: layer expected 0 to {num_layers - 1}, got {layer}")
    return num_blocks, num_layers, block_size
