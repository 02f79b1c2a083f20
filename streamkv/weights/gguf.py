"""GGUF files: metadata and tensors.

Owns the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian); what values the bytes of a tensor are is gguf_blocks.py's. Knows nothing of models:
names and shapes are the file's. Invariant: every read is bounds-checked, so a truncated or broken
file is one ModelLoadError and never a crash or a wrong tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError
from ..files import what_it_is
from .gguf_blocks import BLOCKS, Blocks, Floats
from .reading import ROW_MULTIPLE, Bytes, CheckpointFile, RowRange, row_ranges

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
MAX_QUOTED_CHARS = 80
HEADER_BYTES = 1 << 20  # read at least at a time until the header ends

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
        self._file = CheckpointFile(path)
        cursor = _Cursor(self._file)
        num_tensors, num_keys = _read_header(cursor)
        self.metadata: dict[str, Any] = _read_metadata(cursor, num_keys)
        self._check_whole()
        self.tensors: dict[str, GGUFTensor] = _read_tensors(cursor, num_tensors, self._alignment())
        self._num_header_bytes = cursor.position

    def read(self, name: str) -> Floats:
        """The tensor's values, dequantized to float32, in its shape."""
        tensor = self.tensors[name]
        dtype, size, _ = BLOCKS[tensor.type]
        raw = np.empty(tensor.num_bytes, np.uint8)
        self._file.read_into(raw, tensor.offset, f"tensor {name!r}")
        blocks = raw.view(dtype)
        out = np.empty((len(blocks), size), np.float32)
        _dequantize(tensor, blocks, out)
        return out.reshape(tensor.shape)

    def chunks(
        self, name: str, multiple: int = ROW_MULTIPLE, rows: RowRange | None = None
    ) -> Iterator[NDArray[Any]]:
        """A few rows at a time, as `row_ranges` has them: float32, or what is stored where numpy
        can view it: float16, bfloat16 as its uint16 bits. Each chunk is where the one before was.
        """
        tensor = self.tensors[name]
        dtype, size, _ = BLOCKS[tensor.type]
        values = np.empty((0, size), np.float32)
        for raw in self.blocks(name, multiple, rows):
            blocks = raw.reshape(-1).view(dtype)
            if size > 1:
                if not values.size:  # the first chunk is the largest
                    values = np.empty((len(blocks), size), np.float32)
                _dequantize(tensor, blocks, values[: len(blocks)])
                blocks = values[: len(blocks)]
            yield blocks.reshape(len(raw) if tensor.shape[1:] else -1, *tensor.shape[1:])

    def blocks(
        self, name: str, multiple: int = ROW_MULTIPLE, rows: RowRange | None = None
    ) -> Iterator[Bytes]:
        """The same rows as the file has them, [rows, bytes of a row]. (Of a vector, whose values
        may share blocks, all of it as one row.)"""
        tensor = self.tensors[name]
        shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        row_bytes = tensor.num_bytes // max(1, shape[0])
        buffer = np.empty(0, np.uint8)
        for start, end in row_ranges(shape, multiple, rows):
            num_bytes = (end - start) * row_bytes
            if not buffer.size:  # the first range is the largest
                buffer = np.empty(num_bytes, np.uint8)
            read = buffer[:num_bytes]
            self._file.read_into(read, tensor.offset + start * row_bytes, f"tensor {name!r}")
            yield read.reshape(end - start, row_bytes)

    def identity(self) -> tuple[Any, ...]:
        """See CheckpointFile."""
        return self._file.identity(self._num_header_bytes)

    def check_unchanged(self) -> None:
        """Raise ModelLoadError if the file was written to since it was opened."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Nothing can be read after; `metadata` and `tensors` stay."""
        self._file.close()

    def _check_whole(self) -> None:
        num_pieces = self.metadata.get("split.count", 1)
        if isinstance(num_pieces, int) and num_pieces > 1:
            raise ModelLoadError(
                f"{self.path}: expected a whole model, got one of {num_pieces} pieces of a split "
                "file; put them together with llama.cpp's llama-gguf-split --merge"
            )

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelLoadError(
                f"{self.path}: expected general.alignment to be a power of two, "
                f"got {alignment!r:.100}"
            )
        return alignment


def _dequantize(tensor: GGUFTensor, blocks: Blocks, out: Floats) -> None:
    with np.errstate(all="ignore"):  # an inf or NaN scale is the file's value, not our error
        BLOCKS[tensor.type].dequantize(blocks, out)


class _Cursor:
    """A position in the file; every step forward checks that the bytes exist, and reads them."""

    def __init__(self, file: CheckpointFile) -> None:
        self.file = file
        self.path = file.path
        self.data = b""  # from the file's start on
        self.position = 0

    def advance(self, num_bytes: int, what: str) -> int:
        """Move on; returns where the bytes begin."""
        start, size = self.position, self.file.size
        if num_bytes > size - start:
            raise ModelLoadError(
                f"{self.path}: truncated or broken: {what} needs {num_bytes} bytes at offset "
                f"{start}, the file has {size}; get it again"
            )
        self.position = start + num_bytes
        have = len(self.data)
        if self.position > have:
            more = max(self.position - have, have, HEADER_BYTES)  # doubled: each byte moves once
            self.data += self.file.read(have, min(more, size - have), what)
        return start

    def integer(self, fmt: str, what: str) -> int:
        value: int = self.scalar(fmt, what)
        return value

    def scalar(self, fmt: str, what: str) -> Any:
        start = self.advance(struct.calcsize(fmt), what)  # which may read on, into another `data`
        return struct.unpack_from(fmt, self.data, start)[0]

    def string(self, what: str) -> str:
        length = self.integer("<Q", what)
        start = self.advance(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as exc:
            raise ModelLoadError(f"{self.path}: broken: {what} is not UTF-8 ({exc})") from exc

    def strings(self, what: str, count: int) -> list[str]:
        """As `string`, `count` times, almost without calls: a vocabulary has 100,000 and more."""
        found: list[str] = []
        while len(found) < count:
            found += self._strings_in_memory(count - len(found))
            if len(found) < count:
                found.append(self.string(what))  # reads on, or says what is wrong
        return found

    def _strings_in_memory(self, count: int) -> list[str]:
        """The first ones of `count`, as far as they were read and make sense."""
        data, position, size = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            start = position + 8
            end = start + length_at(data, position)[0] if start <= size else start
            if end > size:
                break
            try:
                found.append(data[start:end].decode())
            except UnicodeDecodeError:
                break
            position = end
        self.position = position
        return found

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
        scalar = self.scalar(f"<{fmt}", what)
        return bool(scalar) if value_type == BOOL else scalar

    def array(self, what: str, depth: int) -> list[Any]:
        """Scalars in one sweep: vocabularies have hundreds of thousands of entries."""
        item_type, count = self.integer("<I", what), self.integer("<Q", what)
        fmt = SCALARS.get(item_type)
        if fmt is None:
            # An item takes a byte at least, so a count past the end is caught before the loop.
            self.advance(0 if count <= self.file.size else count, what)
            if item_type == STRING:
                return self.strings(what, count)
            return [self.value(item_type, what, depth) for _ in range(count)]
        size = struct.calcsize(fmt)
        start = self.advance(count * size, what)
        items: list[Any] = np.frombuffer(self.data, f"<{fmt}", count, start).tolist()
        return [bool(item) for item in items] if item_type == BOOL else items


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata keys)."""
    start = cursor.advance(4, "the magic number")
    magic = cursor.data[start : start + 4]
    if magic != MAGIC:
        found = what_it_is(cursor.path) or f"a file that begins with {magic!r}"
        raise ModelLoadError(f"{cursor.path}: expected a GGUF file, got {found}; get it again")
    version = cursor.integer("<I", "the version")
    if version not in VERSIONS:
        raise ModelLoadError(
            f"{cursor.path}: expected GGUF version 2 or 3, little-endian, got {version}; convert "
            "the model again"
        )
    return cursor.integer("<Q", "the tensor count"), cursor.integer("<Q", "the metadata count")


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"the name of metadata key {index}")
        metadata[key] = cursor.value(cursor.integer("<I", _quoted(key)), _quoted(key))
    return metadata


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    found: list[GGUFTensor] = []
    for index in range(num_tensors):
        found.append(_read_tensor_info(cursor, index))
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in found:
        start, what = data_start + tensor.offset, f"tensor {_quoted(tensor.name)}"
        if start + tensor.num_bytes > cursor.file.size:
            raise ModelLoadError(
                f"{cursor.path}: truncated or broken: {what} needs bytes {start} to "
                f"{start + tensor.num_bytes}, the file has {cursor.file.size}; get it again"
            )
        if tensor.name in tensors or tensor.offset % alignment:
            raise ModelLoadError(f"{cursor.path}: broken: {what} is listed twice or not aligned")
        tensors[tensor.name] = tensor._replace(offset=start)
    return tensors


def _read_tensor_info(cursor: _Cursor, index: int) -> GGUFTensor:
    """One entry of the tensor list; its offset still counts from the start of the data."""
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor {_quoted(name)}"
    num_dimensions = cursor.integer("<I", what)
    if num_dimensions > MAX_DIMENSIONS:
        raise ModelLoadError(
            f"{cursor.path}: broken: {what} has {num_dimensions} dimensions, at most "
            f"{MAX_DIMENSIONS} exist"
        )
    shape = tuple(reversed([cursor.integer("<Q", what) for _ in range(num_dimensions)]))
    type_number, offset = cursor.integer("<I", what), cursor.integer("<Q", what)
    type_name = TYPE_NAMES.get(type_number, f"number {type_number}")
    block_type = BLOCKS.get(type_name)
    if block_type is None:
        raise ModelLoadError(
            f"{cursor.path}: {what} has type {type_name}, which is not supported; "
            f"supported: {', '.join(BLOCKS)}"
        )
    if not shape or shape[-1] % block_type.size:
        raise ModelLoadError(
            f"{cursor.path}: broken: {what} of type {type_name} has shape {list(shape)}, "
            f"expected rows of a multiple of {block_type.size} values"
        )
    num_bytes = math.prod(shape) // block_type.size * block_type.dtype.itemsize
    return GGUFTensor(name, shape, type_name, offset, num_bytes)


def _quoted(name: str) -> str:
    """For an error: no control characters on a terminal, and not the whole file if its length is
    wrong."""
    return repr(name if len(name) <= MAX_QUOTED_CHARS else f"{name[:MAX_QUOTED_CHARS]}...")
