"""What is said of a model's formats, loaded or planned, in words and bytes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from runner import numpy_cpu

from streamkv.models.layers import plain_parameter
from streamkv.ops import Parameter
from streamkv.runner.formats import Matrix, ModelFormats


def test_formats_are_listed_with_those_of_most_matrices_first():
    matrices = {
        "table": Matrix(("Q8_0",), 1, "int8"),
        "a": Matrix(("Q4_K", "Q4_K", "Q6_K"), 1, "int8"),
        "b": Matrix(("Q4_K", "Q4_K"), 1, "int8"),
        "c": Matrix(("bfloat16",), 1, "float32"),
    }
    formats = ModelFormats(matrices, "bfloat16")
    assert formats.describe() == (
        "Q4_K + Q6_K + Q8_0 + bfloat16 weights, int8 + float32 inputs, bfloat16 KV"
    )


def test_loaded_weights_say_what_they_are():
    """Vectors have no format of their own."""
    quantized = numpy_cpu.QuantizedWeight(np.zeros((2, 32), np.float32), formats=("Q4_1", "Q4_1"))
    plain = numpy_cpu.PackedWeight(np.zeros((2, 4), np.float32))
    weights = {"q": quantized, "f": plain, "norm": np.ones(4, np.float32)}
    formats = ModelFormats.loaded(weights, "int8")
    assert formats.matrices == {
        "q": Matrix(("Q4_1", "Q4_1"), quantized.num_bytes, "int8"),
        "f": Matrix(("float32",), plain.num_bytes, "float32"),
    }
    assert formats.kv_dtype == "int8"


def test_planned_weights_have_the_bytes_of_their_parts():
    cpu = SimpleNamespace(
        PackedWeight=lambda dtype, *shape: SimpleNamespace(input_dtype=f"taken with {dtype}")
    )
    parameters = [
        Parameter("qkv", (96, 64), (("q", (64, 64)), ("k", (32, 64)))),
        plain_parameter("table", (10, 64)),
        plain_parameter("norm", (64,)),
    ]
    formats = {"qkv": ("Q4_1", "Q8_0"), "table": ("bfloat16",)}
    found = ModelFormats.planned(cpu, parameters, formats, "bfloat16")
    assert found.matrices == {
        "qkv": Matrix(("Q4_1", "Q8_0"), 64 * 2 * 20 + 32 * 2 * 34, "int8"),
        "table": Matrix(("bfloat16",), 10 * 64 * 2, "taken with bfloat16"),
    }
