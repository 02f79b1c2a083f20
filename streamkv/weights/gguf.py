"""GGUF files: metadata and tensors, read in place through a memory map.

Owns the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian) and the dequantization of the types in `BLOCKS`. Knows nothing of models: names and
shapes are the file's. Invariant: every read is bounds-checked, so a truncated or broken file is
one ModelLoadError and never a crash or a wrong tensor.

Dequantization is bound by numpy's loops, so they run over whole arrays: sixteen nibbles as two
64-bit words, scales repeated rather than broadcast (an inner loop of 32 costs more than it does).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError
from .mapped import CHUNK_VALUES, forget_pages

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {  # value type -> struct format
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}

# All types by number, so that an unsupported one can be named.
TYPE_NAMES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q5_0", "Q5_1", "Q8_0", "Q8_1"), start=6)),
    **dict(enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"), start=10)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"), start=16)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"), start=20)),
    **dict(enumerate(("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), start=24)),
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}

Floats = NDArray[np.float32]
Blocks = NDArray[Any]


class BlockType(NamedTuple):
    """How a tensor type is stored: `size` values in one item of `dtype`."""

    dtype: np.dtype[Any]
    size: int
    dequantize: Callable[[Blocks, Floats], None]  # [n] blocks -> float32 [n, size]


def _dequantize_plain(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks


def _dequantize_bf16(blocks: Blocks, out: Floats) -> None:
    out.view(np.uint32)[:, 0] = blocks.astype(np.uint32) << 16


def _dequantize_q8_0(blocks: Blocks, out: Floats) -> None:
    """32 int8 times one float16 scale."""
    out[:] = blocks["q"]
    flat = out.reshape(-1)
    flat *= _spread(blocks["d"])


def _dequantize_q4_0(blocks: Blocks, out: Floats) -> None:
    """32 values (0 .. 15) - 8, low nibbles first, times one float16 scale."""
    flat = _unpack_nibbles(blocks["q"], out)
    flat -= np.float32(8)
    flat *= _spread(blocks["d"])


def _dequantize_q4_1(blocks: Blocks, out: Floats) -> None:
    """32 values 0 .. 15, low nibbles first, times a float16 scale, plus a float16 minimum."""
    flat = _unpack_nibbles(blocks["q"], out)
    flat *= _spread(blocks["d"])
    flat += _spread(blocks["m"])


def _unpack_nibbles(words: NDArray[np.uint64], out: Floats) -> Floats:
    """[n, 2] words of 16 nibbles each -> `out` [n, 32] as one array: low nibbles, then high."""
    nibbles = np.empty((len(words), 4), np.uint64)
    for half in (0, 1):
        np.bitwise_and(words[:, half], LOW_NIBBLES, out=nibbles[:, half])
        np.bitwise_and(words[:, half] >> np.uint64(4), LOW_NIBBLES, out=nibbles[:, 2 + half])
    flat = out.reshape(-1)
    np.copyto(flat, nibbles.view(np.uint8).reshape(-1))
    return flat


def _spread(scales: NDArray[np.float16]) -> Floats:
    """A block's scale for each of its 32 values."""
    return np.repeat(scales.astype(np.float32), 32)


BLOCKS = {
    "F32": BlockType(np.dtype("<f4"), 1, _dequantize_plain),
    "F16": BlockType(np.dtype("<f2"), 1, _dequantize_plain),
    "BF16": BlockType(np.dtype("<u2"), 1, _dequantize_bf16),
    "Q8_0": BlockType(np.dtype([("d", "<f2"), ("q", "i1", 32)]), 32, _dequantize_q8_0),
    "Q4_0": BlockType(np.dtype([("d", "<f2"), ("q", "<u8", 2)]), 32, _dequantize_q4_0),
    "Q4_1": BlockType(
        np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "<u8", 2)]), 32, _dequantize_q4_1
    ),
}


class GGUFTensor(NamedTuple):
    """Where a tensor lies. `shape` is row-major (the file stores it the other way round)."""

    name: str
    shape: tuple[int, ...]
    type: str  # a key of BLOCKS
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """One .gguf file. `metadata` and `tensors` are read at once, tensor data when asked for.

    Raises ModelLoadError if the file can't be read, is broken, or holds an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: mmap.mmap | None = _map_file(path)
        cursor = _Cursor(self._data, path)
        num_tensors, num_keys = _read_header(cursor)
        self.metadata: dict[str, Any] = _read_metadata(cursor, num_keys)
        self.tensors: dict[str, GGUFTensor] = _read_tensors(cursor, num_tensors, self._alignment())

    def read(self, name: str) -> Floats:
        """The tensor's values, dequantized to float32, in its shape."""
        tensor = self.tensors[name]
        size = BLOCKS[tensor.type].size
        out = np.empty((math.prod(tensor.shape) // size, size), np.float32)
        for start in range(0, len(out), CHUNK_VALUES // size):
            end = min(start + CHUNK_VALUES // size, len(out))
            self._dequantize(tensor, start, out[start:end])
        return out.reshape(tensor.shape)

    def read_rows(self, name: str, start: int, end: int) -> NDArray[Any]:
        """Rows start .. end - 1 of the tensor's first dimension; a vector is read whole.

        float32, or what is stored where numpy can view it: float16, bfloat16 as its uint16 bits.
        A view is of the map: drop it before the file is closed.
        """
        tensor = self.tensors[name]
        block_type = BLOCKS[tensor.type]
        first, num_blocks = _block_range(tensor, start, end)
        shape = (end - start, *tensor.shape[1:])
        if block_type.size == 1:
            return self._blocks(tensor, first, num_blocks).reshape(shape)
        out = np.empty((num_blocks, block_type.size), np.float32)
        self._dequantize(tensor, first, out)
        return out.reshape(shape)

    def forget_rows(self, name: str, start: int, end: int) -> None:
        """Take the rows' pages off this process; they come back if they are read again."""
        tensor = self.tensors[name]
        first, num_blocks = _block_range(tensor, start, end)
        if self._data is not None:
            offset = tensor.offset + first * BLOCKS[tensor.type].dtype.itemsize
            num_bytes = num_blocks * BLOCKS[tensor.type].dtype.itemsize
            forget_pages(self._data, offset, offset + num_bytes)

    def close(self) -> None:
        """Unmap the file, once nothing views it; `metadata` and `tensors` stay."""
        data, self._data = self._data, None
        if data is not None:
            with contextlib.suppress(BufferError):  # viewed: it goes with the last array
                data.close()

    def _dequantize(self, tensor: GGUFTensor, first_block: int, out: Floats) -> None:
        with np.errstate(all="ignore"):  # an inf or NaN scale is the file's value, not our error
            BLOCKS[tensor.type].dequantize(self._blocks(tensor, first_block, len(out)), out)

    def _blocks(self, tensor: GGUFTensor, first: int, count: int) -> Blocks:
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        dtype = BLOCKS[tensor.type].dtype
        return np.frombuffer(self._data, dtype, count, tensor.offset + first * dtype.itemsize)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelLoadError(
                f"{self.path}: expected general.alignment to be a power of two, "
                f"got {alignment!r:.100}"
            )
        return alignment


def _block_range(tensor: GGUFTensor, start: int, end: int) -> tuple[int, int]:
    """(first, count) of the blocks that hold rows start .. end - 1."""
    num_rows, *row_shape = tensor.shape
    if not 0 <= start <= end <= num_rows or (not row_shape and end - start != num_rows):
        raise ValueError(f"{tensor.name!r} of shape {list(tensor.shape)}: rows {start} to {end}")
    row_values, size = math.prod(row_shape), BLOCKS[tensor.type].size
    return start * row_values // size, (end - start) * row_values // size


class _Cursor:
    """A position in the file; every step forward checks that the bytes exist."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def advance(self, num_bytes: int, what: str) -> int:
        """Move on; returns where the bytes begin."""
        start, size = self.position, len(self.data)
        if num_bytes > size - start:
            raise ModelLoadError(
                f"{self.path}: truncated or broken: {what} needs {num_bytes} bytes at offset "
                f"{start}, the file has {size}"
            )
        self.position = start + num_bytes
        return start

    def integer(self, fmt: str, what: str) -> int:
        value: int = struct.unpack_from(fmt, self.data, self.advance(struct.calcsize(fmt), what))[0]
        return value

    def string(self, what: str) -> str:
        length = self.integer("<Q", what)
        start = self.advance(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as exc:
            raise ModelLoadError(f"{self.path}: broken: {what} is not UTF-8 ({exc})") from exc

    def strings(self, what: str, count: int) -> list[str]:
        """As `string`, `count` times, without the calls: a vocabulary has 100,000 and more."""
        data, position, size = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            start = position + 8
            end = start + length_at(data, position)[0] if start <= size else start
            if end > size:
                break  # `string` says what is wrong
            try:
                found.append(data[start:end].decode())
            except UnicodeDecodeError:
                break
            position = end
        self.position = position
        return found + [self.string(what) for _ in range(count - len(found))]

    def value(self, value_type: int, what: str, depth: int = 0) -> Any:
        if value_type == STRING:
            return self.string(what)
        if value_type == ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise ModelLoadError(f"{self.path}: broken: {what} nests arrays too deeply")
            return self.array(what, depth + 1)
        fmt = SCALARS.get(value_type)
        if fmt is None:
            raise ModelLoadError(f"{self.path}: broken: {what} has unknown type {value_type}")
        scalar = struct.unpack_from(f"<{fmt}", self.data, self.advance(struct.calcsize(fmt), what))
        return bool(scalar[0]) if value_type == BOOL else scalar[0]

    def array(self, what: str, depth: int) -> list[Any]:
        """Scalars in one sweep: vocabularies have hundreds of thousands of entries."""
        item_type, count = self.integer("<I", what), self.integer("<Q", what)
        fmt = SCALARS.get(item_type)
        if fmt is None:
            # An item takes a byte at least, so a count past the end is caught before the loop.
            self.advance(0 if count <= len(self.data) else count, what)
            if item_type == STRING:
                return self.strings(what, count)
            return [self.value(item_type, what, depth) for _ in range(count)]
        size = struct.calcsize(fmt)
        start = self.advance(count * size, what)
        items: list[Any] = np.frombuffer(self.data, f"<{fmt}", count, start).tolist()
        return [bool(item) for item in items] if item_type == BOOL else items


def _map_file(path: Path) -> mmap.mmap:
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ModelLoadError(f"{path}: cannot be read: expected a regular file")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as exc:  # ValueError: the file is empty
        raise ModelLoadError(f"{path}: cannot be read: {exc}") from exc


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata keys)."""
    start = cursor.advance(4, "the magic number")
    magic = cursor.data[start : start + 4]
    if magic != MAGIC:
        raise ModelLoadError(f"{cursor.path}: not a GGUF file: expected {MAGIC!r}, got {magic!r}")
    version = cursor.integer("<I", "the version")
    if version not in VERSIONS:
        raise ModelLoadError(
            f"{cursor.path}: expected GGUF version 2 or 3, little-endian, got {version}"
        )
    return cursor.integer("<Q", "the tensor count"), cursor.integer("<Q", "the metadata count")


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"the name of metadata key {index}")
        # repr: what an error names must not put control characters on a terminal
        metadata[key] = cursor.value(cursor.integer("<I", repr(key)), repr(key))
    return metadata


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    found: list[GGUFTensor] = []
    for index in range(num_tensors):
        found.append(_read_tensor_info(cursor, index))
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in found:
        start = data_start + tensor.offset
        if start + tensor.num_bytes > len(cursor.data):
            raise ModelLoadError(
                f"{cursor.path}: truncated or broken: tensor {tensor.name!r} needs bytes {start} "
                f"to {start + tensor.num_bytes}, the file has {len(cursor.data)}"
            )
        if tensor.name in tensors or tensor.offset % alignment:
            raise ModelLoadError(
                f"{cursor.path}: broken: tensor {tensor.name!r} is listed twice or not aligned"
            )
        tensors[tensor.name] = tensor._replace(offset=start)
    return tensors


def _read_tensor_info(cursor: _Cursor, index: int) -> GGUFTensor:
    """One entry of the tensor list; its offset still counts from the start of the data."""
    name = cursor.string(f"the name of tensor {index}")
    num_dimensions = cursor.integer("<I", repr(name))
    if num_dimensions > MAX_DIMENSIONS:
        raise ModelLoadError(
            f"{cursor.path}: broken: tensor {name!r} has {num_dimensions} dimensions, at most "
            f"{MAX_DIMENSIONS} exist"
        )
    shape = tuple(reversed([cursor.integer("<Q", repr(name)) for _ in range(num_dimensions)]))
    type_number, offset = cursor.integer("<I", repr(name)), cursor.integer("<Q", repr(name))
    type_name = TYPE_NAMES.get(type_number, f"number {type_number}")
    block_type = BLOCKS.get(type_name)
    if block_type is None:
        raise ModelLoadError(
            f"{cursor.path}: tensor {name!r} has type {type_name}, which is not supported; "
            f"supported: {', '.join(BLOCKS)}"
        )
    if not shape or shape[-1] % block_type.size:
        raise ModelLoadError(
            f"{cursor.path}: broken: tensor {name!r} of type {type_name} has shape {list(shape)}, "
            f"expected rows of a multiple of {block_type.size} values"
        )
    num_bytes = math.prod(shape) // block_type.size * block_type.dtype.itemsize
    return GGUFTensor(name, shape, type_name, offset, num_bytes)
