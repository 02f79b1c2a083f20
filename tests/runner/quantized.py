"""Tiny models of quantized weights: a .gguf file, and a folder of the floats it stands for.

The oracle of what blocks mean is the `gguf` package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tiny import save_tiny_checkpoint

from streamkv.weights.hub import Checkpoint

Array = NDArray[np.float32]
Blocks = NDArray[np.uint8]

SUPER = 256  # values in a block of a K format


class Quantized(NamedTuple):
    checkpoint: Checkpoint  # the .gguf file
    folder: Path  # the same values as float32


def save_quantized_checkpoint(
    path: Path, format_of: Callable[[str], str], **config: object
) -> Quantized:
    """A tiny model whose matrices have the formats that `format_of` gives by name; "F32": as they
    are. `config` as for save_tiny_checkpoint."""
    folder = save_tiny_checkpoint(path / "floats", **config)
    tensors = load_file(folder / "model.safetensors")
    blocks: dict[str, Blocks] = {}
    random = np.random.default_rng(1)
    for name, values in tensors.items():
        if values.ndim == 1:  # of norms, all 1: rows of the table would be quantized at halves
            tensors[name] = random.uniform(0.8, 1.2, values.shape).astype(np.float32)
        own = format_of(name) if values.ndim == 2 else "F32"
        if own != "F32":
            blocks[name] = quantize(values, own)
            kind = GGMLQuantizationType[own]
            tensors[name] = gguf.quants.dequantize(blocks[name], kind).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = path / "quantized.gguf"
    _write(file, json.loads((folder / "config.json").read_text()), tensors, blocks, format_of)
    return Quantized(Checkpoint(file, "gguf"), folder)


def quantize(values: Array, name: str) -> Blocks:
    """Rows of blocks. K formats, which the package can't make, have other values of about the same
    size: the model is a random one anyway."""
    if name in ("Q4_K", "Q5_K", "Q6_K"):
        return _random_super_blocks(values, name)
    return gguf.quants.quantize(values, GGMLQuantizationType[name])


def _random_super_blocks(values: Array, name: str) -> Blocks:
    """Values of zero mean, uniformly distributed, as large as `values`."""
    num_rows, depth = values.shape
    random = np.random.default_rng(num_rows + depth)
    _, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (num_rows * depth // SUPER, block_bytes), np.uint8)
    greatest = 2 * float(values.std())
    if name == "Q6_K":
        blocks[:, 192:208] = random.integers(60, 127, (len(blocks), 16), np.uint8)
        blocks[:, 208:210] = _halves(len(blocks), greatest / (32 * 127))
        return blocks.reshape(num_rows, -1)
    bits = {"Q4_K": 4, "Q5_K": 5}[name]
    scale = greatest / (2 ** (bits - 1) * 63)
    blocks[:, 0:2] = _halves(len(blocks), scale)
    blocks[:, 2:4] = _halves(len(blocks), scale * (2**bits - 1) / 2)
    blocks[:, 8:12] = blocks[:, 4:8]  # minima are as large as scales
    blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    return blocks.reshape(num_rows, -1)


def _halves(count: int, value: float) -> Blocks:
    return np.full((count, 1), value, np.float16).view(np.uint8)


def _write(
    path: Path,
    config: dict[str, int],
    tensors: dict[str, Array],
    blocks: dict[str, Blocks],
    format_of: Callable[[str], str],
) -> None:
    """As llama.cpp's converter would."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {
        ".q_proj.": config["num_attention_heads"],
        ".k_proj.": config["num_key_value_heads"],
    }
    for name, values in tensors.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        rows = blocks.get(name, values)
        for projection, num_heads in heads.items():
            if projection in name:  # its rotary pairs are neighbours
                halves = rows.reshape(num_heads, 2, -1, rows.shape[1])
                rows = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
        kind = GGMLQuantizationType[format_of(name)] if name in blocks else None
        writer.add_tensor(own, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
