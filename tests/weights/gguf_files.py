"""GGUF files for tests, written by the gguf package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.torch import load_file

MADE_BY_GGUF = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
RANDOM = ("Q4_K", "Q5_K", "Q6_K")  # the package can't quantize to these
FAMILIES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
QUANTIZED = (*MADE_BY_GGUF[3:], *RANDOM)
# Where in a block its float16 scales are: the other bytes may be any.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def stored(values: np.ndarray, type_name: str) -> np.ndarray:
    """What a file has for `values`, or in K formats for others of that shape: the type's bytes, or
    a narrower float."""
    if type_name not in RANDOM:
        return quantize(values, gguf.GGMLQuantizationType[type_name])
    block_size, type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    *outer, depth = values.shape
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.size // block_size, type_size), np.uint8)
    for start in SCALES[type_name]:
        scales = rng.uniform(-0.01, 0.01, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(*outer, depth // block_size * type_size)


def write_gguf(path: Path, *, metadata=None, tensors=None, alignment: int | None = None) -> Path:
    """`tensors` maps a name to (values, type name)."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, (value, value_type) in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType[value_type])
    for name, (values, type_name) in (tensors or {}).items():
        tensor_type = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, stored(values, type_name), raw_dtype=tensor_type)
    return finish(writer, path)


def save_gguf(
    folder: Path,
    path: Path,
    *,
    tensors=None,
    type_of: Callable[[str], str] = lambda name: "F32",
    more: Mapping[str, Any] = MappingProxyType({}),
    **metadata,
) -> Path:
    """The folder's model as llama.cpp's converter would write it, matrices in the types that
    `type_of` gives for their names in the folder, and `tensors`. `more` are metadata by their own
    names."""
    config = json.loads((folder / "config.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    family = FAMILIES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[family])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if "tokenizer.ggml.tokens" not in more:
        writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    for key, value in more.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for key, value in metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_string
        add(key.replace("__", "."), value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    names = gguf.get_tensor_name_map(family, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        for projection, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads)):
            if f".{projection}." in name and family is gguf.MODEL_ARCH.LLAMA:
                halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape).copy()
        type_name = type_of(name) if values.ndim > 1 else "F32"
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            stored(values, type_name),
            raw_dtype=gguf.GGMLQuantizationType[type_name],
        )
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
