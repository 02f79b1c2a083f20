"""What is read from a config.json: transformers' defaults, windows, and what is refused."""

from __future__ import annotations

import pytest
import transformers

from streamkv.errors import ModelLoadError
from streamkv.models import MODELS, ModelConfig, read_config

SIZES = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


def config_dict(name: str = "LlamaForCausalLM", **changes) -> dict:
    """As transformers writes it."""
    config = getattr(transformers, name).config_class(**SIZES, num_attention_heads=32)
    return config.to_dict() | {"architectures": [name]} | changes


def bare_config(name: str, **fields) -> dict:
    """No more than has no default."""
    return {"architectures": [name], "num_attention_heads": 32} | SIZES | fields


@pytest.mark.parametrize("name", MODELS)
def test_a_key_that_is_missing_means_what_it_means_to_transformers(name):
    assert read_config(bare_config(name)) == read_config(config_dict(name))


@pytest.mark.parametrize(
    ("name", "fields", "window"),
    [
        ("LlamaForCausalLM", {"sliding_window": 512}, None),
        ("MistralForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {"sliding_window": 512}, 512),
        ("Qwen2ForCausalLM", {"sliding_window": 512}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 512, "max_window_layers": 1}, None),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, None),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, None),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2}, 4096),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
            512,
        ),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
            None,
        ),
    ],
)
def test_the_window_is_that_of_transformers_layers(name, fields, window):
    assert read_config(bare_config(name, **fields)).sliding_window == window
    config = getattr(transformers, name).config_class(**(SIZES | fields), num_attention_heads=32)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        assert (config.sliding_window if "sliding_attention" in kinds else None) == window
        saved = config.to_dict() | {"architectures": [name]}  # with the layers' kinds
        assert read_config(saved).sliding_window == window


def test_a_context_is_as_long_as_positions_and_window_allow():
    def longest(**fields) -> int:
        return read_config(bare_config("MistralForCausalLM", **fields)).max_context_len

    assert longest(max_position_embeddings=8192, sliding_window=None) == 8192
    assert longest(max_position_embeddings=8192, sliding_window=512) == 512
    assert longest(max_position_embeddings=256, sliding_window=512) == 256


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 1024}


def test_a_window_does_not_change_the_rotary_embedding():
    """The factor that a config leaves out follows from its positions, whatever is used of them."""

    def read(window: int | None) -> ModelConfig:
        fields = {"max_position_embeddings": 8192, "rope_parameters": YARN}
        return read_config(bare_config("MistralForCausalLM", sliding_window=window, **fields))

    assert read(512).rope == read(None).rope


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"head_dim": 100_000_000}, "head_dim to be a whole number from 1 to 4096, got 100000000"),
        ({"head_dim": None, "num_attention_heads": 1, "hidden_size": 2**31 - 2}, "head_dim"),
        ({"num_attention_heads": 2**20, "num_key_value_heads": 1}, "num_attention_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_a_config_that_cannot_be_computed_exactly_is_refused(changes, message):
    with pytest.raises(ModelLoadError) as caught:
        read_config(config_dict(**changes))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window"),
        ("Qwen2ForCausalLM", {"use_sliding_window": 1}, "use_sliding_window"),
        ("Qwen2ForCausalLM", {"max_window_layers": -1}, "max_window_layers"),
        ("Qwen3ForCausalLM", {"layer_types": ["chunked_attention"]}, "layer_types"),
        ("Qwen3ForCausalLM", {"layer_types": "full_attention"}, "layer_types"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"]}, "use_sliding_window"),
        ("Qwen3ForCausalLM", {"attention_bias": "yes"}, "attention_bias"),
    ],
)
def test_a_window_or_switch_that_makes_no_sense_is_refused(name, changes, message):
    with pytest.raises(ModelLoadError, match=f"expected {message} to be") as caught:
        read_config(bare_config(name, **changes))
    assert "\n" not in caught.value.message


def test_rope_theta_is_read_where_old_and_new_configs_keep_it():
    old = config_dict(rope_theta=5e5)
    del old["rope_parameters"]
    new = config_dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_config(old) == read_config(new)
    assert read_config(old).rope.theta == 5e5
