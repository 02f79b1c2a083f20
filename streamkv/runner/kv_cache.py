"""How much memory there is, and how many KV blocks a model gets of it.

Owns the measuring, the budget that several models share, and the plan. Knows nothing of tensors,
devices or requests. Invariant: planning is a pure function of numbers; memory is measured once,
before it, and what the budget gave out never exceeds it unless the operator said so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError
from ..models import ModelConfig

CPU_LIMIT_BYTES = 4 << 30  # a chat server on a laptop shouldn't take all of its memory
MAX_SLOTS = 2**31 - 1  # kernels number them in int32
# The books of the blocks are made and checked on the event loop, at 0.4 us a block, and a pause of
# half a second is as much as streams should see: 16 million tokens at the usual block size.
MAX_BLOCKS = 1 << 20
MIN_MODEL_LEN = 2  # a token of prompt and one of answer
LENGTH = "max_model_len (--max-model-len)"  # for messages
KV_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
KV_SCALE_BYTES = 4  # of int8, for each token and head, of keys as of values

logger = logging.getLogger(__name__)


class KVCachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the operator's wishes, the checkpoint and the memory."""

    num_blocks: int
    block_size: int  # tokens
    block_bytes: int  # all layers, as the cache lays them out
    max_model_len: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class MemoryBudget:
    """Bytes that may be taken, and who took them. Owned by the thread that loads models.

    Raises ConfigError with the numbers when a reservation doesn't fit.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._reserved: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        """Not reserved; never negative."""
        return max(0, self.total_bytes - sum(self._reserved.values()))

    def reserve(self, name: str, num_bytes: int, *, overcommit: bool = False) -> None:
        """Take `num_bytes` under a new name; `overcommit`: whatever is left."""
        if name in self._reserved:
            raise ConfigError(f"memory for {name} is reserved already; give each model its name")
        if num_bytes > self.free_bytes and not overcommit:
            raise ConfigError(
                f"{name}: {format_bytes(num_bytes)} needed, {format_bytes(self.free_bytes)} of "
                f"{format_bytes(self.total_bytes)} free: use a smaller model or dtype, or raise "
                "--gpu-memory-utilization"
            )
        self._reserved[name] = num_bytes

    def release(self, name: str) -> None:
        """Give a reservation back; unknown names are none."""
        self._reserved.pop(name, None)


class MemoryShare:
    """What one model has of a budget; None: of a budget of its own, measured when it loads."""

    def __init__(self, config: EngineConfig, budget: MemoryBudget | None) -> None:
        self._config = config
        self._budget = budget
        self._names: list[str] = []

    def measure(self, available_bytes: Callable[[], int]) -> None:
        """Make a budget of what is available, unless one was given."""
        if self._budget is None:
            share = self._config.gpu_memory_utilization
            self._budget = MemoryBudget(int(available_bytes() * share))

    @property
    def free_bytes(self) -> int:
        return 0 if self._budget is None else self._budget.free_bytes

    def reserve(self, what: str, num_bytes: int, *, overcommit: bool = False) -> None:
        """As MemoryBudget's, under the model's name. Measured before."""
        name = f"{self._config.model_id} {what}"
        if self._budget is not None:
            self._budget.reserve(name, num_bytes, overcommit=overcommit)
            self._names.append(name)

    def release(self) -> None:
        """Give everything back; idempotent."""
        while self._budget is not None and self._names:
            self._budget.release(self._names.pop())


def format_bytes(num_bytes: int) -> str:
    """With a unit in which the number has at least one digit before the point."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"


def kv_token_bytes(num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """What the keys and values of a token take in one layer."""
    scale_bytes = KV_SCALE_BYTES if dtype == "int8" else 0
    return 2 * num_kv_heads * (head_dim * KV_VALUE_BYTES[dtype] + scale_bytes)


def max_step_tokens(config: EngineConfig, max_model_len: int) -> int:
    """The most tokens that a step can have: no more than all sequences together."""
    return min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)


def workspace_bytes(config: EngineConfig, model_config: ModelConfig) -> int:
    """An upper estimate of what a step needs besides weights and KV: activations and logits."""
    heads = model_config.num_attention_heads + 2 * model_config.num_key_value_heads
    widths = 4 * model_config.hidden_size + 3 * model_config.intermediate_size
    per_token = 4 * (widths + 2 * heads * model_config.head_dim)
    longest = model_config.max_context_len
    num_tokens = max_step_tokens(config, min(config.max_model_len or longest, longest))
    return num_tokens * per_token + config.max_num_seqs * model_config.vocab_size * 12


def plan_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    block_bytes: int,
    free_bytes: int,
    limit_bytes: int | None,
) -> KVCachePlan:
    """The KV cache that fits beside the largest step."""
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
            f"{format_bytes(free_bytes)} are free: lower --max-num-batched-tokens "
            f"({config.max_num_batched_tokens}) or --max-num-seqs ({config.max_num_seqs})"
        )
    return plan_kv_cache(
        free_bytes=max(0, free_bytes - workspace),
        limit_bytes=limit_bytes,
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_context_len=model_config.max_context_len,
        num_blocks_override=config.num_gpu_blocks_override,
    )


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
) -> KVCachePlan:
    """Blocks for `max_num_seqs` sequences of `max_model_len` tokens, or as many as fit.

    `max_model_len` 0 means the checkpoint's, shortened to what fits; one that was asked for must
    fit, and then may exceed `limit_bytes` (but not `free_bytes`). There is always one block, and
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
    if num_blocks_override:
        num_blocks = num_blocks_override
    else:
        limit = free_bytes if limit_bytes is None else limit_bytes
        if max_model_len:
            limit = max(limit, blocks_per_sequence * block_bytes)
        affordable = min(free_bytes, limit) // block_bytes
        num_blocks = max(1, min(affordable, max_num_seqs * blocks_per_sequence, max_blocks))
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
            f"{num_blocks * block_size} or give more memory"
        )
    if min(length, num_blocks * block_size) < MIN_MODEL_LEN:
        raise ConfigError(
            f"the context would be 1 token, expected at least {MIN_MODEL_LEN}: there are "
            f"{num_blocks} KV blocks of {block_size} tokens, {format_bytes(free_bytes)} are free "
            f"and a block takes {format_bytes(block_bytes)}; give more memory or a larger "
            "--block-size"
        )
    return KVCachePlan(
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        max_model_len=min(length, num_blocks * block_size),
    )


def available_memory_bytes(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that can be taken now without swapping, within the limits of the cgroups we are in."""
    return min(_machine_available(proc), *_cgroup_available(proc, cgroups))


def _machine_available(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # Not Linux: physical memory is the only portable number.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _CgroupFiles(NamedTuple):
    limit: str
    usage: str
    reclaimable: str  # key in memory.stat: file pages that the kernel drops under pressure


_CGROUP_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def _cgroup_available(proc: Path, cgroups: Path) -> list[int]:
    """What each limited cgroup above this process has left; at least one number."""
    found = [2**63]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = cgroups, _CGROUP_V2
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", _CGROUP_V1
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path may be the host's; then only the root exists, and counts.
        for level in (folder, *folder.parents):
            if level.is_relative_to(root):
                found += _left_in(level, files)
    return found


def _left_in(folder: Path, files: _CgroupFiles) -> list[int]:
    """[bytes left] of a cgroup, [] if it has no limit."""
    limit, usage = _lines(folder / files.limit), _lines(folder / files.usage)
    if not limit or not usage or not limit[0].isdigit():
        return []
    stat = dict(line.split() for line in _lines(folder / "memory.stat"))
    used = int(usage[0]) - int(stat.get(files.reclaimable, 0))
    return [max(0, int(limit[0]) - max(0, used))]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
