"""In which formats a model's numbers are kept, and in how many bytes: in words and for the costs.

Owns what is said of weights that are loaded and of weights that are planned, in one shape. Knows no
kernels and no files. Invariant: what is said of loaded weights is what they are, not what was asked
for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from ..ops import Parameter
from ..weights.formats import Formats, is_quantized, parameter_bytes


class Matrix(NamedTuple):
    """One matrix, loaded or planned. A `TakesInputs`."""

    formats: tuple[str, ...]  # of its parts: "Q4_1", "int8"; of a float one its dtype
    num_bytes: int
    input_dtype: str


class ModelFormats(NamedTuple):
    """Of all matrices, by parameter name, and of the KV cache."""

    matrices: Mapping[str, Matrix]
    kv_dtype: str

    @property
    def weights(self) -> str:
        """ "Q4_1 + Q8_0", those of most matrices first."""
        return _listed(matrix.formats for matrix in self.matrices.values())

    @property
    def inputs(self) -> str:
        """What products take: "int8"."""
        return _listed((matrix.input_dtype,) for matrix in self.matrices.values())

    def describe(self) -> str:
        """ "Q4_1 + Q8_0 weights, int8 inputs, bfloat16 KV"."""
        return f"{self.weights} weights, {self.inputs} inputs, {self.kv_dtype} KV"

    @classmethod
    def loaded(cls, weights: Mapping[str, Any], kv_dtype: str) -> ModelFormats:
        """Of `_cpu.PackedWeight`s and `_cpu.QuantizedWeight`s; vectors among them don't count."""
        matrices = {
            name: Matrix(_formats_of(weight), weight.num_bytes, weight.input_dtype)
            for name, weight in weights.items()
            if hasattr(weight, "input_dtype")
        }
        return cls(matrices, kv_dtype)

    @classmethod
    def planned(
        cls,
        cpu: ModuleType,
        parameters: Iterable[Parameter],
        formats: Formats,
        kv_dtype: str,
    ) -> ModelFormats:
        """Of what would be loaded in formats that were chosen."""
        matrices = {
            one.name: _planned(cpu, one, formats) for one in parameters if len(one.shape) == 2
        }
        return cls(matrices, kv_dtype)


def _planned(cpu: ModuleType, parameter: Parameter, formats: Formats) -> Matrix:
    input_dtype, own = "int8", formats[parameter.name]
    if not is_quantized(parameter, formats):  # then it's up to the instruction set
        input_dtype = cpu.PackedWeight(own[0], 1, 2).input_dtype
    return Matrix(tuple(own), parameter_bytes(parameter, formats), input_dtype)


def _formats_of(weight: Any) -> tuple[str, ...]:
    return tuple(weight.formats) if hasattr(weight, "formats") else (weight.dtype,)


def _listed(names: Iterable[tuple[str, ...]]) -> str:
    counts = Counter(name for own in names for name in dict.fromkeys(own))
    return " + ".join(sorted(counts, key=lambda name: (-counts[name], name)))
