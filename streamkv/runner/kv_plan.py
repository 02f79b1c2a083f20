"""How many KV blocks a model gets, how many host slots besides, and how long its context is.

Owns the plan. Knows nothing of tensors, devices or requests. Invariant: planning is a pure function
of the operator's wishes, the model's sizes and the bytes that are free; wishes that can't be
granted are a ConfigError with the numbers.
"""

from __future__ import annotations

import logging

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError
from ..fields import flag_of
from ..models import ModelConfig
from ..words import counted, format_bytes
from .kv_cache import MAX_SLOTS, workspace_bytes

# The books of the blocks are made and checked on the event loop. A step's books cost the same
# whatever the pool, but a check while idle takes 4 to 6 us a cached block.
MAX_BLOCKS = 1 << 20
MIN_MODEL_LEN = 2  # a token of prompt and one of answer
LENGTH = "max_model_len (--max-model-len)"  # for messages
MEMORY = "kv_cache_memory_bytes (--kv-cache-memory-bytes)"
SWAP = "swap_space (--swap-space)"
FOLDER = "kv_cache_dir (--kv-cache-dir)"
# What is on its way to the disk or back lies in host slots: so many at least, if they aren't huge.
STAGING_SLOTS = 64
STAGING_BYTES = 256 << 20

logger = logging.getLogger(__name__)


class KVCachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the operator's wishes, the checkpoint and the memory."""

    num_blocks: int
    block_size: int  # tokens
    block_bytes: int  # all layers, as the cache lays them out
    max_model_len: int
    num_host_slots: int = 0  # blocks that host memory holds besides
    full_model_len: int = 0  # what max_model_len would be with enough KV memory
    bound: str = ""  # why there is no more of it and what gives more, where it matters

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        return self.num_host_slots * self.block_bytes


def plan_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    block_bytes: int,
    free_bytes: int,
    limit_bytes: int | None,
    held_back_bytes: int = 0,
    host_free_bytes: int | None = None,
) -> KVCachePlan:
    """The KV cache that fits beside the largest step, and the host slots.

    `held_back_bytes` are those that a higher --gpu-memory-utilization would give besides.
    `host_free_bytes` None: host slots are in the same memory as blocks, and come first.
    """
    longest, positions = model_config.max_context_len, model_config.max_position_embeddings
    if longest < positions and not config.max_model_len:
        logger.info(
            "the context is %d tokens, not the checkpoint's %d: its layers attend to a window of "
            "that size, and what is longer isn't computed",
            longest,
            positions,
        )
    workspace = workspace_bytes(config, model_config)
    if workspace > free_bytes and not config.num_gpu_blocks_override:
        raise ConfigError(
            f"the largest step needs {format_bytes(workspace)} besides weights and KV cache, "
            f"{_free(config, free_bytes, held_back_bytes, workspace)}"
            f"lower {_given(config, 'max_num_batched_tokens')} or {_given(config, 'max_num_seqs')}"
        )
    free_bytes = max(0, free_bytes - workspace)
    told_bytes = 0 if config.num_gpu_blocks_override else config.kv_cache_memory_bytes
    if told_bytes > free_bytes:
        raise ConfigError(
            f"{MEMORY}: KV blocks are to take {format_bytes(told_bytes)}, "
            f"{_free(config, free_bytes, held_back_bytes, told_bytes)}"
            f"lower {_given(config, 'kv_cache_memory_bytes')}"
        )
    num_host_slots = plan_host_slots(
        config,
        block_bytes=block_bytes,
        free_bytes=free_bytes - told_bytes if host_free_bytes is None else host_free_bytes,
        held_back_bytes=held_back_bytes,
        has_own_memory=host_free_bytes is not None,
    )
    beside = ""
    if host_free_bytes is None and num_host_slots:
        free_bytes -= num_host_slots * block_bytes
        beside = " beside --swap-space" if config.swap_space else ""
    plan = plan_kv_cache(
        free_bytes=free_bytes,
        limit_bytes=limit_bytes,
        held_back_bytes=held_back_bytes,
        kv_memory_bytes=config.kv_cache_memory_bytes,
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_context_len=model_config.max_context_len,
        num_blocks_override=config.num_gpu_blocks_override,
        beside=beside,
    )
    return msgspec.structs.replace(plan, num_host_slots=num_host_slots)


def _free(config: EngineConfig, free_bytes: int, held_back_bytes: int, needed_bytes: int) -> str:
    """How much, and the remedies, of which the caller adds the last."""
    free = f"{format_bytes(free_bytes)} are free"
    if held_back_bytes:
        free += f" within --gpu-memory-utilization ({config.gpu_memory_utilization:g})"
    can_raise = free_bytes < needed_bytes <= free_bytes + held_back_bytes
    return f"{free}: raise that, or " if can_raise else f"{free}: "


def _given(config: EngineConfig, name: str) -> str:
    """A flag and what it was given: "--swap-space (0.5 GiB)"."""
    value = getattr(config, name)
    shown = {
        "kv_cache_memory_bytes": format_bytes(config.kv_cache_memory_bytes),
        "swap_space": f"{config.swap_space:.10g} GiB",
    }
    return f"{flag_of(name)} ({shown.get(name, value)})"


def flags_to_lower(config: EngineConfig) -> str:
    """Those that KV memory comes from, as they were given."""
    names = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "swap_space")
    given = [_given(config, name) for name in names if getattr(config, name)]
    return " or ".join(given or [_given(config, "gpu_memory_utilization")])


def plan_host_slots(
    config: EngineConfig,
    *,
    block_bytes: int,
    free_bytes: int,
    held_back_bytes: int = 0,
    has_own_memory: bool = False,
) -> int:
    """As many as --swap-space holds, MAX_BLOCKS at most; enough for the way to --kv-cache-dir.
    `has_own_memory`: not the one that blocks are in."""
    swap_bytes = int(config.swap_space * 2**30)
    num_slots = min(swap_bytes // block_bytes, MAX_BLOCKS)
    if config.swap_space and not num_slots:
        raise ConfigError(
            f"{SWAP}: expected room for at least one KV block of {format_bytes(block_bytes)}, got "
            f"{format_bytes(swap_bytes)}"
        )
    if config.kv_cache_dir:
        num_slots = max(num_slots, 1, min(STAGING_SLOTS, STAGING_BYTES // block_bytes))
    needed = num_slots * block_bytes
    if needed > free_bytes:
        wish, remedies = SWAP, [f"lower {_given(config, 'swap_space')}"]
        if num_slots > swap_bytes // block_bytes:
            wish, remedies = FOLDER, ["leave out --kv-cache-dir"]
        told_bytes = 0 if config.num_gpu_blocks_override else config.kv_cache_memory_bytes
        free = _free(config, free_bytes, 0 if has_own_memory else held_back_bytes, needed)
        if not has_own_memory and needed <= free_bytes + told_bytes:
            remedies.append(f"lower {_given(config, 'kv_cache_memory_bytes')}")
        most = ", the most there can be," if num_slots < swap_bytes // block_bytes else ""
        raise ConfigError(
            f"{wish}: {counted(num_slots, 'KV block')} in host memory{most} "
            f"take {format_bytes(needed)}, {free}{' or '.join(remedies)}"
        )
    return num_slots


def plan_kv_cache(
    *,
    free_bytes: int,
    limit_bytes: int | None,
    block_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    max_context_len: int,
    num_blocks_override: int,
    kv_memory_bytes: int = 0,
    held_back_bytes: int = 0,
    beside: str = "",
) -> KVCachePlan:
    """Blocks for `max_num_seqs` sequences of `max_model_len` tokens, or as many as fit; or else as
    many as were told: in `num_blocks_override`, or by the bytes that they take.

    `max_model_len` 0 means the checkpoint's, shortened to what fits; one that was asked for must
    fit, and then may exceed `limit_bytes` (but not `free_bytes`). `beside` says what else took of
    the free memory. There is always one block, and
    never more than MAX_BLOCKS.
    Raises ConfigError with the numbers.
    """
    if 0 < max_model_len < MIN_MODEL_LEN:
        raise ConfigError(
            f"{LENGTH}: expected at least {MIN_MODEL_LEN} tokens, one of prompt and one of answer, "
            f"got {max_model_len}"
        )
    if max_model_len > max_context_len:
        raise ConfigError(
            f"{LENGTH}: expected at most {max_context_len}, the positions of the checkpoint "
            f"or the window of its layers, got {max_model_len}"
        )
    length = max_model_len or max_context_len
    blocks_per_sequence = -(-length // block_size)
    max_blocks = min(MAX_BLOCKS, MAX_SLOTS // block_size)
    if num_blocks_override > max_blocks:
        raise ConfigError(
            f"num_gpu_blocks_override (--num-gpu-blocks-override): expected at most {max_blocks} "
            f"blocks of {block_size} tokens, got {num_blocks_override}; larger "
            f"blocks hold more: raise --block-size ({block_size})"
        )
    bound, more = "", ""  # what keeps the pool from being larger, unasked; what gives more
    if num_blocks_override:
        num_blocks, more = num_blocks_override, "--num-gpu-blocks-override"
    elif kv_memory_bytes:
        more = "--kv-cache-memory-bytes"
        num_blocks = kv_memory_bytes // block_bytes
        if not 1 <= num_blocks <= max_blocks:
            raise ConfigError(
                f"{MEMORY}: expected room for 1 to {max_blocks} KV blocks of {block_size} tokens, "
                f"{format_bytes(block_bytes)} each, got {kv_memory_bytes} bytes for {num_blocks}"
            )
    else:
        limit = free_bytes if limit_bytes is None else limit_bytes
        if max_model_len:
            limit = max(limit, blocks_per_sequence * block_bytes)
        affordable = min(free_bytes, limit) // block_bytes
        wanted = max_num_seqs * blocks_per_sequence
        num_blocks = max(1, min(affordable, wanted, max_blocks))
        if wanted <= min(affordable, max_blocks):
            bound, more = f"enough for {counted(max_num_seqs, 'sequence')}", "--max-num-seqs"
        elif affordable > max_blocks:
            bound, more = "the most blocks there can be", "a larger --block-size"
        elif free_bytes <= limit:
            bound, more = f"all that is free{beside}", "freeing memory"
            needed = blocks_per_sequence * block_bytes if max_model_len else 0
            if held_back_bytes and needed <= free_bytes + held_back_bytes:
                more = f"--gpu-memory-utilization or {more}"
        else:
            bound, more = f"at most {format_bytes(limit)} on a CPU", "--kv-cache-memory-bytes"
    if max_model_len and blocks_per_sequence > max_blocks:
        raise ConfigError(
            f"{LENGTH}: {max_model_len} needs {blocks_per_sequence} KV blocks of {block_size} "
            f"tokens, expected at most {max_blocks}: raise --block-size"
        )
    if max_model_len and num_blocks < blocks_per_sequence:
        raise ConfigError(
            f"{LENGTH}: {max_model_len} needs {blocks_per_sequence} KV blocks of {block_size} "
            f"tokens ({format_bytes(blocks_per_sequence * block_bytes)}), there are {num_blocks} "
            f"({format_bytes(num_blocks * block_bytes)}): lower --max-model-len to "
            f"{num_blocks * block_size}, or get more by {more}"
        )
    if min(length, num_blocks * block_size) < MIN_MODEL_LEN:
        raise ConfigError(
            f"the context would be 1 token, expected at least {MIN_MODEL_LEN}, for "
            f"{counted(num_blocks, 'KV block')} of {counted(block_size, 'token')}: "
            f"{format_bytes(free_bytes)} are free and a block takes {format_bytes(block_bytes)}; "
            "give more memory or a larger --block-size"
        )
    found = min(length, num_blocks * block_size)
    cut = f"the context is cut from {length:,} to {found:,}" if found < length else ""
    reasons = ", ".join(filter(None, (bound, cut)))
    return KVCachePlan(
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        max_model_len=found,
        full_model_len=length,
        bound=f"{reasons}: more by {more}" if reasons else "",
    )
