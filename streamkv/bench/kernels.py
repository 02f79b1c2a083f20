"""`streamkv bench kernels`: every kernel as part of a model, beside the machine's limits.

The model has random weights, so nothing is downloaded; its ops run one after another as in a real
one, so that weights come from memory and activations from a cache. The machine's limits are
measured in the same rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from ..errors import ConfigError
from ..models import ModelConfig, build_model, read_config
from ..ops import Parameter
from ..ops.cpu_count import num_usable_cores
from ..ops.extension import load_extension, tuning_in_use
from ..runner.formats import ModelFormats
from ..runner.inputs import resolve_inputs
from ..runner.kv_cache import MAX_SLOTS, available_memory_bytes
from ..runner.recorder import Recorder, build_program
from .options import KernelsConfig
from .profile import (
    Profiled,
    Step,
    check_memory,
    check_steps,
    print_profile,
    profile,
    steps_of,
)

BLOCK_SIZE = 16
PANEL = 32  # outputs; quantized weights are packed by whole ones
SHAPES = {
    "small": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
    },
    "large": {  # a few of its layers are more than caches hold
        "hidden_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "tie_word_embeddings": False,
    },
}


def model_config(shape: str) -> ModelConfig:
    return read_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "head_dim": 64,
            **SHAPES[shape],
        }
    )


def planned_formats(
    cpu: ModuleType, parameters: Iterable[Parameter], options: KernelsConfig
) -> ModelFormats:
    name = options.dtype if options.weight_format == "none" else options.weight_format
    kv_dtype = options.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    matrices = [one for one in parameters if len(one.shape) == 2]
    is_float = options.weight_format == "none"
    formats = {one.name: (name,) if is_float else (name,) * len(one.parts) for one in matrices}
    return ModelFormats.planned(cpu, matrices, formats, kv_dtype)


def random_weights(
    cpu: ModuleType, parameters: Iterable[Parameter], dtype: str, weight_format: str, team: Any
) -> dict[str, Any]:
    """Matrices share their numbers: how fast they are multiplied doesn't depend on them."""
    source = np.random.default_rng(0)
    numbers = (0.02 * source.standard_normal(1 << 20)).astype(np.float32)
    weights: dict[str, Any] = {}
    arena = cpu.WeightArena()
    for parameter in parameters:
        if len(parameter.shape) == 1:
            weights[parameter.name] = np.ones(parameter.shape, np.float32)
            continue
        outputs, depth = parameter.shape
        rows = numbers[: numbers.size // depth * depth].reshape(-1, depth)
        weights[parameter.name] = (
            _floats(cpu, parameter, dtype, rows, arena, team)
            if weight_format == "none"
            else _quantized(cpu, parameter, weight_format, rows, arena, team)
        )
    return weights


def _floats(
    cpu: ModuleType, parameter: Parameter, dtype: str, rows: Any, arena: Any, team: Any
) -> Any:
    outputs, depth = parameter.shape
    packed = cpu.PackedWeight(dtype, outputs, depth, parameter.is_paired, arena)
    for first in range(0, outputs, len(rows)):
        packed.pack(rows[: outputs - first], first, team)
    return packed


def _quantized(
    cpu: ModuleType, parameter: Parameter, weight_format: str, rows: Any, arena: Any, team: Any
) -> Any:
    outputs = [shape[0] for _, shape in parameter.parts]
    formats = [weight_format] * len(outputs)
    depth = parameter.shape[1]
    weight = cpu.QuantizedWeight(formats, outputs, depth, parameter.is_paired, arena)
    blocks = cpu.quantize(rows[: len(rows) // PANEL * PANEL], weight_format)
    for part, count in enumerate(outputs):
        for first in range(0, count, len(blocks)):
            weight.pack(blocks[: count - first], part, first, team)
    return weight


def build(cpu: ModuleType, options: KernelsConfig, steps: list[Step]) -> Profiled:
    """The program of a model of random weights, with room for the steps."""
    model = build_model(model_config(options.shape))
    config = model.config
    check_steps(options, config.max_position_embeddings)
    planned = planned_formats(cpu, model.parameters(), options)
    recorded = Recorder(max_model_len=config.max_position_embeddings).record(model)
    spec = resolve_inputs(recorded, planned.matrices)
    check_memory(spec, steps, available_memory_bytes())
    num_blocks = max(step.num_blocks(BLOCK_SIZE) for step in steps)
    if num_blocks * BLOCK_SIZE > MAX_SLOTS:
        raise ConfigError(
            f"--decode-rows: expected at most {MAX_SLOTS} tokens of context in all rows together, "
            f"got {num_blocks * BLOCK_SIZE}"
        )
    team = cpu.Team(options.threads or num_usable_cores())
    weights = random_weights(cpu, model.parameters(), options.dtype, options.weight_format, team)
    cache = cpu.KvCache(
        planned.kv_dtype,
        num_blocks,
        config.num_hidden_layers,
        config.num_key_value_heads,
        BLOCK_SIZE,
        config.head_dim,
    )
    program = build_program(spec, weights, cache)
    program.reserve(max(s.num_tokens for s in steps), max(len(s.rows) for s in steps))
    return Profiled(
        cpu,
        team,
        spec,
        program,
        ModelFormats.loaded(weights, cache.dtype),
        config.vocab_size,
        BLOCK_SIZE,
    )


def extension(isa: str, num_threads: int = 0) -> ModuleType:
    """With the instruction set of `--isa`, whatever the environment says; empty: as elsewhere."""
    if not isa:
        return load_extension(num_threads)
    name = "STREAMKV_CPU_ISA"
    before, os.environ[name] = os.environ.get(name), isa
    try:
        return load_extension(num_threads)
    except ConfigError as error:
        raise ConfigError(str(error).replace(name, "--isa")) from None
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def bench_kernels(options: KernelsConfig) -> int:
    cpu = extension(options.isa, options.threads)
    steps = steps_of(options)
    profiled = build(cpu, options, steps)
    measured = profile(profiled, steps, options.rounds)
    details = {
        "config": msgspec.to_builtins(options),
        "isa": cpu.isa(),
        "tuning": tuning_in_use()._asdict(),
    }
    title = f"{options.shape}, {profiled.formats.describe()}, {cpu.isa()}"
    print_profile("kernels", title, measured, details)
    return 0
