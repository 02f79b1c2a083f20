"""TorchRunner: StepInput to StepOutput over torch, on any device it knows.

The GPU's runner, and on a CPU the oracle of the native one (`--ops reference`). Owns the weights,
the KV cache and the rows of one model, and its share of the memory budget. Knows nothing of
requests, text or scheduling. Every method is called on the device thread. Invariant: a step never
raises, and after a failed one the rows are as the next StepInput expects them.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from .. import _cpu
from ..config import EngineConfig
from ..errors import ConfigError, ModelLoadError, StreamkvError
from ..models import CausalLM, ModelConfig, build_model, read_config
from ..ops import Batch
from ..ops.reference import REFERENCE
from ..protocol import (
    MASK_WAIT_S,
    BlockStore,
    CopyKind,
    MaskBoard,
    RowLogprobs,
    RunnerInfo,
    StepInput,
    StepOutput,
)
from ..weights.hub import Checkpoint
from ..weights.loader import opened_checkpoint
from ..weights.torch_loader import load_parameters, weight_bytes
from ..words import counted, format_bytes
from .block_store import open_block_store
from .fingerprint import kv_fingerprint
from .kv_cache import (
    CPU_LIMIT_BYTES,
    MemoryBudget,
    MemoryShare,
    available_memory_bytes,
    max_step_tokens,
)
from .kv_plan import KVCachePlan, flags_to_lower, plan_memory
from .measure import measure_costs
from .rows import Rows
from .sampler import score
from .torch_ops import TorchOps
from .torch_sampling import SampledRows, sample_rows

logger = logging.getLogger(__name__)

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class _Loaded(NamedTuple):
    """What `load` builds and `close` drops, as one."""

    model: CausalLM
    ops: TorchOps
    kv_cache: Tensor
    host_slots: Tensor  # uint8 [num_host_slots, block_bytes]
    rows: Rows


class _Computed(NamedTuple):
    """What a step gives."""

    sampled: SampledRows
    scored: tuple[RowLogprobs, ...]

    @classmethod
    def nothing(cls) -> _Computed:
        return cls(SampledRows.none(), ())


@dataclass
class _Copied:
    """What a step has copied so far: it is told though the step fails."""

    done: bytes = b""
    seconds: float = 0.0


class TorchRunner:
    """Runs one checkpoint. `budget` is shared by the models of a process; None: one of its own."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, budget: MemoryBudget | None = None
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._share = MemoryShare(config, budget)
        self._loaded: _Loaded | None = None
        self.store: BlockStore | None = None
        self.masks: MaskBoard | None = None
        self._device = torch.device("cpu")

    def load(self, progress: Callable[[str, float], None]) -> RunnerInfo:
        """Load weights, plan and take KV memory.

        Raises ModelLoadError for what is wrong with the checkpoint and ConfigError for what is
        wrong with the wishes; memory taken before that is given back.
        """
        try:
            return self._load(progress)
        except BaseException:
            self.close()
            raise

    def step(self, step: StepInput) -> StepOutput:
        """Run one step; what goes wrong is `error` in the output."""
        started = time.perf_counter()
        copied = _Copied()
        try:
            sampled, scored = self._run(step, copied)
        except Exception as exc:
            logger.exception("step %d failed", step.step_id)
            reason = str(exc) if isinstance(exc, StreamkvError) else f"{type(exc).__name__}: {exc}"
            return StepOutput(
                step_id=step.step_id,
                sampled=b"",
                error=" ".join(reason.split()),
                duration_s=time.perf_counter() - started,
                copies_done=copied.done,
                copies_s=copied.seconds,
            )
        return StepOutput(
            step_id=step.step_id,
            sampled=sampled.token_ids.tobytes(),
            logprobs=sampled.logprobs,
            failed=sampled.failed.tobytes(),
            duration_s=time.perf_counter() - started,
            copies_done=copied.done,
            copies_s=copied.seconds,
            deferred=sampled.deferred.tobytes(),
            scored=scored,
        )

    def close(self) -> None:
        """Give back all memory, once the store has written what it was given; idempotent."""
        if self.store is not None:
            self.store.close()
        self.store = self.masks = None
        self._loaded = None
        self._share.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, progress: Callable[[str, float], None]) -> RunnerInfo:
        config, dtype = self._config, DTYPES[self._config.dtype]
        self._device = _select_device(config)
        if config.threads:
            torch.set_num_threads(config.threads)
        self._share.measure(self._available_bytes)
        progress("opening checkpoint", 0.0)
        with opened_checkpoint(self._checkpoint) as source:
            model = build_model(read_config(source.config))
            self._share.reserve("weights", weight_bytes(list(model.parameters()), dtype))
            weights = load_parameters(
                source,
                list(model.parameters()),
                dtype=dtype,
                device=self._device,
                progress=lambda fraction: progress("loading weights", fraction),
            )
        progress("allocating KV cache", 1.0)
        is_gpu = self._device.type == "cuda"
        plan = plan_memory(
            config,
            model.config,
            block_bytes=_block_bytes(config, model.config, dtype),
            free_bytes=self._share.free_bytes,
            held_back_bytes=self._share.held_back_bytes,
            limit_bytes=None if is_gpu else CPU_LIMIT_BYTES,
            host_free_bytes=available_memory_bytes() if is_gpu else None,
        )
        self._share.reserve("host slots", 0 if is_gpu else plan.host_bytes)
        # One block, and as many as --num-gpu-blocks-override says, are given whatever is left.
        self._share.reserve("KV cache", plan.num_bytes, overcommit=True)
        kv_cache = self._allocate_kv_cache(model.config, plan, dtype)
        host_slots = self._allocate_host_slots(plan)
        ops = TorchOps(REFERENCE, weights, kv_cache, max_model_len=plan.max_model_len)
        self._try_out(model, ops)
        self.masks = masks = _cpu.MaskBoard(model.config.vocab_size)
        rows = _build_rows(config, plan, model.config, masks)
        self._loaded = _Loaded(model, ops, kv_cache, host_slots, rows)
        costs = measure_costs(self.step, plan, max_step_tokens(config, plan.max_model_len))
        slots = host_slots.flatten().numpy().data
        self.store = open_block_store(
            config, plan, slots, lambda: self._fingerprint(model.config, weights, plan)
        )
        name = str(dtype).removeprefix("torch.")
        info = RunnerInfo(
            device=str(self._device),
            dtype=name,
            formats=f"{name} weights, {name} inputs, {name} KV",
            max_model_len=plan.max_model_len,
            vocab_size=model.config.vocab_size,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            kv_bytes_per_token=plan.block_bytes // plan.block_size,
            weight_bytes=sum(tensor.nbytes for tensor in weights.values()),
            ops=REFERENCE.describe(),
            num_host_slots=plan.num_host_slots,
            block_bytes=plan.block_bytes,
            copy_block_s=costs.copy_block_s,
            token_s=costs.token_s,
            full_model_len=plan.full_model_len,
            kv_bound=plan.bound,
        )
        logger.debug("loaded %s: %s", config.model_id, info)
        return info

    def _available_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return available_memory_bytes()

    def _allocate_kv_cache(
        self, model_config: ModelConfig, plan: KVCachePlan, dtype: torch.dtype
    ) -> Tensor:
        """Not cleared: on a CPU pages are committed when a block is first written."""
        shape = (
            plan.num_blocks,
            model_config.num_hidden_layers,
            2,
            model_config.num_key_value_heads,
            plan.block_size,
            model_config.head_dim,
        )
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except RuntimeError as exc:
            raise ConfigError(
                f"{counted(plan.num_blocks, 'KV block')} ({format_bytes(plan.num_bytes)}) can't be "
                f"allocated: lower {flags_to_lower(self._config)} ({' '.join(str(exc).split())})"
            ) from exc

    def _allocate_host_slots(self, plan: KVCachePlan) -> Tensor:
        """For a GPU pinned, so that copies needn't wait; else committed when first written."""
        try:
            return torch.empty(
                (plan.num_host_slots, plan.block_bytes),
                dtype=torch.uint8,
                pin_memory=self._device.type == "cuda" and plan.num_host_slots > 0,
            )
        except RuntimeError as exc:
            has_swap = self._config.swap_space > 0
            remedy = "lower --swap-space" if has_swap else "leave out --kv-cache-dir"
            raise ConfigError(
                f"{counted(plan.num_host_slots, 'KV block')} in host memory "
                f"({format_bytes(plan.host_bytes)}) can't be allocated: {remedy} "
                f"({' '.join(str(exc).split())})"
            ) from exc

    def _fingerprint(
        self, model_config: ModelConfig, weights: Mapping[str, Tensor], plan: KVCachePlan
    ) -> str:
        """What keys and values depend on besides the tokens."""
        on_gpu = self._device.type == "cuda"
        facts = {
            "kernels": REFERENCE.describe(),
            "device": torch.cuda.get_device_name(self._device) if on_gpu else platform.machine(),
            "model": msgspec.to_builtins(model_config),
            "dtype": str(DTYPES[self._config.dtype]),
            "block_size": plan.block_size,
        }
        buffers = {
            name: [tensor.cpu().flatten().view(torch.uint8).numpy().data]
            for name, tensor in weights.items()
        }
        return kv_fingerprint(facts, buffers, torch.get_num_threads())

    @torch.inference_mode()
    def _try_out(self, model: CausalLM, ops: TorchOps) -> None:
        """Compute one token: kernels that can't serve this model, and weights that are not
        numbers, are seen at load. (A broken embedding of another token fails its rows.)"""
        zero = torch.zeros(1, dtype=torch.int32, device=self._device)
        batch = Batch(
            token_ids=zero,
            positions=zero,
            slots=zero,
            query_start=torch.arange(2, dtype=torch.int32, device=self._device),
            context_lens=zero + 1,
            block_tables=zero[:, None],
            logit_rows=zero,
        )
        try:
            logits = model.logits(ops, model.forward(ops, batch))
        except (RuntimeError, ValueError) as exc:
            raise ModelLoadError(f"the kernels can't run this model: {exc}") from exc
        if not bool(torch.isfinite(logits).all()):
            raise ModelLoadError(
                f"{self._checkpoint.path}: the weights are broken: expected finite logits for "
                "token 0, got NaN or infinity; get the checkpoint again"
            )

    @torch.inference_mode()
    def _run(self, step: StepInput, copied: _Copied) -> _Computed:
        if self._loaded is None:
            raise ModelLoadError("no model is loaded")
        model, ops, kv_cache, host_slots, rows = self._loaded
        rows.apply(step)
        if step.copies:
            _make_copies(kv_cache, host_slots, step.copies, copied)
        scheduled = np.frombuffer(step.scheduled, np.int32).reshape(-1, 4)
        if not len(scheduled):
            return _Computed.nothing()
        arrays = rows.batch(scheduled)
        asking, scoring = rows.asking, rows.scoring
        num_asking = len(asking.rows)
        try:
            batch = Batch(*(torch.from_numpy(array).to(self._device) for array in arrays))
            hidden = model.forward(ops, batch)
            if not len(arrays.logit_rows):
                return _Computed.nothing()
            logits = model.logits(ops, hidden)
            sampled = sample_rows(logits[:num_asking], rows, self.masks, MASK_WAIT_S)
            scored = score(logits[num_asking:], scoring.token_ids, scoring.num_logprobs)
        except Exception:
            # A step that was sent ahead builds on these tokens; its rows are lost, others aren't.
            rows.keep(asking, np.zeros(num_asking, np.int32), np.zeros(0, np.int32))
            raise
        rows.keep(asking, sampled.token_ids, sampled.deferred)
        return _Computed(sampled, scored)


def _make_copies(kv_cache: Tensor, host_slots: Tensor, packed: bytes, copied: _Copied) -> None:
    """Copies that were checked, in order. They are done when this returns, on a GPU too."""
    started = time.perf_counter()
    blocks = kv_cache.flatten(1).view(torch.uint8)
    copies = np.frombuffer(packed, np.int32).reshape(-1, 4)
    for _, kind, source, target in copies.tolist():
        sources = host_slots if kind == CopyKind.IN else blocks
        targets = host_slots if kind == CopyKind.OUT else blocks
        targets[target].copy_(sources[source], non_blocking=True)
    if kv_cache.is_cuda:
        torch.cuda.current_stream(kv_cache.device).synchronize()
    copied.done = copies[:, 0].tobytes()
    copied.seconds = time.perf_counter() - started


def _select_device(config: EngineConfig) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if config.device == "cuda":
        raise ConfigError(
            "--device cuda: expected a CUDA device, torch finds none; use --device cpu"
        )
    return torch.device("cpu")


def _block_bytes(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> int:
    kv_values = 2 * model_config.num_key_value_heads * model_config.head_dim  # a token's, a layer
    return config.block_size * model_config.num_hidden_layers * kv_values * dtype.itemsize


def _build_rows(
    config: EngineConfig, plan: KVCachePlan, model_config: ModelConfig, masks: _cpu.MaskBoard
) -> Rows:
    return Rows(
        num_rows=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        vocab_size=model_config.vocab_size,
        num_host_slots=plan.num_host_slots,
        has_mask=masks.has,
    )
