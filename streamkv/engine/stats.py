"""EngineStats: what an engine counts, for `/metrics` and for whoever embeds it.

Owns the names, and where each number comes from. It must not know how they are written. Invariant:
all are zero before the engine is ready; once it has stopped, the gauges are zero again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..core.scheduler import Scheduler
from ..core.sequence import Sequence


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start and gauges of this moment. Requests are counted by the sequences that
    are computed for them: choices, candidates of `best_of`, beams."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0  # those that load included
    num_requests_loading: int = 0  # wait for blocks from host memory or disk
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    request_success_total: Mapping[str, int] = {}  # choices, by finish reason
    num_preemptions_total: int = 0
    preemptions_by_mode_total: Mapping[str, int] = {}  # "swap", "recompute"

    kv_cache_usage_perc: float = 0.0  # 0..1: share of the blocks held by sequences
    num_blocks: int = 0
    num_free_blocks: int = 0  # those of cached prefixes included
    block_size: int = 0  # tokens
    num_held_tokens: int = 0  # in blocks that aren't free; a shared block counts once

    prefix_cache_queries_total: int = 0  # tokens looked up
    prefix_cache_hits_total: int = 0  # tokens found, once a request
    prefix_cache_hits_by_tier_total: Mapping[str, int] = {}  # these, of "device", "host", "disk"
    kv_blocks_evicted_total: int = 0  # cached ones that were taken for others
    kv_blocks_copied_total: int = 0  # to another block, before a write to a shared one
    kv_blocks_swapped_out_total: int = 0  # copied to host memory, also on their way to disk
    kv_blocks_swapped_in_total: int = 0
    kv_copies_failed_total: int = 0
    num_host_slots: int = 0  # blocks that host memory holds
    num_host_slots_used: int = 0
    kv_store_reads_total: int = 0  # blocks from disk
    kv_store_writes_total: int = 0
    kv_store_failures_total: int = 0
    num_sessions: int = 0
    num_pinned_blocks: int = 0  # of sessions and of preempted sequences, evicted last

    @property
    def num_held_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def counters(self) -> EngineStats:
        """The same with all gauges zero."""
        names = [name for name in self.__struct_fields__ if name.endswith("_total")]
        return EngineStats(**{name: getattr(self, name) for name in names})


def read_stats(
    scheduler: Scheduler,
    sequences: Iterable[Sequence],
    *,
    num_arriving: int,
    num_host_slots: int,
    **counters: Any,
) -> EngineStats:
    """The scheduler's numbers and the given ones. `sequences`: all that have not ended;
    `num_arriving`: those that the scheduler doesn't know yet."""
    kv, num_held = scheduler.kv_stats, scheduler.num_held_blocks
    num_blocks, block_size = scheduler.num_blocks, scheduler.block_size
    return EngineStats(
        num_requests_running=scheduler.num_running,
        num_requests_waiting=scheduler.num_waiting + num_arriving,
        num_requests_loading=scheduler.num_loading,
        num_preemptions_total=scheduler.num_preemptions,
        preemptions_by_mode_total={
            "swap": scheduler.num_swaps,
            "recompute": scheduler.num_preemptions - scheduler.num_swaps,
        },
        kv_cache_usage_perc=num_held / num_blocks,
        num_blocks=num_blocks,
        num_free_blocks=num_blocks - num_held,
        block_size=block_size,
        num_held_tokens=num_held * block_size - _num_empty_places(sequences, block_size),
        prefix_cache_queries_total=scheduler.num_prefix_queries_tokens,
        prefix_cache_hits_total=scheduler.num_prefix_hit_tokens,
        prefix_cache_hits_by_tier_total={
            "device": kv.num_device_hit_tokens,
            "host": kv.num_host_hit_tokens,
            "disk": kv.num_disk_hit_tokens,
        },
        kv_blocks_evicted_total=kv.num_evictions,
        kv_blocks_copied_total=kv.num_block_copies,
        kv_blocks_swapped_out_total=kv.num_blocks_out,
        kv_blocks_swapped_in_total=kv.num_blocks_in,
        kv_copies_failed_total=kv.num_failed_copies,
        num_host_slots=num_host_slots,
        num_host_slots_used=kv.num_host_slots_used,
        kv_store_reads_total=kv.num_store_reads,
        kv_store_writes_total=kv.num_store_writes,
        kv_store_failures_total=kv.num_store_failures,
        num_sessions=kv.num_sessions,
        num_pinned_blocks=kv.num_pinned_blocks,
        **counters,
    )


def _num_empty_places(sequences: Iterable[Sequence], block_size: int) -> int:
    """Places for tokens in blocks that aren't full yet: each sequence has one at most, its last."""
    empty: dict[int, int] = {}
    for sequence in sequences:
        num_in_last = sequence.num_computed_tokens % block_size
        if num_in_last and sequence.block_table:
            block_id = sequence.block_table[-1]
            empty[block_id] = min(empty.get(block_id, block_size), block_size - num_in_last)
    return sum(empty.values())
