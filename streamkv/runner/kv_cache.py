"""How much memory there is, who takes how much of it, and what steps and keys and values need.

Owns the measuring, the budget that several models share, and the sizes that plans are made of.
Knows nothing of tensors, devices or requests. Invariant: what the budget gave out never exceeds it
unless the operator said so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..config import EngineConfig
from ..errors import ConfigError
from ..models import ModelConfig
from ..protocol import MAX_SCORED
from ..words import format_bytes

CPU_LIMIT_BYTES = 4 << 30  # a chat server on a laptop shouldn't take all of its memory
MAX_SLOTS = 2**31 - 1  # kernels number them in int32
KV_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
KV_SCALE_BYTES = 4  # of int8, for each token and head, of keys as of values


class MemoryBudget:
    """Bytes that may be taken, and who took them. Owned by the thread that loads models.

    Raises ConfigError with the numbers when a reservation doesn't fit.
    """

    def __init__(self, total_bytes: int, *, held_back_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.held_back_bytes = held_back_bytes  # what --gpu-memory-utilization leaves to others
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
            can_raise = num_bytes <= self.free_bytes + self.held_back_bytes
            raise ConfigError(
                f"{name}: {format_bytes(num_bytes)} needed, {format_bytes(self.free_bytes)} of "
                f"{format_bytes(self.total_bytes)} free: use a smaller model or dtype"
                f"{', or raise --gpu-memory-utilization' if can_raise else ''}"
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
            available = available_bytes()
            total = int(available * self._config.gpu_memory_utilization)
            self._budget = MemoryBudget(total, held_back_bytes=available - total)

    @property
    def free_bytes(self) -> int:
        return 0 if self._budget is None else self._budget.free_bytes

    @property
    def held_back_bytes(self) -> int:
        """What a higher --gpu-memory-utilization could give besides."""
        return 0 if self._budget is None else self._budget.held_back_bytes

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
    num_logit_rows = min(config.max_num_seqs, num_tokens) + min(MAX_SCORED, num_tokens)
    return num_tokens * per_token + num_logit_rows * model_config.vocab_size * 12


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
