"""What loading makes of a checkpoint: torch tensors, or the kernels' weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from streamkv.models import build_model, read_config
from streamkv.ops.extension import load_extension
from streamkv.weights.formats import packed_bytes, planned_formats
from streamkv.weights.hub import Checkpoint
from streamkv.weights.loader import load_packed, open_checkpoint
from streamkv.weights.torch_loader import load_parameters, weight_bytes

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path, "gguf" if path.suffix == ".gguf" else "huggingface")
    source = open_checkpoint(checkpoint)
    parameters = list(build_model(read_config(source.config)).parameters())
    fractions: list[float] = []
    try:
        weights = load_parameters(
            source, parameters, dtype=dtype, device=CPU, progress=fractions.append
        )
    finally:
        source.close()
    assert fractions == sorted(fractions) and fractions[-1] == 1
    assert sum(tensor.nbytes for tensor in weights.values()) == weight_bytes(parameters, dtype)
    return weights


def load_weights(path: Path, **how: Any) -> dict[str, Any]:
    """The kernels' own weights; `how` are more arguments of load_packed."""
    source = open_checkpoint(Checkpoint(path, "gguf" if path.suffix == ".gguf" else "huggingface"))
    parameters = list(build_model(read_config(source.config)).parameters())
    fractions: list[float] = []
    how = {"dtype": "float32", "num_threads": 2} | how
    weights = load_packed(load_extension(), source, parameters, progress=fractions.append, **how)
    formats = planned_formats(
        source, parameters, dtype=how["dtype"], quantization=how.get("quantization", "none")
    )
    source.close()
    assert fractions == sorted(fractions) and fractions[-1] == 1
    assert [*weights] == [parameter.name for parameter in parameters]
    num_bytes = 0
    for parameter in parameters:
        weight = weights[parameter.name]
        if len(parameter.shape) == 1:
            assert weight.dtype == np.float32 and weight.flags.owndata
            num_bytes += weight.nbytes
        else:
            assert formats_of(weight) == formats[parameter.name]
            assert weight.is_paired == parameter.is_paired
            num_bytes += weight.num_bytes
    assert num_bytes >= packed_bytes(parameters, formats) > 0.5 * num_bytes
    return weights


def formats_of(weight: Any) -> tuple[str, ...]:
    return tuple(weight.formats) if hasattr(weight, "formats") else (weight.dtype,)


def unpacked(path: Path, dtype: str, num_threads: int, **how: Any) -> dict[str, torch.Tensor]:
    """What the kernels' weights hold."""
    weights = load_weights(path, dtype=dtype, num_threads=num_threads, **how)
    return {
        name: torch.from_numpy(
            weight if isinstance(weight, np.ndarray) else weight.unpack(0, weight.num_outputs)
        )
        for name, weight in weights.items()
    }


def change_tensors(folder: Path, change) -> None:
    """Rewrite model.safetensors with `change` applied to its dict of tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
