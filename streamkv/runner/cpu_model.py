"""A model on the CPU, loaded: weights packed for the kernels, KV cache, threads.

Owns the order of loading and what of it is the operator's or the checkpoint's fault. Knows neither
steps nor rows, and no torch. Invariant: what is returned computed one token, and its logits were
numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..config import EngineConfig
from ..errors import ConfigError, ModelLoadError
from ..models import CausalLM, ModelConfig, build_model, read_config
from ..ops.cpu_count import num_usable_cores
from ..ops.extension import load_extension
from ..progress import Watch
from ..protocol import MASK_WAIT_S, MAX_SCORED, RunnerInfo
from ..weights.formats import QUANTIZED, Quantization, packed_bytes, planned_formats
from ..weights.hub import Checkpoint
from ..weights.jobs import progress_bar
from ..weights.loader import (
    PackedWeights,
    WeightSource,
    check_names_and_shapes,
    load_packed,
    opened_checkpoint,
)
from ..words import counted, format_bytes
from .fingerprint import kv_fingerprint
from .formats import ModelFormats
from .kv_cache import (
    CPU_LIMIT_BYTES,
    MemoryShare,
    available_memory_bytes,
    max_step_tokens,
    workspace_bytes,
)
from .kv_plan import KVCachePlan, flags_to_lower, plan_memory
from .measure import StepCosts
from .native_limits import check_native

DTYPES = {"auto": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}
# What a checkpoint may have for these to be kept though they were asked for.
KEPT = {"int8": {"Q8_0"}, "int4": {"Q4_0", "Q4_1", "Q4_K"}}


class CpuModel(NamedTuple):
    """All that a step needs but the rows. Whoever drops it gives the memory back."""

    cpu: ModuleType
    model: CausalLM
    plan: KVCachePlan
    team: Any  # _cpu.Team
    weights: PackedWeights
    cache: Any  # _cpu.KvCache
    masks: Any  # _cpu.MaskBoard
    dtype: str  # of weights that aren't quantized

    @property
    def formats(self) -> ModelFormats:
        return ModelFormats.loaded(self.weights, self.cache.dtype)

    def runner(self, config: EngineConfig, program: Any, logits_buffer: int) -> Any:
        """A _cpu.Runner of this model. `program` may be None, for the halves around a forward."""
        return self.cpu.Runner(
            program,
            self.team,
            self.cache,
            logits_buffer,
            num_rows=config.max_num_seqs,
            max_model_len=self.plan.max_model_len,
            vocab_size=self.model.config.vocab_size,
            max_tokens=max_step_tokens(config, self.plan.max_model_len),
            max_scored=MAX_SCORED,
            masks=self.masks,
            mask_wait_s=MASK_WAIT_S,
        )

    @contextlib.contextmanager
    def explained_step(self, config: EngineConfig) -> Iterator[None]:
        """What the extension raises where steps get their memory, and where one is tried, as what
        the operator can do about it."""
        try:
            yield
        except MemoryError as error:
            needed = format_bytes(workspace_bytes(config, self.model.config))
            raise ConfigError(
                f"the memory of the largest step (up to {needed}) can't be allocated: lower "
                f"--max-num-batched-tokens ({config.max_num_batched_tokens}), --max-num-seqs "
                f"({config.max_num_seqs}) or --max-model-len ({self.plan.max_model_len})"
            ) from error
        except ConfigError:
            raise
        except ValueError as error:
            raise unsupported(error) from error

    @property
    def host_slots(self) -> memoryview:
        """Their bytes, one after the other."""
        slots: NDArray[np.uint8] = self.cache.host_slots()
        return slots.reshape(-1).data

    def fingerprint(self) -> str:
        """What keys and values depend on besides the tokens."""
        facts = {
            "kernels": self.cpu.KERNEL_REVISION,
            "isa": self.cpu.isa(),
            "model": msgspec.to_builtins(self.model.config),
            "formats": msgspec.to_builtins(self.formats),
            "block_size": self.plan.block_size,
        }
        weights = {name: _buffers(weight) for name, weight in self.weights.items()}
        with _explained_threads(self.team.num_threads):
            return kv_fingerprint(facts, weights, self.team.num_threads)

    def info(self, ops: str, costs: StepCosts) -> RunnerInfo:
        num_threads = self.team.num_threads
        threads = counted(num_threads, "thread")
        return RunnerInfo(
            device="cpu",
            dtype=self.dtype,
            formats=self.formats.describe(),
            max_model_len=self.plan.max_model_len,
            vocab_size=self.model.config.vocab_size,
            block_size=self.plan.block_size,
            num_blocks=self.plan.num_blocks,
            kv_bytes_per_token=self.plan.block_bytes // self.plan.block_size,
            weight_bytes=sum(_num_bytes(weight) for weight in self.weights.values()),
            ops=f"{ops} ({self.cpu.isa()}, {threads})",
            num_host_slots=self.plan.num_host_slots,
            block_bytes=self.plan.block_bytes,
            copy_block_s=costs.copy_block_s,
            token_s=costs.token_s,
            full_model_len=self.plan.full_model_len,
            kv_bound=self.plan.bound,
        )


def load_cpu_model(
    config: EngineConfig, checkpoint: Checkpoint, share: MemoryShare, progress: Watch
) -> CpuModel:
    """Load weights, plan and take KV memory, from `share`.

    Raises ModelLoadError for what is wrong with the checkpoint and ConfigError for what is wrong
    with the wishes; what was reserved before that is the caller's to release.
    """
    cpu = load_extension(config.threads)
    num_threads = config.threads or num_usable_cores()
    share.measure(available_memory_bytes)
    progress("opening checkpoint", 0.0)
    with opened_checkpoint(checkpoint) as source:
        model = build_model(read_config(source.config))
        with (
            _explained("the weights", "use a smaller model or dtype"),
            _explained_threads(num_threads),
        ):
            weights = _load_weights(cpu, source, model, config, num_threads, share, progress)
    progress("allocating KV cache", 1.0)
    plan, cache = _take_kv_cache(cpu, config, model.config, share)
    progress("starting threads", 1.0)
    with _explained_threads(num_threads, has_only_threads=True):
        team = cpu.Team(num_threads)
    progress("preparing steps", 1.0)
    masks = cpu.MaskBoard(model.config.vocab_size)
    return CpuModel(cpu, model, plan, team, weights, cache, masks, DTYPES[config.dtype])


def _load_weights(
    cpu: ModuleType,
    source: WeightSource,
    model: CausalLM,
    config: EngineConfig,
    num_threads: int,
    share: MemoryShare,
    progress: Watch,
) -> PackedWeights:
    dtype, parameters = DTYPES[config.dtype], list(model.parameters())
    check_names_and_shapes(source, parameters)
    quantization = effective_quantization(config, source, model)
    formats = planned_formats(source, parameters, dtype=dtype, quantization=quantization)
    check_native(model, formats)
    num_bytes = packed_bytes(parameters, formats)
    share.reserve("weights", num_bytes)
    with progress_bar(num_bytes, "loading weights") as bar:

        def show(fraction: float) -> None:
            progress("loading weights", fraction)
            bar.update(int(fraction * num_bytes) - bar.n)

        return load_packed(
            cpu,
            source,
            parameters,
            dtype=dtype,
            quantization=quantization,
            packed_cache_gib=config.packed_cache_gib,
            num_threads=num_threads,
            progress=show,
        )


def effective_quantization(
    config: EngineConfig, source: WeightSource, model: CausalLM
) -> Quantization:
    """What to do with these weights: keep their formats (auto), make floats of them (none), or
    quantize floats. ConfigError for wishes that the checkpoint doesn't allow. Names were checked.
    """
    asked = config.quantization
    if asked == "none" or (asked == "auto" and config.dtype == "float32"):
        return "none"
    tables = (model.embed_tokens, model.lm_head)
    matrices = [one for one in model.parameters() if len(one.shape) == 2]
    stored = {one: {source.format(name) for name, _ in one.parts} for one in matrices}
    every = set().union(*stored.values())
    in_layers = set().union(*(stored[one] for one in matrices if one not in tables))
    if asked == "auto" or every.isdisjoint(QUANTIZED):
        return asked
    if in_layers <= KEPT[asked]:
        return "auto"
    raise ConfigError(
        f"--quantization {asked}: expected a checkpoint of floats, got one of "
        f"{' + '.join(sorted(every))}; leave --quantization out to keep what it has, or give the "
        "checkpoint it was made from"
    )


def kv_dtype_of(config: EngineConfig) -> str:
    """Of keys and values."""
    asked = config.kv_cache_dtype
    return DTYPES[config.dtype] if asked == "auto" else asked


def _take_kv_cache(
    cpu: ModuleType, config: EngineConfig, model_config: ModelConfig, share: MemoryShare
) -> tuple[KVCachePlan, Any]:
    def allocate(num_blocks: int, num_host_slots: int = 0) -> Any:
        return cpu.KvCache(  # pages are committed when a block is first written
            kv_dtype_of(config),
            num_blocks,
            model_config.num_hidden_layers,
            model_config.num_key_value_heads,
            config.block_size,
            model_config.head_dim,
            num_host_slots,
        )

    with _explained("a KV block", f"lower --block-size ({config.block_size})"):
        block_bytes = allocate(1).block_bytes
    plan = plan_memory(
        config,
        model_config,
        block_bytes=block_bytes,
        free_bytes=share.free_bytes,
        held_back_bytes=share.held_back_bytes,
        limit_bytes=CPU_LIMIT_BYTES,
    )
    share.reserve("host slots", plan.host_bytes)
    # One block, and as many as --num-gpu-blocks-override says, are given whatever is left.
    share.reserve("KV cache", plan.num_bytes, overcommit=True)
    what = f"{counted(plan.num_blocks, 'KV block')} ({format_bytes(plan.num_bytes)})"
    if plan.num_host_slots:
        what += f" and {plan.num_host_slots:,} in host memory ({format_bytes(plan.host_bytes)})"
    with _explained(what, f"lower {flags_to_lower(config)}"):
        return plan, allocate(plan.num_blocks, plan.num_host_slots)


@contextlib.contextmanager
def _explained(what: str, remedy: str) -> Iterator[None]:
    """What the extension raises, as what the operator can do about it."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(f"{what} can't be allocated: {remedy}") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise unsupported(error) from error


@contextlib.contextmanager
def _explained_threads(num_threads: int, *, has_only_threads: bool = False) -> Iterator[None]:
    """What is raised where the system grants no more threads, or no memory for them
    (`has_only_threads`: memory is for nothing else), as what the operator can do about it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_about_threads = "can't start new thread" in str(error)  # Python's words, and the team's
        if not has_only_threads and not is_about_threads:
            raise
        raise ConfigError(
            f"{counted(num_threads, 'thread')} can't be started ({error}): lower --threads "
            f"({num_threads}), or let the system grant more threads and memory"
        ) from error


def unsupported(error: ValueError) -> ModelLoadError:
    """What to raise for sizes that the kernels refuse."""
    return ModelLoadError(f"the kernels can't run this model: {error}; try --ops reference")


def one_token(cpu: ModuleType) -> Any:
    """A Batch of token 0 at the first slot: what is computed to see whether a model works."""
    zero = np.zeros(1, np.int32)
    return cpu.Batch(zero, zero, zero, np.array([0, 1], np.int32), zero + 1, zero[:, None], zero)


def check_finite(checkpoint: Checkpoint, logits: NDArray[np.float32]) -> None:
    """Raise unless the logits of `one_token` are numbers. (A broken embedding of another token
    fails its rows.)"""
    if not np.isfinite(logits).all():
        raise ModelLoadError(
            f"{checkpoint.path}: the weights are broken: expected finite logits for token 0, got "
            "NaN or infinity; get the checkpoint again"
        )


def _buffers(weight: Any) -> list[memoryview]:
    """The bytes of a PackedWeight, a QuantizedWeight or an array."""
    arrays = [weight] if isinstance(weight, np.ndarray) else weight.buffers()
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]


def _num_bytes(weight: Any) -> int:
    """Of a PackedWeight or an array."""
    return int(weight.nbytes if isinstance(weight, np.ndarray) else weight.num_bytes)
