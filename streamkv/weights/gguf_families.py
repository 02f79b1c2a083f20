"""The table of GGUF architectures: reading one more is a row here, and a model of models/.

Owns what llama.cpp calls the tensors of each, and what its converter did to them. Invariant: a
family here is computed as llama.cpp and the checkpoint it was converted from compute it; variants
that aren't are a ModelLoadError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelLoadError

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class Family(NamedTuple):
    """What is behind a value of general.architecture."""

    architecture: str  # of models.MODELS
    layer_names: Mapping[str, str] = LAYER_NAMES
    pairs_neighbours: bool = False  # in rotary embedding: the rows of Q and K are permuted for it


FAMILIES = {
    "llama": Family("LlamaForCausalLM", pairs_neighbours=True),  # and Mistral's models
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", LAYER_NAMES | HEAD_NORMS),
}


def family_of(metadata: Mapping[str, Any], path: Path) -> Family:
    """ModelLoadError for architectures and variants whose arithmetic is another."""
    name = metadata.get("general.architecture")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelLoadError(
            f"{path}: expected general.architecture to be one of {', '.join(FAMILIES)}, "
            f"got {name!r:.100}"
        )
    if metadata.get(f"{name}.expert_count", 0):
        raise ModelLoadError(f"{path}: mixture-of-experts models are not supported")
    window = metadata.get(f"{name}.attention.sliding_window", 0)
    if window:
        raise ModelLoadError(
            f"{path}: {name}.attention.sliding_window is {window!r:.100}, which is not supported; "
            "use the checkpoint that the file was made from"
        )
    return family


def huggingface_name(name: str, family: Family, path: Path) -> str:
    """The checkpoint name of a GGUF tensor. No two have the same: an unknown one is refused, even
    if it is called as the checkpoint would call it."""
    if match := LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        if part in family.layer_names:
            return f"model.layers.{layer}.{family.layer_names[part]}.{kind}"
    stem, _, kind = name.rpartition(".")
    if stem not in NAMES:
        raise ModelLoadError(
            f"{path}: tensor {name!r} is unexpected: the architecture has no such weight"
        )
    return f"{NAMES[stem]}.{kind}"
