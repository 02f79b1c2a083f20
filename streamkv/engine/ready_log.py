"""What the log says once a model is ready: what it is, what its KV memory holds, its defaults.

Owns the words. It must not know the engine. Invariant: every number is one that was planned or
measured, and each that can be changed stands beside the flag that does it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..config import EngineConfig
from ..protocol import RunnerInfo

logger = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30


def log_ready(
    config: EngineConfig, info: RunnerInfo, sampling_defaults: Mapping[str, Any], *, has_store: bool
) -> None:
    """Three lines at most."""
    logger.info(
        "%s is ready on %s: %s, context %d, ops: %s",
        *(config.model_id, info.device, info.formats, info.max_model_len, info.ops),
    )
    logger.info("%s", kv_memory_line(config, info, has_store=has_store))
    named = {name: f"{name} {value}" for name, value in sampling_defaults.items()}
    if "max_tokens" in named:
        named["max_tokens"] += " (chats and responses, not completions)"
    if named:
        logger.info(
            "requests that don't say get the checkpoint's %s; --generation-config vllm leaves "
            "that out",
            ", ".join(named.values()),
        )


def kv_memory_line(config: EngineConfig, info: RunnerInfo, *, has_store: bool) -> str:
    """How much fits into which tier."""
    num_sequences = info.num_blocks / -(-info.max_model_len // info.block_size)
    parts = [
        f"KV memory: {info.num_blocks:,} blocks of {info.block_size}"
        f"{_size(info, info.num_blocks)} hold {info.num_blocks * info.block_size:,} tokens, "
        f"{num_sequences:.1f} sequences of {info.max_model_len:,}"
    ]
    if info.num_host_slots:
        size = _size(info, info.num_host_slots)
        parts.append(f"{info.num_host_slots:,} more in host memory{size}")
    if has_store:
        parts.append(f"up to {config.kv_cache_disk:g} GiB of prefixes in {config.kv_cache_dir}")
    return "; ".join(parts)


def _size(info: RunnerInfo, num_blocks: int) -> str:
    """ " (1.5 GiB)", where a block's bytes are known."""
    num_bytes = num_blocks * info.block_bytes
    size = f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.0f} MiB"
    return f" ({size})" if num_bytes else ""
