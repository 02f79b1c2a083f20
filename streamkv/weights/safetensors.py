"""A Hugging Face folder: config.json and safetensors files, single or sharded, memory-mapped.

Owns the formats (https://github.com/huggingface/safetensors#format): eight bytes of header length,
a JSON header, the data. Knows nothing of models. Invariant: offsets are checked against the file
before they are used, so a truncated or broken file is one ModelLoadError.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
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
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as exc:  # ValueError: the file is empty
            raise ModelLoadError(f"{path}: cannot be read: {exc}") from exc
        self.tensors: dict[str, TensorInfo] = _read_header(path, self._data)

    def read(self, name: str) -> NDArray[Any]:
        """float32, float16, or bfloat16 as its uint16 bits; a view of the map, not a copy."""
        info = self.tensors[name]
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has type {info.dtype}, which is not supported; "
                f"supported: {', '.join(DTYPES)}"
            )
        values = np.frombuffer(self._data, dtype, math.prod(info.shape), info.start)
        return values.reshape(info.shape)


class HuggingFaceFolder:
    """A `WeightSource` over a folder with config.json and safetensors files."""

    def __init__(self, path: Path) -> None:
        config = _read_json(path / "config.json")
        self.config: Mapping[str, Any] = config
        self._files: dict[str, SafetensorsFile] = _open_files(path)  # by tensor name
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: file.tensors[name].shape for name, file in self._files.items()
        }

    def read(self, name: str) -> NDArray[Any]:
        return self._files[name].read(name)

    def close(self) -> None:
        """Forget the files; each map goes with the last array that views it."""
        self._files = {}


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    if (folder / INDEX_FILE).exists():
        return _open_shards(folder)
    if not (folder / SINGLE_FILE).exists():
        raise ModelLoadError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither; "
            "other weight formats are not supported"
        )
    single = SafetensorsFile(folder / SINGLE_FILE)
    return dict.fromkeys(single.tensors, single)


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and shard == Path(shard).name for shard in weight_map.values()
    ):
        raise ModelLoadError(
            f"{folder / INDEX_FILE}: expected weight_map to map tensor names to file names"
        )
    shards = {name: SafetensorsFile(folder / name) for name in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard].tensors:
            raise ModelLoadError(
                f"{folder / shard}: tensor {name} is missing, though {INDEX_FILE} places it here"
            )
    return {name: shard for shard in shards.values() for name in shard.tensors}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelLoadError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _read_header(path: Path, data: mmap.mmap) -> dict[str, TensorInfo]:
    if len(data) < 8:
        raise ModelLoadError(f"{path}: not a safetensors file: {len(data)} bytes long")
    header_bytes: int = struct.unpack_from("<Q", data)[0]
    if header_bytes > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ModelLoadError(
            f"{path}: truncated or not a safetensors file: the header claims {header_bytes} "
            f"bytes, the file has {len(data)}"
        )
    try:
        header = json.loads(data[8 : 8 + header_bytes])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {
            name: _tensor_info(path, name, entry, 8 + header_bytes, len(data))
            for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise ModelLoadError(f"{path}: broken header: {type(exc).__name__}: {exc}") from exc


def _tensor_info(
    path: Path, name: str, entry: Mapping[str, Any], data_start: int, file_bytes: int
) -> TensorInfo:
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    dtype = DTYPES.get(entry["dtype"])
    if any(size < 0 for size in shape) or not 0 <= begin <= end <= file_bytes - data_start:
        raise ModelLoadError(
            f"{path}: truncated or broken: tensor {name} lies at bytes {data_start + begin} to "
            f"{data_start + end}, the file has {file_bytes}"
        )
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
        raise ModelLoadError(
            f"{path}: broken: tensor {name} of type {entry['dtype']} and shape {list(shape)} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes, got {end - begin}"
        )
    return TensorInfo(entry["dtype"], shape, data_start + begin)
