"""From a checkpoint to the weights of a model's parameters, as the native kernels read them.

Owns the choice of the format, the comparison of names and shapes, and the packing (torch tensors
are torch_loader.py's). Knows no architecture: it fills the `Parameter`s it is given. Invariant:
every parameter is filled completely or ModelLoadError says which tensor was missing, unexpected or
wrongly shaped, before any memory is taken; besides the model, each thread holds a few rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError
from ..ops import Parameter
from .gguf_llama import GGUFCheckpoint
from .hub import Checkpoint
from .safetensors import HuggingFaceFolder

# In checkpoints of older converters; computed from the config, so they carry nothing.
HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
ITEM_BYTES = {"bfloat16": 2, "float32": 4}

PackedWeights = dict[str, Any]  # by parameter: a matrix a PackedWeight, a vector float32 in numpy


class WeightSource(Protocol):
    """An open checkpoint, under Hugging Face names whatever its format."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json, for ModelConfig.from_dict."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in the checkpoint."""

    def chunks(self, name: str) -> Iterator[NDArray[Any]]:
        """The tensor's rows from first to last, a few at a time: float32, float16, or bfloat16 as
        its uint16 bits. The next chunk may take the place of the one before; several threads may
        read. ModelLoadError if the file has become too short."""

    def check_unchanged(self) -> None:
        """Raise ModelLoadError if a file was written to since it was opened."""

    def close(self) -> None:
        """Give the files back; nothing can be read after."""


def open_checkpoint(checkpoint: Checkpoint) -> WeightSource:
    """Open the files and read their headers. ModelLoadError if they are broken."""
    if checkpoint.kind == "gguf":
        return GGUFCheckpoint(checkpoint.path)
    return HuggingFaceFolder(checkpoint.path)


def packed_bytes(parameters: Sequence[Parameter], dtype: str) -> int:
    """What `load_packed` will take, but for what fills up panels."""
    return sum(
        math.prod(parameter.shape) * (ITEM_BYTES[dtype] if len(parameter.shape) == 2 else 4)
        for parameter in parameters
    )


def load_packed(
    cpu: ModuleType,
    source: WeightSource,
    parameters: Sequence[Parameter],
    *,
    dtype: str,
    num_threads: int,
    progress: Callable[[float], None],
) -> PackedWeights:
    """Matrices of `dtype` packed by `cpu`, the extension; vectors as float32 arrays.

    `progress` gets the fraction done, 0 to 1; what it raises ends the loading.
    """
    check_names_and_shapes(source, parameters)
    total, done = packed_bytes(parameters, dtype), 0
    found: PackedWeights = {}
    # The largest first, so that no thread is left with one at the end.
    by_size = sorted(parameters, key=lambda parameter: -math.prod(parameter.shape))
    arena = cpu.WeightArena()
    with ThreadPoolExecutor(num_threads, "loading") as pool:
        futures = {pool.submit(_fill, cpu, arena, source, one, dtype): one for one in by_size}
        try:
            for future in as_completed(futures):
                parameter = futures[future]
                found[parameter.name] = future.result()
                done += packed_bytes([parameter], dtype)
                progress(done / total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    source.check_unchanged()
    return {parameter.name: found[parameter.name] for parameter in parameters}


def _fill(
    cpu: ModuleType, arena: Any, source: WeightSource, parameter: Parameter, dtype: str
) -> Any:
    if len(parameter.shape) == 1:
        values = [_widened(chunk) for name, _ in parameter.parts for chunk in source.chunks(name)]
        return np.concatenate(values)
    weight = cpu.PackedWeight(dtype, *parameter.shape, parameter.is_paired, arena)
    first_output = 0
    for name, _ in parameter.parts:
        for chunk in source.chunks(name):
            weight.pack(chunk, first_output)
            first_output += len(chunk)
            del chunk  # before the next one is read
    return weight


def _widened(values: NDArray[Any]) -> NDArray[np.float32]:
    """A copy as float32."""
    if values.dtype == np.uint16:  # bfloat16 has no numpy type
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def check_names_and_shapes(source: WeightSource, parameters: Sequence[Parameter]) -> None:
    """Raise ModelLoadError unless the checkpoint has exactly the tensors of `parameters`."""
    expected = {name: shape for parameter in parameters for name, shape in parameter.parts}
    shapes = source.shapes
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ModelLoadError(
            f"checkpoint: tensor {missing[0]!r} is missing{_and_more(missing)}: expected shape "
            f"{list(expected[missing[0]])}; the files are incomplete or of another model"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ModelLoadError(
                f"checkpoint: tensor {name!r}: expected shape {list(shape)}, got "
                f"{list(shapes[name])}; the config and the weights don't belong together"
            )
    # A tied model may be saved with its head; the embedding is what counts.
    harmless = {"lm_head.weight"} if source.config.get("tie_word_embeddings") else set()
    unexpected = [
        name
        for name in shapes
        if name not in expected and name not in harmless and not HARMLESS.fullmatch(name)
    ]
    if unexpected:
        raise ModelLoadError(
            f"checkpoint: tensor {unexpected[0]!r} of shape {list(shapes[unexpected[0]])} is "
            f"unexpected{_and_more(unexpected)}: the architecture has no such weight"
        )


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
