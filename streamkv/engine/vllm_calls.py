"""What vLLM's `LLM` can be asked for that is not done here, so that scripts are told by name.

Owns the arguments of its `generate` and `chat`, its methods and attributes, and what to do instead.
Knows no engine. Invariant: what asks for nothing is taken; what asks for something is refused in
one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequestError
from ..vllm_options import GENERATES

# Arguments, and what asks for nothing besides None.
ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "chat_template_content_format": ("auto", "string"),
    "guided_options_request": (),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "prompt_adapter_request": (),
    "tokenization_kwargs": ({},),
}

_WEIGHTS_STAY = "weights and KV stay in memory: close it, and make another when it is needed"
_NO_ENGINE = "`info` has the facts of the model, `get_tokenizer` its tokenizer"
_NO_MODULE = "the model is no module of torch"
_ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), GENERATES),
    **dict.fromkeys(("sleep", "wake_up"), _WEIGHTS_STAY),
    **dict.fromkeys(("llm_engine", "model_config"), _NO_ENGINE),
    **dict.fromkeys(("apply_model", "collective_rpc"), _NO_MODULE),
    **dict.fromkeys(
        ("start_profile", "stop_profile"), "`streamkv info --profile` says where time goes"
    ),
    "get_metrics": "each output has its own `metrics`",
    "reset_prefix_cache": "prompts with another cache_salt share nothing with what was cached: "
    "{'prompt': …, 'cache_salt': …}; or enable_prefix_caching=False",
    "set_tokenizer": "LLM(…, tokenizer=…) names one",
    "preprocess_chat": "get_tokenizer().apply_chat_template makes prompts",
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """InvalidRequestError for what asks for something; TypeError for what nobody knows."""
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise TypeError(f"expected an argument that LLM or vLLM knows, got {name}")
        if value is not None and value not in ARGUMENTS[name]:
            raise InvalidRequestError(
                f"{name}: expected None, got {value!r:.100}; it is not supported: leave it out",
                param=name,
            )


def no_attribute(name: str) -> AttributeError:
    """For a name that LLM doesn't have."""
    if name in _ATTRIBUTES:
        return AttributeError(f"LLM has no {name}, which vLLM's has: {_ATTRIBUTES[name]}")
    return AttributeError(f"LLM has no attribute {name!r}")
