"""`streamkv info`: a model in words and numbers, before it is served.

Owns what is said. Reads a checkpoint's headers; loads weights only to measure (`--profile`).
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import msgspec

from .bench.options import InfoConfig
from .bench.profile import (
    Profiled,
    Step,
    check_memory,
    check_steps,
    print_profile,
    profile,
    steps_of,
)
from .config import EngineConfig
from .engine.loading import read_text_side
from .errors import ConfigError, ModelLoadError
from .models import CausalLM, ModelConfig, build_model, read_config
from .ops.cpu_count import num_usable_cores
from .ops.extension import load_extension, tuning_in_use
from .progress import unwatched
from .runner.cost import describe
from .runner.cpu_model import DTYPES, effective_quantization, kv_dtype_of, load_cpu_model
from .runner.formats import ModelFormats
from .runner.inputs import resolve_inputs
from .runner.kv_cache import (
    CPU_LIMIT_BYTES,
    MemoryShare,
    available_memory_bytes,
    kv_token_bytes,
)
from .runner.kv_plan import plan_kv_cache, plan_memory
from .runner.native_limits import check_native
from .runner.program import ProgramSpec
from .runner.recorder import Recorder, build_program
from .runner.select import check_config, runs_on_torch
from .weights.formats import Formats, Quantization, packed_bytes, planned_formats
from .weights.hub import Checkpoint, checkpoint_of
from .weights.loader import WeightSource, check_names_and_shapes, opened_checkpoint
from .words import counted, format_bytes


def print_info(engine_config: EngineConfig, options: InfoConfig, given: Container[str] = ()) -> int:
    """Facts about the model, then what the options ask for. Returns the exit code. Fields of
    `options` that weren't `given` fit themselves to the model's context."""
    check_config(engine_config)
    if options.profile:
        check_profiled(engine_config)
    on_torch = runs_on_torch(engine_config)
    checkpoint = checkpoint_of(engine_config)
    with opened_checkpoint(checkpoint) as source:
        model = build_model(read_config(source.config))
        formats = formats_of(engine_config, source, model, on_torch=on_torch)
    max_model_len = context_of(engine_config, model.config)
    if options.program or options.profile:
        options = fitting(options, given, max_model_len)
        check_steps(options, max_model_len)
    said = facts(checkpoint, model, formats, engine_config)
    if not on_torch:
        said |= kv_facts(engine_config, model, formats)
        said |= native_facts(model, formats)
    said |= text_facts(checkpoint, engine_config)
    for name, value in said.items():
        print(f"{name:16} {value}")
    if options.program:
        planned = ModelFormats.planned(
            load_extension(engine_config.threads),
            model.parameters(),
            formats,
            kv_dtype_of(engine_config),
        )
        recorded = Recorder(max_model_len=max_model_len).record(model)
        spec = resolve_inputs(recorded, planned.matrices)
        for step in steps_of(options):
            print()
            print(describe_step(spec, step, planned))
    if options.profile:
        print()
        print_measured(engine_config, checkpoint, options)
    return 0


def formats_of(
    config: EngineConfig, source: WeightSource, model: CausalLM, *, on_torch: bool
) -> Formats:
    """Of each matrix, as it would be loaded."""
    parameters = list(model.parameters())
    check_names_and_shapes(source, parameters)
    quantization: Quantization = "none"
    if not on_torch:
        quantization = effective_quantization(config, source, model)
    return planned_formats(
        source, parameters, dtype=DTYPES[config.dtype], quantization=quantization
    )


def check_profiled(config: EngineConfig) -> None:
    """ConfigError where something else than what is profiled was asked for."""
    asked = {
        "--ops reference": config.ops == "reference",
        "--enforce-eager": config.enforce_eager,
        "--device cuda": config.device == "cuda",
    }
    for flag, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"--profile: a profile is of the native program on the CPU; leave {flag} out"
            )


def context_of(config: EngineConfig, model: ModelConfig) -> int:
    """The tokens that a sequence may have here, if memory suffices. ConfigError as in `serve`."""
    plan = plan_kv_cache(
        free_bytes=1 << 62,
        limit_bytes=None,
        kv_memory_bytes=config.kv_cache_memory_bytes,
        block_bytes=config.block_size * kv_bytes_of(config, model),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_context_len=model.max_context_len,
        num_blocks_override=config.num_gpu_blocks_override,
    )
    return plan.max_model_len


def kv_bytes_of(config: EngineConfig, model: ModelConfig) -> int:
    """Of a token, in all layers."""
    in_layer = kv_token_bytes(model.num_key_value_heads, model.head_dim, kv_dtype_of(config))
    return model.num_hidden_layers * in_layer


def fitting(options: InfoConfig, given: Container[str], max_model_len: int) -> InfoConfig:
    """With the defaults no longer than the context."""
    shorter: dict[str, Any] = {}
    if "context" not in given:
        shorter["context"] = min(options.context, max_model_len)
    if "prompt_len" not in given:
        shorter["prompt_len"] = tuple(min(n, max_model_len) for n in options.prompt_len)
    return msgspec.structs.replace(options, **shorter)


def facts(
    checkpoint: Checkpoint,
    model: CausalLM,
    formats: Formats,
    engine_config: EngineConfig,
) -> dict[str, str]:
    config, parameters = model.config, list(model.parameters())
    num_parameters = sum(math.prod(parameter.shape) for parameter in parameters)
    kv_dtype = kv_dtype_of(engine_config)
    num_bytes = packed_bytes(parameters, formats)
    heads = f"{config.num_attention_heads} heads / {config.num_key_value_heads} KV heads"
    cpu = load_extension(engine_config.threads)
    planned = ModelFormats.planned(cpu, parameters, formats, kv_dtype)
    others = [isa for isa in cpu.available_isas() if isa != cpu.isa()]
    also = f" (this CPU also runs: {', '.join(others)})" if others else ""
    return {
        "checkpoint": f"{checkpoint.path} ({checkpoint.kind})",
        "architecture": config.architecture,
        "parameters": f"{num_parameters:,}",
        "layers": f"{config.num_hidden_layers}, hidden {config.hidden_size}, "
        f"{heads} of {config.head_dim}, MLP {config.intermediate_size}",
        "vocabulary": f"{config.vocab_size:,}",
        "context": describe_context(engine_config, config),
        "weights": f"{num_bytes / 2**20:,.1f} MiB as {planned.weights}",
        "inputs": f"{planned.inputs} in products with them",
        "KV cache": f"{kv_bytes_of(engine_config, config):,} bytes a token as {kv_dtype}",
        "threads": str(engine_config.threads or num_usable_cores()),
        "instruction set": f"{cpu.isa()}{also}",
        "tuning": tuning_in_use().describe(),
    }


def kv_facts(config: EngineConfig, model: CausalLM, formats: Formats) -> dict[str, str]:
    """Where KV would be if it were loaded now, on the CPU, or what keeps it from that."""
    share = MemoryShare(config, None)
    try:
        share.measure(available_memory_bytes)
        share.reserve("weights", packed_bytes(list(model.parameters()), formats))
        plan = plan_memory(
            config,
            model.config,
            block_bytes=config.block_size * kv_bytes_of(config, model.config),
            free_bytes=share.free_bytes,
            held_back_bytes=share.held_back_bytes,
            limit_bytes=CPU_LIMIT_BYTES,
        )
    except ConfigError as error:
        return {"KV blocks": f"serve would refuse: {error.message}"}
    num_tokens = plan.num_blocks * plan.block_size
    host = f"{counted(plan.num_host_slots, 'block')} ({format_bytes(plan.host_bytes)})"
    disk = f"up to {format_bytes(int(config.kv_cache_disk * 2**30))} in {config.kv_cache_dir}"
    return {
        "KV blocks": f"{plan.num_blocks:,} of {plan.block_size} tokens "
        f"({format_bytes(plan.num_bytes)}): {num_tokens:,} tokens, "
        f"{num_tokens / plan.max_model_len:,.1f} sequences of {plan.max_model_len:,}"
        f"{plan.bound and '; '}{plan.bound}",
        "KV host slots": host if plan.num_host_slots else "none: see --swap-space",
        "KV on disk": disk if config.kv_cache_dir else "none: see --kv-cache-dir",
    }


def native_facts(model: CausalLM, formats: Formats) -> dict[str, str]:
    """What keeps it from running where `serve` would run it, if anything does."""
    try:
        check_native(model, formats)
    except ModelLoadError as error:
        return {"kernels": f"serve would refuse the model: {error}"}
    return {}


def describe_context(engine_config: EngineConfig, model: ModelConfig) -> str:
    longest, context = model.max_position_embeddings, context_of(engine_config, model)
    text = f"{context:,} tokens"
    if context < longest:
        text += f" of the checkpoint's {longest:,}"
    if model.max_context_len < longest:
        text += f"; no more than the {model.sliding_window:,} that its layers attend to"
    return text


def text_facts(checkpoint: Checkpoint, engine_config: EngineConfig) -> dict[str, str]:
    """What it has besides weights, or what keeps a server from using that."""
    try:
        tokenizer, defaults = read_text_side(engine_config, checkpoint)
    except ModelLoadError as error:
        return {"tokenizer": f"serve would refuse the model: {error}"}
    ends = (f"{tokenizer.token_text(i)} ({i})" for i in sorted(tokenizer.eos_token_ids))
    has_template = tokenizer.chat_template is not None
    return {
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens",
        "chat template": "yes" if has_template else "none: chats need --chat-template",
        "end tokens": ", ".join(ends) or "none: texts end by their length alone",
        "sampling": ", ".join(f"{name} {value}" for name, value in defaults.items())
        or "the API's defaults",
    }


def describe_step(spec: ProgramSpec, step: Step, formats: ModelFormats) -> str:
    return describe(
        spec,
        num_tokens=step.num_tokens,
        num_logit_rows=len(step.rows),
        context=max(context for _, context in step.rows),
        formats=formats,
    )


def print_measured(
    engine_config: EngineConfig, checkpoint: Checkpoint, options: InfoConfig
) -> None:
    """Load the model as the engine does, and profile its program."""
    share = MemoryShare(engine_config, None)
    try:
        loaded = load_cpu_model(engine_config, checkpoint, share, unwatched)
        plan, steps = loaded.plan, steps_of(options)
        for step in steps:
            if step.num_blocks(plan.block_size) > plan.num_blocks:
                raise ConfigError(
                    f"{step.name}: needs {step.num_blocks(plan.block_size)} KV blocks, the cache "
                    f"has {plan.num_blocks}; ask for less with --decode-rows, --context or "
                    "--prompt-len"
                )
        recorded = Recorder(max_model_len=plan.max_model_len).record(loaded.model)
        spec = resolve_inputs(recorded, loaded.weights)
        check_memory(spec, steps, share.free_bytes)
        program = build_program(spec, loaded.weights, loaded.cache)
        program.reserve(max(s.num_tokens for s in steps), max(len(s.rows) for s in steps))
        profiled = Profiled(
            loaded.cpu,
            loaded.team,
            spec,
            program,
            loaded.formats,
            loaded.model.config.vocab_size,
            plan.block_size,
        )
        measured = profile(profiled, steps, options.rounds)
        details = {
            "config": msgspec.to_builtins(engine_config),
            "formats": loaded.formats.describe(),
            "isa": loaded.cpu.isa(),
            "tuning": tuning_in_use()._asdict(),
        }
        title = f"{engine_config.model_id}, {loaded.formats.describe()}, {loaded.cpu.isa()}"
        print_profile("profile", title, measured, details)
    finally:
        share.release()
