"""The table of architectures: adding a model is one file and one row here.

Model files compute through `ops.Ops` only and never import torch.
"""

from __future__ import annotations

from ..errors import ModelLoadError
from .config import ModelConfig
from .llama import LlamaForCausalLM

MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
}

__all__ = ["MODELS", "ModelConfig", "build_model"]


def build_model(config: ModelConfig) -> LlamaForCausalLM:
    """The model of `config.architecture`, without weights. ModelLoadError if there is none."""
    model_class = MODELS.get(config.architecture)
    if model_class is None:
        raise ModelLoadError(
            f"model config: architecture {config.architecture!r:.100} is not supported; "
            f"supported: {', '.join(MODELS)}"
        )
    return model_class(config)
