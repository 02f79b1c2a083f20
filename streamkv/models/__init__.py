"""The table of architectures: adding a model is one file and one row here.

Model files compute through `ops.Ops` only and never import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelLoadError
from .config import ModelConfig, read_architecture
from .decoder import CausalLM
from .llama import LlamaForCausalLM
from .mistral import MistralForCausalLM
from .qwen2 import Qwen2ForCausalLM
from .qwen3 import Qwen3ForCausalLM

MODELS: Mapping[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}

__all__ = ["MODELS", "CausalLM", "ModelConfig", "build_model", "read_config"]


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """The facts in the content of a config.json. ModelLoadError names the key at fault."""
    architecture = read_architecture(config)
    if architecture not in MODELS:
        raise ModelLoadError(
            f"model config: architecture {architecture!r:.100} is not supported; "
            f"supported: {', '.join(MODELS)}"
        )
    return MODELS[architecture].read_config(config)


def build_model(config: ModelConfig) -> CausalLM:
    """The model that has these facts, without weights."""
    return MODELS[config.architecture](config)
