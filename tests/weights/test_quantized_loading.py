"""Quantized weights: as a file has them, and made of floats while they are loaded."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from tiny import save_tiny_checkpoint
from weights.gguf_files import QUANTIZED, save_gguf
from weights.loading import (
    assert_equal,
    change_tensors,
    formats_of,
    load,
    load_weights,
    unpacked,
)

from streamkv.errors import ConfigError
from streamkv.ops.extension import load_extension
from streamkv.weights import loader, reading


def kind_of(name: str) -> str:
    """`model.layers.1.mlp.up_proj.weight` -> `up_proj`."""
    return name.split(".")[-2]


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A model whose matrices fill the blocks of every format, with heads that fill no panels."""
    path = tmp_path_factory.mktemp("wide")
    return save_tiny_checkpoint(
        path, hidden_size=256, intermediate_size=256, num_attention_heads=8, head_dim=96
    )


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_quantized_matrices_of_a_gguf_file_are_packed_as_it_has_them(
    tmp_path, monkeypatch, wide_folder, type_name
):
    monkeypatch.setattr(reading, "CHUNK_VALUES", 64 * 256)
    monkeypatch.setattr(loader, "JOB_VALUES", 192 * 256)
    path = save_gguf(wide_folder, tmp_path / "model.gguf", type_of=lambda name: type_name)
    expected = load(path)  # its values as float32
    assert_equal(unpacked(path, "bfloat16", 3, quantization="auto"), expected)
    rounded = {
        name: tensor.bfloat16().float() if tensor.ndim == 2 else tensor
        for name, tensor in expected.items()
    }
    assert_equal(unpacked(path, "bfloat16", 3, quantization="none"), rounded)
    weights = load_weights(path, quantization="auto")
    assert formats_of(weights["model.layers.0.self_attn.qkv_proj.weight"]) == (type_name,) * 3
    assert formats_of(weights["model.embed_tokens.weight"]) == (type_name,)


def test_parts_of_a_fused_matrix_may_differ_and_floats_among_them_become_q8_0(tmp_path):
    types = {"q_proj": "Q4_K", "k_proj": "F32", "v_proj": "Q6_K", "gate_proj": "Q5_0"}
    types |= {"up_proj": "BF16", "down_proj": "Q4_1", "o_proj": "F16"}
    folder = save_tiny_checkpoint(
        tmp_path, hidden_size=256, num_key_value_heads=2, tie_word_embeddings=False
    )
    path = save_gguf(
        folder, tmp_path / "model.gguf", type_of=lambda name: types.get(kind_of(name), "Q8_0")
    )
    weights = load_weights(path, dtype="bfloat16", quantization="auto")
    assert {
        kind_of(name): formats_of(weight)
        for name, weight in weights.items()
        if not isinstance(weight, np.ndarray)
    } == {
        "embed_tokens": ("Q8_0",),
        "qkv_proj": ("Q4_K", "Q8_0", "Q6_K"),
        "o_proj": ("bfloat16",),
        "gate_up_proj": ("Q5_0", "Q8_0"),
        "down_proj": ("Q4_1",),
        "lm_head": ("Q8_0",),
    }
    expected = load(path)
    for name, first, end in (("self_attn.qkv_proj", 256, 384), ("mlp.gate_up_proj", 64, 128)):
        tensor = expected[f"model.layers.1.{name}.weight"]
        tensor[first:end] = torch.from_numpy(through("Q8_0", tensor[first:end].numpy()))
    name = "self_attn.o_proj.weight"
    for layer in (0, 1):
        rounded = expected[f"model.layers.{layer}.{name}"].bfloat16().float()
        expected[f"model.layers.{layer}.{name}"] = rounded
    found = {
        name: weight if isinstance(weight, np.ndarray) else weight.unpack(0, weight.num_outputs)
        for name, weight in weights.items()
    }
    for name in found:
        if "layers.0" not in name or "_proj" not in name:
            assert np.array_equal(found[name], expected[name].numpy()), name


def through(format_name: str, values: np.ndarray) -> np.ndarray:
    """What is left of values that are quantized."""
    rows = load_extension().quantize(np.ascontiguousarray(values), format_name)
    if format_name == "int8":
        return rows[:, :4].copy().view(np.float32) * rows[:, 4:].view(np.int8)
    return dequantize(rows, gguf.GGMLQuantizationType[format_name])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_floats_are_quantized_when_it_is_asked_for(tmp_path, monkeypatch, quantization, stored):
    monkeypatch.setattr(reading, "CHUNK_VALUES", 64 * 64)
    monkeypatch.setattr(loader, "JOB_VALUES", 128 * 64)
    # 48 values are no whole blocks: such matrices have eight bits in any case
    folder = save_tiny_checkpoint(tmp_path, hidden_size=48, head_dim=16, tie_word_embeddings=False)
    change_tensors(
        folder, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()})
    )
    expected = {}
    for name, tensor in load(folder).items():
        if tensor.ndim == 2:
            fits = quantization == "int4" and kind_of(name) in ("o_proj", "down_proj")
            tensor = torch.from_numpy(through("Q4_1" if fits else "int8", tensor.numpy()))
        expected[name] = tensor
    assert_equal(unpacked(folder, "float32", 3, quantization=quantization), expected)


def test_four_bits_are_for_layers_and_eight_for_the_vocabulary(tmp_path):
    folder = save_tiny_checkpoint(tmp_path, tie_word_embeddings=False)
    weights = load_weights(folder, quantization="int4")
    assert formats_of(weights["model.embed_tokens.weight"]) == ("int8",)
    assert formats_of(weights["lm_head.weight"]) == ("int8",)
    assert formats_of(weights["model.layers.0.self_attn.qkv_proj.weight"]) == ("Q4_1",) * 3
    weights = load_weights(folder, quantization="auto", dtype="bfloat16")
    assert formats_of(weights["lm_head.weight"]) == ("bfloat16",)  # no format but the file's


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(("factor", "why"), [(1e-8, "too small"), (1e6, "too large")])
def test_values_whose_scales_float16_lacks_are_refused_by_name(tmp_path, factor, why):
    folder = save_tiny_checkpoint(tmp_path)
    change_tensors(folder, lambda tensors: tensors[DOWN].mul_(factor))
    with pytest.raises(ConfigError) as caught:
        load_weights(folder, quantization="int4")
    message = str(caught.value)
    assert DOWN in message and why in message and "use --quantization int8" in message
    exact = load(folder)[DOWN]
    found = unpacked(folder, "float32", 2, quantization="int8")[DOWN]
    assert (found - exact).abs().max() <= exact.abs().max() / 127

    path = save_gguf(
        folder,
        tmp_path / "model.gguf",
        type_of=lambda name: "Q8_0" if kind_of(name) == "gate_proj" else "F32",
    )
    load_weights(path, quantization="auto")  # a matrix of its own stays what it is


def test_floats_beside_quantized_parts_are_refused_with_another_remedy(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    up = DOWN.replace("down", "up")
    change_tensors(folder, lambda tensors: tensors[up].mul_(1e-9))
    path = save_gguf(
        folder,
        tmp_path / "model.gguf",
        type_of=lambda name: "Q8_0" if kind_of(name) == "gate_proj" else "F32",
    )
    with pytest.raises(ConfigError, match=f"{up}.*use --quantization none"):
        load_weights(path, quantization="auto")
    load_weights(path, quantization="none")


def test_rows_that_count_for_nothing_may_be_too_small(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)

    def fade(tensors):
        tensors[DOWN][3] *= 1e-7
        tensors[DOWN][4] *= 1e-30
        tensors[DOWN][5] = 0

    change_tensors(folder, fade)
    exact = load(folder)[DOWN]
    found = unpacked(folder, "float32", 2, quantization="int4")[DOWN]
    assert (found - exact).abs()[3:6].max() < 1e-6 * exact.abs().max()


def test_a_broken_checkpoint_stays_one(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)

    def spoil(tensors):
        tensors[DOWN][3, 5] = float("nan")

    change_tensors(folder, spoil)
    assert unpacked(folder, "float32", 2, quantization="int4")[DOWN].isnan().sum() == 32
