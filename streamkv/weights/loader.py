"""From a checkpoint to the tensors of a model's parameters.

Owns the choice of the format, the comparison of names and shapes, the cast and the fusion. Knows
no architecture: it fills the `Parameter`s it is given. Invariant: every parameter is filled
completely or ModelLoadError says which tensor was missing, unexpected or wrongly shaped, before
any memory is taken; at most one checkpoint tensor is in memory besides the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ModelLoadError
from ..ops import Parameter
from .gguf_llama import GGUFCheckpoint
from .hub import Checkpoint
from .safetensors import HuggingFaceFolder

# In checkpoints of older converters; computed from the config, so they carry nothing.
HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


class WeightSource(Protocol):
    """An open checkpoint, under Hugging Face names whatever its format."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json, for ModelConfig.from_dict."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in the checkpoint."""

    def read(self, name: str) -> NDArray[Any]:
        """float32, float16, or bfloat16 as its uint16 bits."""

    def close(self) -> None:
        """Give the files back; nothing can be read after."""


def open_checkpoint(checkpoint: Checkpoint) -> WeightSource:
    """Open the files and read their headers. ModelLoadError if they are broken."""
    if checkpoint.kind == "gguf":
        return GGUFCheckpoint(checkpoint.path)
    return HuggingFaceFolder(checkpoint.path)


def weight_bytes(parameters: Sequence[Parameter], dtype: torch.dtype) -> int:
    """What the parameters take in memory."""
    return sum(math.prod(parameter.shape) for parameter in parameters) * dtype.itemsize


def load_parameters(
    source: WeightSource,
    parameters: Sequence[Parameter],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> dict[str, Tensor]:
    """The tensors by parameter name. `progress` gets the fraction of bytes done, 0 to 1."""
    _check_names_and_shapes(source, parameters)
    total, done = weight_bytes(parameters, dtype), 0
    weights: dict[str, Tensor] = {}
    for parameter in parameters:
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        start = 0
        for name, shape in parameter.parts:
            tensor[start : start + shape[0]].copy_(_as_tensor(source.read(name)))
            start += shape[0]
        weights[parameter.name] = tensor
        done += tensor.nbytes
        progress(done / total)
    return weights


def _as_tensor(values: NDArray[Any]) -> Tensor:
    if values.dtype == np.uint16:  # bfloat16 has no numpy type
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _check_names_and_shapes(source: WeightSource, parameters: Sequence[Parameter]) -> None:
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
