"""While a model loads, memory holds it and little more, whatever its format.

The models are large enough that a second copy, as it is stored or as it is computed with, would be
too much.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import save_tiny_tokenizer, tiny_gguf_metadata
from weights.gguf_files import finish, stored

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HIDDEN, MLP, KV, VOCABULARY = 1024, 4096, 512, 16384
MARGIN_BYTES = 64 << 20  # rows in flight, a step's memory, the KV cache, the tokenizer
PROBE = """
import json, re, sys
from pathlib import Path
from streamkv.config import EngineConfig
from streamkv.engine.loading import build_model

def peak_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

options = json.loads(sys.argv[1])
if options.get("ops") == "reference":
    import torch
before = peak_bytes()
small = dict(num_gpu_blocks_override=4, max_num_batched_tokens=64, max_num_seqs=4, threads=1)
model = build_model(EngineConfig(device="cpu", **small, **options), None, None, lambda *_: None)
info = model.runner.load(lambda *_: None)
print(peak_bytes() - before, info.weight_bytes)
"""


def config_of(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HIDDEN // 64,
        "num_key_value_heads": KV // 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
    }


def shapes_of(num_layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name in a folder, name in a GGUF file, shape."""
    yield "model.embed_tokens", "token_embd", (VOCABULARY, HIDDEN)
    yield "lm_head", "output", (VOCABULARY, HIDDEN)
    yield "model.norm", "output_norm", (HIDDEN,)
    for layer in range(num_layers):
        for name, own, shape in (
            ("input_layernorm", "attn_norm", (HIDDEN,)),
            ("self_attn.q_proj", "attn_q", (HIDDEN, HIDDEN)),
            ("self_attn.k_proj", "attn_k", (KV, HIDDEN)),
            ("self_attn.v_proj", "attn_v", (KV, HIDDEN)),
            ("self_attn.o_proj", "attn_output", (HIDDEN, HIDDEN)),
            ("post_attention_layernorm", "ffn_norm", (HIDDEN,)),
            ("mlp.gate_proj", "ffn_gate", (MLP, HIDDEN)),
            ("mlp.up_proj", "ffn_up", (MLP, HIDDEN)),
            ("mlp.down_proj", "ffn_down", (HIDDEN, MLP)),
        ):
            yield f"model.layers.{layer}.{name}", f"blk.{layer}.{own}", shape


def save_folder(folder: Path, dtype: str, *, num_layers: int, num_shards: int = 1) -> Path:
    """Random weights of "BF16" or "F32"."""
    folder.mkdir()
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config_of(num_layers)))
    values = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(0.02)
    data = values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    shapes = [(f"{name}.weight", shape) for name, _, shape in shapes_of(num_layers)]
    weight_map = {}
    for shard in range(num_shards):
        own = shapes[shard::num_shards]
        file = f"part-{shard}.safetensors" if num_shards > 1 else "model.safetensors"
        save_safetensors(folder / file, own, dtype, data)
        weight_map |= {name: file for name, _ in own}
    if num_shards > 1:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def save_safetensors(path: Path, shapes: list[Any], dtype: str, data: np.ndarray) -> None:
    """With `data`, over and over."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes:
        start, end = end, end + int(np.prod(shape)) * data.itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, end, data.nbytes):
            file.write(data.tobytes()[: end - start])


def save_q4_k(path: Path, *, num_layers: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    config = config_of(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(num_layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = tiny_gguf_metadata()
    num_unused = VOCABULARY - len(tokens["tokenizer.ggml.tokens"])
    tokens["tokenizer.ggml.tokens"] += [f"unused{index}" for index in range(num_unused)]
    tokens["tokenizer.ggml.token_type"] += [5] * num_unused
    for key, value in tokens.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    blocks = {depth: stored(np.ones((64, depth)), "Q4_K") for depth in (HIDDEN, MLP)}
    for _, name, shape in shapes_of(num_layers):
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        rows = np.resize(blocks[shape[1]], (shape[0], blocks[shape[1]].shape[1]))
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    return finish(writer, path)


def check_peak(cache: Path, model: Path, *, largest_bytes: float, **options: Any) -> None:
    """That loading takes the model, at most its largest tensor as it is stored, and a margin."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps({"model": str(model), **options})],
        capture_output=True,
        text=True,
        env=os.environ | {"STREAMKV_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    peak_bytes, weight_bytes = map(int, done.stdout.split())
    assert weight_bytes <= peak_bytes <= weight_bytes + largest_bytes + MARGIN_BYTES


VALUES = VOCABULARY * HIDDEN  # of the largest tensor


def test_floats_as_they_are_and_quantized_meanwhile(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "BF16", num_layers=7)
    check_peak(tmp_path, folder, largest_bytes=2 * VALUES)
    check_peak(tmp_path, folder, largest_bytes=2 * VALUES, quantization="int4")
    assert list((tmp_path / "packed").iterdir())  # it was also written to the disk


def test_floats_in_several_files_narrowed_meanwhile(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "F32", num_layers=7, num_shards=3)
    check_peak(tmp_path, folder, largest_bytes=4 * VALUES)


def test_quantized_weights_of_a_gguf_file(tmp_path: Path) -> None:
    path = save_q4_k(tmp_path / "model.gguf", num_layers=14)
    check_peak(tmp_path, path, largest_bytes=VALUES * 144 / 256)


def test_tensors_of_torch(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "BF16", num_layers=3, num_shards=2)
    how = {"ops": "reference", "dtype": "float32"}
    check_peak(tmp_path, folder, largest_bytes=2 * VALUES, **how)
