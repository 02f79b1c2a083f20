"""From a checkpoint to the weights of a model's parameters, as the native kernels read them.

Owns the comparison of names and shapes, and the packing (formats are formats.py's choice, torch
tensors torch_loader.py's). Knows no architecture: it fills the `Parameter`s it is given. Invariant:
every parameter is filled completely or ModelLoadError says which tensor was missing, unexpected or
wrongly shaped, before any memory is taken; besides the model, each thread holds a few rows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..cache import cache_dir
from ..errors import ConfigError, ModelLoadError
from ..files import about
from ..ops import Parameter
from . import packed_cache
from .formats import (
    Formats,
    Quantization,
    is_quantized,
    packed_bytes,
    part_formats,
    planned_formats,
    row_bytes,
)
from .gguf_checkpoint import GGUFCheckpoint
from .hub import Checkpoint
from .jobs import Job, Progress, run_jobs
from .reading import Bytes, RowRange
from .safetensors import HuggingFaceFolder

# In checkpoints of older converters; computed from the config, so they carry nothing.
HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
JOB_VALUES = 1 << 22  # of one part, for one thread at a time: a fraction of a second
# Of a tensor's largest value: an error that four bits of that value dwarf (a block may be of a
# neuron that died).
NEGLIGIBLE = 2.0**-14

logger = logging.getLogger(__name__)

# By parameter: a matrix a PackedWeight or a QuantizedWeight, a vector float32 in numpy.
PackedWeights = dict[str, Any]


class WeightSource(Protocol):
    """An open checkpoint, under Hugging Face names whatever its format."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json, for models.read_config."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in the checkpoint."""

    def format(self, name: str) -> str:
        """How the tensor is stored, by GGUF's names: "F32", "BF16", "Q4_1"."""

    def row_multiple(self, name: str) -> int:
        """At a multiple of so many rows may a range of them start, and so do chunks and blocks. A
        multiple of 64."""

    def chunks(self, name: str, rows: RowRange | None = None) -> Iterator[NDArray[Any]]:
        """The tensor's rows, or some, from first to last, a few at a time: float32, float16, or
        bfloat16 as its uint16 bits. The next chunk may take the place of the one before; several
        threads may read. ModelLoadError if the file has become too short."""

    def blocks(self, name: str, rows: RowRange | None = None) -> Iterator[Bytes]:
        """The same of a quantized matrix as it is stored: [rows, bytes of a row]."""

    def identity(self) -> tuple[Any, ...]:
        """What tells these files from others, and from themselves written to. Of JSON's types."""

    def check_unchanged(self) -> None:
        """Raise ModelLoadError if a file was written to since it was opened."""

    def close(self) -> None:
        """Give the files back; nothing can be read after."""


def open_checkpoint(checkpoint: Checkpoint) -> WeightSource:
    """Open the files and read their headers. ModelLoadError if they are broken."""
    if checkpoint.kind == "gguf":
        return GGUFCheckpoint(checkpoint.path)
    return HuggingFaceFolder(checkpoint.path)


@contextmanager
def opened_checkpoint(checkpoint: Checkpoint) -> Iterator[WeightSource]:
    """The checkpoint, open until the end of the block; ModelLoadErrors in there name it."""
    with about(checkpoint.path):
        source = open_checkpoint(checkpoint)
        try:
            yield source
        finally:
            source.close()


def load_packed(
    cpu: ModuleType,
    source: WeightSource,
    parameters: Sequence[Parameter],
    *,
    dtype: str,
    num_threads: int,
    progress: Callable[[float], None],
    quantization: Quantization = "none",
    packed_cache_gib: float = 0.0,
) -> PackedWeights:
    """Matrices in the formats that `planned_formats` chooses, packed by `cpu`, the extension;
    vectors as float32 arrays.

    Quantized ones come from the packed cache if it has them, and go there. `progress` gets the
    fraction done, 0 to 1; what it raises ends the loading. ConfigError for numbers that can't be
    quantized so.
    """
    check_names_and_shapes(source, parameters)
    formats = planned_formats(source, parameters, dtype=dtype, quantization=quantization)
    arena = cpu.WeightArena()
    weights = {one.name: _allocate(cpu, arena, one, formats) for one in parameters}
    total = packed_bytes(parameters, formats)
    done = Progress(total, progress)
    quantized = [one for one in parameters if is_quantized(one, formats)]
    max_cache_bytes = int(packed_cache_gib * 2**30)
    folder = _packed_folder() if max_cache_bytes else None
    cached = None
    if folder and packed_cache.is_worth_keeping(source, quantized, formats):
        key = packed_cache.packed_key(cpu, source.identity(), quantized, formats)
        buffers = [buffer for one in quantized for buffer in weights[one.name].buffers()]
        cached = packed_cache.PackedFile(folder, key, buffers)
    is_cached = cached is not None and cached.read(max_cache_bytes, num_threads, done)
    if cached and not is_cached:
        done.restart(total + cached.num_bytes)
    left = [one for one in parameters if not (is_cached and is_quantized(one, formats))]
    losses = _Losses()
    jobs = [
        job for one in left for job in _jobs(cpu, source, one, formats, weights[one.name], losses)
    ]
    run_jobs(jobs, num_threads, done)
    source.check_unchanged()
    losses.check(quantization)
    if cached and not is_cached:
        cached.write(max_cache_bytes, num_threads, done)
    done.finish()
    return weights


def _packed_folder() -> Path | None:
    """None, and a line in the log, where there is no place for one."""
    try:
        return cache_dir() / "packed"
    except ConfigError as error:
        logger.warning("packed weights are not kept: %s", error)
        return None


class _Losses:
    """What float16 scales can't hold of tensors that are quantized now. Any thread may add."""

    def __init__(self) -> None:
        self._found: list[tuple[str, float, float]] = []

    def add(self, name: str, largest: float, error: float) -> None:
        """Of some rows: their largest magnitude, and the largest error that isn't of four or eight
        bits but of the scales; of a block, the root of the mean square."""
        self._found.append((name, largest, error))

    def check(self, quantization: Quantization) -> None:
        """ConfigError for a tensor in which such an error counts."""
        for name in sorted({name for name, _, _ in self._found}):
            largest = max(one for own, one, _ in self._found if own == name)
            error = max(one for own, _, one in self._found if own == name)
            if error > NEGLIGIBLE * largest:
                asked = quantization in ("int8", "int4")
                raise ConfigError(
                    f"--quantization {quantization}: tensor {name!r}: expected values whose blocks "
                    f"have scales in the range of float16, got values of up to {largest:.3g} with "
                    f"blocks that are {'too large' if error == float('inf') else 'too small'} for "
                    f"it; use --quantization {'int8' if asked else 'none'}"
                )


def _allocate(cpu: ModuleType, arena: Any, parameter: Parameter, formats: Formats) -> Any:
    """In the order in which they are read later. Memory is committed when it is first written."""
    if len(parameter.shape) == 1:
        return np.empty(parameter.shape, np.float32)
    own = formats[parameter.name]
    num_outputs, depth = parameter.shape
    if is_quantized(parameter, formats):
        outputs = [shape[0] for _, shape in parameter.parts]
        return cpu.QuantizedWeight(list(own), outputs, depth, parameter.is_paired, arena)
    return cpu.PackedWeight(own[0], num_outputs, depth, parameter.is_paired, arena)


def _jobs(
    cpu: ModuleType,
    source: WeightSource,
    parameter: Parameter,
    formats: Formats,
    weight: Any,
    losses: _Losses,
) -> Iterator[Job]:
    """What fills a weight, a range of rows of one part each."""
    if len(parameter.shape) == 1:
        yield Job(weight.nbytes, partial(_fill_vector, source, parameter, weight))
        return
    first_output = 0
    own = part_formats(parameter, formats)
    for part, (name, (num_rows, depth)) in enumerate(parameter.parts):
        for rows in _job_ranges(source, name, num_rows, depth):
            if not is_quantized(parameter, formats):
                run = partial(_pack_rows, source, name, rows, weight, first_output + rows.start)
            elif source.format(name) == own[part]:
                run = partial(_pack_part, source, name, rows, weight, part)
            else:
                quantize = partial(cpu.quantize_reporting, format=own[part])
                run = partial(_quantize_part, quantize, losses, source, name, rows, weight, part)
            yield Job((rows.end - rows.start) * row_bytes(own[part], depth), run)
        first_output += num_rows


def _job_ranges(source: WeightSource, name: str, num_rows: int, depth: int) -> Iterator[RowRange]:
    multiple = source.row_multiple(name)
    step = max(1, JOB_VALUES // depth // multiple) * multiple
    for start in range(0, num_rows, step):
        yield RowRange(start, min(start + step, num_rows))


def _fill_vector(source: WeightSource, parameter: Parameter, out: NDArray[np.float32]) -> None:
    start = 0
    for name, _ in parameter.parts:
        for chunk in source.chunks(name):
            out[start : start + len(chunk)] = _widened(chunk)
            start += len(chunk)


def _pack_rows(
    source: WeightSource, name: str, rows: RowRange, weight: Any, first_output: int
) -> None:
    for chunk in source.chunks(name, rows):
        weight.pack(chunk, first_output)
        first_output += len(chunk)


def _pack_part(source: WeightSource, name: str, rows: RowRange, weight: Any, part: int) -> None:
    """As the file has it."""
    first_output = rows.start
    for blocks in source.blocks(name, rows):
        weight.pack(blocks, part, first_output)
        first_output += len(blocks)


def _quantize_part(
    quantize: Callable[[NDArray[Any]], tuple[Bytes, float, float]],
    losses: _Losses,
    source: WeightSource,
    name: str,
    rows: RowRange,
    weight: Any,
    part: int,
) -> None:
    first_output = rows.start
    for chunk in source.chunks(name, rows):
        blocks, largest, error = quantize(chunk)
        losses.add(name, largest, error)
        weight.pack(blocks, part, first_output)
        first_output += len(blocks)


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
