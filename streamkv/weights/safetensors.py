"""A Hugging Face folder: config.json and safetensors files, single or sharded.

Owns where in the files a tensor lies (https://github.com/huggingface/safetensors#format: eight
bytes of header length, a JSON header, the tensors without gaps). The library checks the header; the
data is read here: the library would map the file. Knows nothing of models.
Invariant: a truncated or broken file is one ModelLoadError.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import ModelLoadError, one_line
from ..files import is_file, read_object, what_it_is
from .hub_files import INDEX_FILE, SINGLE_FILE, read_weight_map
from .reading import ROW_MULTIPLE, Bytes, CheckpointFile, RowRange, row_ranges

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class TensorInfo(NamedTuple):
    dtype: str  # the file's name for it, such as "BF16"
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file


class SafetensorsFile:
    """One .safetensors file; tensor data stays in the file until it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = CheckpointFile(path)
        self.tensors: dict[str, TensorInfo] = _read_header(self._file)

    def chunks(self, name: str, rows: RowRange | None = None) -> Iterator[NDArray[Any]]:
        """A few rows at a time: float32, float16, or bfloat16 as its uint16 bits. Each chunk
        is where the one before was."""
        info = self.tensors[name]
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has type {info.dtype}, which is not supported; "
                f"supported: {', '.join(DTYPES)}"
            )
        row_shape = info.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        buffer = np.empty(0, np.uint8)
        for start, end in row_ranges(info.shape, rows=rows):
            num_bytes = (end - start) * row_bytes
            if not buffer.size:  # the first range is the largest
                buffer = np.empty(num_bytes, np.uint8)
            read = buffer[:num_bytes]
            self._file.read_into(read, info.start + start * row_bytes, f"tensor {name!r}")
            yield read.view(dtype).reshape(end - start, *row_shape)

    def identity(self) -> tuple[Any, ...]:
        """See CheckpointFile."""
        return self._file.identity(_num_header_bytes(self._file))

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        self._file.close()


class HuggingFaceFolder:
    """A `WeightSource` over a folder with config.json and safetensors files."""

    def __init__(self, path: Path) -> None:
        config = read_object(path / "config.json")
        self.config: Mapping[str, Any] = config
        self._files: dict[str, SafetensorsFile] = _open_files(path)  # by tensor name
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: file.tensors[name].shape for name, file in self._files.items()
        }

    def format(self, name: str) -> str:
        return self._files[name].tensors[name].dtype

    def row_multiple(self, name: str) -> int:
        return ROW_MULTIPLE

    def chunks(self, name: str, rows: RowRange | None = None) -> Iterator[NDArray[Any]]:
        return self._files[name].chunks(name, rows)

    def blocks(self, name: str, rows: RowRange | None = None) -> Iterator[Bytes]:
        raise ValueError(f"{name}: expected a tensor in blocks, got {self.format(name)}")

    def identity(self) -> tuple[Any, ...]:
        return tuple(sorted(file.identity() for file in set(self._files.values())))

    def check_unchanged(self) -> None:
        for file in set(self._files.values()):
            file.check_unchanged()

    def close(self) -> None:
        for file in set(self._files.values()):
            file.close()


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    if is_file(folder / INDEX_FILE):
        return _open_shards(folder)
    if not is_file(folder / SINGLE_FILE):
        raise ModelLoadError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither; other weight "
            "formats are not supported: get the model's safetensors, or a .gguf file"
        )
    single = SafetensorsFile(folder / SINGLE_FILE)
    return dict.fromkeys(single.tensors, single)


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    """By the index alone: a tensor may be in other shards too, and one it doesn't list isn't of
    the model."""
    weight_map = read_weight_map(folder)
    shards = {name: SafetensorsFile(folder / name) for name in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard].tensors:
            raise ModelLoadError(
                f"{folder / shard}: tensor {name!r} is missing, though {INDEX_FILE} places it here"
            )
    return {name: shards[shard] for name, shard in weight_map.items()}


def _read_header(file: CheckpointFile) -> dict[str, TensorInfo]:
    """Parsed and checked by the library: offsets lie in the file, one tensor after the other."""
    path = file.path
    try:
        with safe_open(path, framework="numpy") as header:
            names = header.offset_keys()
            slices = [header.get_slice(name) for name in names]
        read = path.stat()
    except (SafetensorError, OSError) as exc:
        reason = what_it_is(path) or one_line(exc)
        raise ModelLoadError(
            f"{path}: truncated or not a safetensors file: {reason}; get the file again"
        ) from exc
    if not os.path.samestat(read, file.opened):
        raise file.changed()
    file.check_unchanged()
    tensors = {}
    start = _num_header_bytes(file)
    for name, info in zip(names, slices, strict=True):
        dtype, shape = info.get_dtype(), tuple(info.get_shape())
        tensors[name] = TensorInfo(dtype, shape, start)
        start += math.prod(shape) * _element_bits(dtype) // 8
    return tensors


def _num_header_bytes(file: CheckpointFile) -> int:
    """Up to where the data begins."""
    num_bytes: int = struct.unpack("<Q", file.read(0, 8, "the header"))[0]
    return 8 + num_bytes


def _element_bits(dtype: str) -> int:
    """From the format's name: F32, BF16, F8_E4M3, F4, BOOL."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
