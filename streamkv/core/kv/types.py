"""What KVManager gives and takes besides Sequences: numbers and names, no behaviour."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ...protocol import CopyKind


class Keep(enum.Enum):
    """What becomes of a table's cached blocks when it is given back."""

    CACHE = enum.auto()  # an ordinary end: they stay as long as their place isn't needed
    SWAP = enum.auto()  # preempted, to go on with them: evicted last
    GIVE_UP = enum.auto()  # preempted, to be recomputed: not worth a copy to host memory
    FORGET = enum.auto()  # a step failed to compute them: nobody knows their content


GrowResult = tuple[list[int], bool]
"""What was done to a table: blocks appended, and whether one in it is another one now."""


class Copy(NamedTuple):
    """One row of StepInput.copies."""

    number: int
    kind: CopyKind
    source: int
    target: int


@dataclass(slots=True)
class KVStats:
    """Counters since the start, then gauges of this moment."""

    num_device_hit_tokens: int = 0  # found of prompts, once a request, by where they were
    num_host_hit_tokens: int = 0
    num_disk_hit_tokens: int = 0
    num_evictions: int = 0  # cached blocks taken for others
    num_block_copies: int = 0  # to another block: tails of hits, and before a write to a shared one
    num_blocks_out: int = 0  # copied to host memory
    num_blocks_in: int = 0  # copied back
    num_failed_copies: int = 0
    num_store_reads: int = 0  # blocks from disk
    num_store_writes: int = 0
    num_store_failures: int = 0  # blocks that could not be read or written

    num_host_slots_used: int = 0
    num_sessions: int = 0
    num_pinned_blocks: int = 0  # cached, evicted last
