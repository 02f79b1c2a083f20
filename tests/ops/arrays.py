"""Tensors as the native ops take and give them: numpy arrays, bfloat16 as its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamkv import _cpu

Array = NDArray[Any]


def to_array(x: Tensor) -> Array:
    if x.dtype is torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(np.uint16)
    return x.contiguous().numpy()


def to_tensor(x: Array) -> Tensor:
    """float32, or bfloat16 from its bits."""
    if x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def pack(weight: Tensor, *, is_paired: bool = False) -> _cpu.PackedWeight:
    """A weight of the tensor's dtype, float32 or bfloat16."""
    name = "bfloat16" if weight.dtype is torch.bfloat16 else "float32"
    packed = _cpu.PackedWeight(name, *weight.shape, is_paired)
    packed.pack(to_array(weight), 0)
    return packed


def to_inputs(x: Tensor, weight: _cpu.PackedWeight) -> Array:
    """x as the left side of a product with `weight`."""
    return to_array(x.bfloat16() if weight.input_dtype == "bfloat16" else x.float())
