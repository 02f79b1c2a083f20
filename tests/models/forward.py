"""The model of a folder in plain torch: logits at every position."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from streamkv.models import CausalLM, build_model, read_config
from streamkv.ops import Batch
from streamkv.ops.reference import REFERENCE
from streamkv.runner.torch_ops import TorchOps


def build(folder: Path, dtype: torch.dtype) -> tuple[CausalLM, dict[str, torch.Tensor]]:
    """The model of a folder, and its tensors by parameter name."""
    model = build_model(read_config(json.loads((folder / "config.json").read_text())))
    tensors = load_file(folder / "model.safetensors")
    weights = {
        parameter.name: torch.cat([tensors[name] for name, _ in parameter.parts]).to(dtype)
        for parameter in model.parameters()
    }
    return model, weights


def all_logits(
    folder: Path,
    token_ids: torch.Tensor,
    chunks: list[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits of every position, [T, vocab_size], computed in chunks through scattered blocks."""
    model, weights = build(folder, dtype)
    config, block_size = model.config, 4
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    shape = (40, config.num_hidden_layers, 2, config.num_key_value_heads, 4, config.head_dim)
    kv_cache = torch.full(shape, float("nan"), dtype=dtype)
    ops = TorchOps(REFERENCE, weights, kv_cache, max_model_len=50)
    found = []
    for start, end in zip([0, *chunks], [*chunks, len(token_ids)], strict=True):
        positions = torch.arange(start, end, dtype=torch.int32)
        batch = Batch(
            token_ids=token_ids[start:end].int(),
            positions=positions,
            slots=blocks[positions // block_size] * block_size + positions % block_size,
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=blocks[None, : -(-end // block_size)].contiguous(),
            logit_rows=positions - start,
        )
        found.append(model.logits(ops, model.forward(ops, batch)))
    return torch.cat(found)
