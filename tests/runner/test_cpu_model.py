"""What becomes of the wishes about formats, by what the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from streamkv import _cpu
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError, ModelLoadError
from streamkv.models import build_model, read_config
from streamkv.runner.cpu_model import effective_quantization, kv_dtype_of
from streamkv.runner.native_limits import check_native

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODEL = build_model(read_config(CONFIG))


def found(config: dict[str, Any], layers: str, tables: str, v_proj: str = "") -> str:
    """What is done with a checkpoint of such formats."""

    def format_of(name: str) -> str:
        if "embed" in name or "lm_head" in name:
            return tables
        return v_proj if v_proj and "v_proj" in name else layers

    source: Any = SimpleNamespace(format=format_of)
    return effective_quantization(EngineConfig(**config), source, MODEL)


@pytest.mark.parametrize("layers", ["F32", "BF16", "Q4_1", "Q8_0"])
def test_floats_are_made_of_everything_that_is_to_be_float32(layers):
    assert found({}, layers, layers) == "auto"
    assert found({"dtype": "bfloat16"}, layers, layers) == "auto"
    assert found({"dtype": "float32"}, layers, layers) == "none"
    assert found({"quantization": "none"}, layers, layers) == "none"


@pytest.mark.parametrize("asked", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_checkpoint_of_floats_is_quantized_if_that_was_asked_for(asked, dtype):
    config = {"quantization": asked, "dtype": dtype}
    assert found(config, "BF16", "F16") == asked


@pytest.mark.parametrize(
    ("asked", "layers", "tables", "v_proj"),
    [
        ("int4", "Q4_0", "Q4_0", ""),
        ("int4", "Q4_1", "Q8_0", ""),
        ("int4", "Q4_K", "F16", "Q4_1"),
        ("int8", "Q8_0", "Q8_0", ""),
        ("int8", "Q8_0", "F16", ""),
    ],
)
def test_what_a_checkpoint_has_is_kept_if_just_that_was_asked_for(asked, layers, tables, v_proj):
    assert found({"quantization": asked}, layers, tables, v_proj) == "auto"


@pytest.mark.parametrize(
    ("asked", "layers", "tables", "v_proj", "named"),
    [
        ("int8", "Q4_1", "Q8_0", "", "Q4_1 + Q8_0"),
        ("int4", "Q8_0", "Q8_0", "", "Q8_0"),
        ("int4", "Q4_K", "Q6_K", "Q6_K", "Q4_K + Q6_K"),
        ("int8", "Q8_0", "Q8_0", "F16", "F16 + Q8_0"),  # half of it would be something else
        ("int4", "F16", "Q4_0", "", "F16 + Q4_0"),
    ],
)
def test_quantized_weights_are_not_quantized_again(asked, layers, tables, v_proj, named):
    with pytest.raises(ConfigError) as caught:
        found({"quantization": asked}, layers, tables, v_proj)
    assert f"--quantization {asked}: expected a checkpoint of floats" in caught.value.message
    assert f"got one of {named};" in caught.value.message


@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        ("auto", "auto", "bfloat16"),
        ("float32", "auto", "float32"),
        ("float32", "int8", "int8"),
        ("auto", "float32", "float32"),
    ],
)
def test_keys_and_values_have_the_models_dtype_or_what_was_asked_for(dtype, asked, expected):
    assert kv_dtype_of(EngineConfig(dtype=dtype, kv_cache_dtype=asked)) == expected


def refuses(make: Callable[[], object]) -> bool:
    try:
        make()
    except (ValueError, ModelLoadError):
        return True
    return False


@pytest.mark.parametrize("head_dim", [2, 8, 16, 24, 80, 100, 256, 264, 272, 512])
def test_head_sizes_are_refused_where_the_extension_refuses_them(head_dim):
    model = build_model(read_config(CONFIG | {"head_dim": head_dim}))
    formats = dict.fromkeys((one.name for one in model.parameters()), ("bfloat16",))
    refused = refuses(lambda: _cpu.KvCache("bfloat16", 1, 1, 1, 16, head_dim))
    assert refuses(lambda: check_native(model, formats)) == refused


@pytest.mark.parametrize("depth", [1, 2, 33, 34])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8"])
def test_depths_are_refused_where_the_extension_refuses_them(depth, kind):
    sizes = {"hidden_size": depth, "head_dim": 16}
    model = build_model(read_config(CONFIG | sizes))
    formats = {one.name: (kind,) * len(one.parts) for one in model.parameters()}
    refused = refuses(
        lambda: (
            _cpu.QuantizedWeight([kind], [10], depth)
            if kind == "int8"
            else _cpu.PackedWeight(kind, 10, depth)
        )
    )
    assert refuses(lambda: check_native(model, formats)) == refused
