"""From a checkpoint to the weights of a model's parameters, as torch tensors on any device.

Owns the cast and the fusion; what is read and checked is loader.py's. Invariant: as there, and
besides the model a few rows of one tensor are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..ops import Parameter
from .loader import WeightSource, check_names_and_shapes


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
    check_names_and_shapes(source, parameters)
    total, done = weight_bytes(parameters, dtype), 0
    weights: dict[str, Tensor] = {}
    for parameter in parameters:
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        start = 0
        for name, _ in parameter.parts:
            for chunk in source.chunks(name):
                tensor[start : start + len(chunk)].copy_(_as_tensor(chunk))
                start += len(chunk)
                del chunk  # before the next one is read
        weights[parameter.name] = tensor
        done += tensor.nbytes
        progress(done / total)
    source.check_unchanged()
    return weights


def _as_tensor(values: NDArray[Any]) -> Tensor:
    if values.dtype == np.uint16:  # bfloat16 has no numpy type
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
