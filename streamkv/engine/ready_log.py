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
from ..words import counted, format_bytes

logger = logging.getLogger(__name__)


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
        f"KV memory: {counted(info.num_blocks, 'block')} of {info.block_size}"
        f"{_size(info, info.num_blocks)} for {info.num_blocks * info.block_size:,} tokens, "
        f"{num_sequences:.1f} sequences of {info.max_model_len:,}"
    ]
    if info.kv_bound:
        parts.append(info.kv_bound)
    if info.num_host_slots:
        size = _size(info, info.num_host_slots)
        parts.append(f"{info.num_host_slots:,} more in host memory{size}")
    if has_store:
        disk = format_bytes(int(config.kv_cache_disk * 2**30))
        parts.append(f"up to {disk} of prefixes in {config.kv_cache_dir}")
    return "; ".join(parts)


def _size(info: RunnerInfo, num_blocks: int) -> str:
    """ " (1.5 GiB)", where a block's bytes are known."""
    num_bytes = num_blocks * info.block_bytes
    return f" ({format_bytes(num_bytes)})" if num_bytes else ""
