"""The blocks on disk of a loaded model, if there are to be any: what the runners have in common.

Owns the choice and how the wishes are read. Knows neither files nor kernels. Invariant: without
--kv-cache-dir nothing is hashed and no thread is started.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import EngineConfig
from .kv_plan import KVCachePlan
from .kv_store import KvStore


def open_block_store(
    config: EngineConfig, plan: KVCachePlan, slots: memoryview, fingerprint: Callable[[], str]
) -> KvStore | None:
    """Over the host slots' memory. ConfigError if the folder can't be used."""
    if not config.kv_cache_dir:
        return None
    return KvStore(
        Path(config.kv_cache_dir).expanduser(),
        limit_bytes=int(config.kv_cache_disk * 2**30),
        fingerprint=fingerprint(),
        slots=slots,
        block_bytes=plan.block_bytes,
        block_size=plan.block_size,
    )
