"""What a checkpoint recommends for requests that leave a field out: temperature, top_p and others.

Owns where that is written: generation_config.json, or a GGUF file's general.sampling keys. Knows
nothing about requests. Invariant: what is found makes valid SamplingParams; what wouldn't is a
ModelLoadError that names the key.

As in vLLM a value counts as it is written, whatever `do_sample` says, which is about the default of
transformers' own `generate`; null is not there; `max_new_tokens` is `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidRequestError, ModelLoadError
from ..files import read_object_if_any
from ..protocol import SamplingParams

GENERATION_CONFIG = "generation_config.json"
FOLDER_KEYS = {  # field of SamplingParams -> key
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

SamplingDefaults = Mapping[str, Any]
"""Fields of SamplingParams and their values; those that the checkpoint doesn't name are absent."""


def folder_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Those of a folder in Hugging Face format. ModelLoadError."""
    file = folder / GENERATION_CONFIG
    return _checked(read_object_if_any(file), FOLDER_KEYS, file)


def gguf_sampling_defaults(metadata: Mapping[str, Any], path: Path) -> SamplingDefaults:
    """Those of a GGUF file. ModelLoadError."""
    return _checked(metadata, GGUF_KEYS, path, _as_written)


def _as_written(value: Any) -> Any:
    """0.6, which was rounded to a float32, and not what that is as a double."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _checked(
    values: Mapping[str, Any],
    keys: Mapping[str, str],
    path: Path,
    convert: Callable[[Any], Any] = lambda value: value,
) -> SamplingDefaults:
    """One by one, so that an error names the key."""
    found: dict[str, Any] = {}
    for field, key in keys.items():
        if values.get(key) is None:
            continue
        value = convert(values[key])
        try:
            SamplingParams(**{field: value})
        except InvalidRequestError as error:
            raise ModelLoadError(
                f"{path}: {key}: {error.message.partition(': ')[2]:.100}; mend the file, or use "
                "--generation-config vllm, which leaves it unread"
            ) from None
        found[field] = value
    return found
