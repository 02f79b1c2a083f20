"""streamkv: an async LLM serving engine that streams tokens to many clients at once.

Public names are imported on first use, so that `import streamkv` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig, ServerConfig
    from .engine.async_engine import AsyncEngine
    from .engine.beam_output import BeamSearchOutput, BeamSearchParams
    from .engine.llm import LLM
    from .engine.llm_prompts import TextPrompt, TokensPrompt
    from .engine.request_output import CompletionOutput, Logprob, RequestOutput
    from .engine.stream import TokenDelta, TokenStream
    from .protocol import FinishReason, SamplingParams

__version__ = "0.1.0"

_EXPORTS = {
    "AsyncEngine": "engine.async_engine",
    "BeamSearchOutput": "engine.beam_output",
    "BeamSearchParams": "engine.beam_output",
    "CompletionOutput": "engine.request_output",
    "EngineConfig": "config",
    "FinishReason": "protocol",
    "LLM": "engine.llm",
    "Logprob": "engine.request_output",
    "RequestOutput": "engine.request_output",
    "SamplingParams": "protocol",
    "ServerConfig": "config",
    "TextPrompt": "engine.llm_prompts",
    "TokenDelta": "engine.stream",
    "TokenStream": "engine.stream",
    "TokensPrompt": "engine.llm_prompts",
}
# Names of vLLM's that scripts import, and what to do instead.
_NOT_HERE = {
    **dict.fromkeys(("EngineArgs", "AsyncEngineArgs"), "LLM and AsyncEngine take options by name"),
    **dict.fromkeys(("AsyncLLMEngine", "LLMEngine"), "AsyncEngine streams, LLM takes batches"),
    **dict.fromkeys(("PoolingParams", "PoolingRequestOutput"), "models here generate text"),
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "FinishReason",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ServerConfig",
    "TextPrompt",
    "TokenDelta",
    "TokenStream",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    if name in _NOT_HERE:  # `from streamkv import …` would hide an AttributeError's words
        raise ImportError(f"streamkv has no {name}, which vLLM has: {_NOT_HERE[name]}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
