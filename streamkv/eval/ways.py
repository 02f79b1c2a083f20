"""The ways to run a model that an evaluation tries, as configurations.

Owns which there are. Knows no weights: whether a checkpoint allows one shows when it is loaded.
"""

from __future__ import annotations

import itertools

import msgspec

from ..config import EngineConfig
from .options import NOTHING, SAME, EvalConfig

EVERY_QUANTIZATION = ("auto", "none", "int8", "int4")
EVERY_KV_CACHE_DTYPE = ("auto", "int8")


def ways_of(config: EngineConfig, options: EvalConfig) -> list[EngineConfig]:
    """The model in each combination of what was asked for, and other checkpoints in the formats
    that they have."""
    every = options.compare
    quantizations = options.quantization or (
        EVERY_QUANTIZATION if every else (config.quantization,)
    )
    kv_cache_dtypes = options.kv_cache_dtype or (
        EVERY_KV_CACHE_DTYPE if every else (config.kv_cache_dtype,)
    )
    models = [
        *((config.model, quantization) for quantization in quantizations),
        *((model, "auto") for model in options.also),
    ]
    return [
        msgspec.structs.replace(
            config, model=model, dtype=dtype, quantization=quantization, kv_cache_dtype=kv
        )
        for dtype, (model, quantization), kv in itertools.product(
            options.dtype or (config.dtype,), models, kv_cache_dtypes
        )
    ]


def reference_of(config: EngineConfig, options: EvalConfig) -> EngineConfig | None:
    """What the others are compared with: float32 throughout. None: nothing."""
    if options.against == NOTHING:
        return None
    model = config.model if options.against == SAME else options.against
    return msgspec.structs.replace(
        config, model=model, dtype="float32", quantization="auto", kv_cache_dtype="auto"
    )
