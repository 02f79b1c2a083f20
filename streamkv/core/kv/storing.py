"""Storing: blocks on their way to and from disk.

Owns the numbers of store ops, which cached blocks are still to be written, and one reference to
the slot of each write on its way. Must not know sequences, nor why a block is read. Invariants:
each op ends exactly once; only full blocks are written; writes leave half of the slots to others.

A block is written when a sequence that has it ends, or when it was evicted to a slot: from the
slot, to which it is copied first if need be, with the copies that a step has to spare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from ...protocol import StoredBlock, StoreOp, StoreResult
from ..integrity import IntegrityError
from .copies import Copies
from .prefix_node import NOWHERE, PrefixNode
from .tiers import KVTiers
from .types import KVStats

_MAX_QUEUED = 4096  # blocks; more are not written before another sequence ends with them
_NUM_NUMBERS = 2**31


class Storing:
    __slots__ = (
        "_copies",
        "_max_writing",
        "_next_number",
        "_num_copying",
        "_num_writes",
        "_on_the_way",
        "_ops",
        "_queue",
        "_stats",
        "_tiers",
        "_writable",
    )

    def __init__(self, tiers: KVTiers, copies: Copies, stats: KVStats, *, has_store: bool) -> None:
        self._tiers = tiers
        self._copies = copies
        self._stats = stats
        self._max_writing = max(tiers.slots.num_blocks // 2, 1) if has_store else 0
        self._queue: deque[PrefixNode] = deque()  # to be copied to a slot, then written
        self._num_copying = 0
        self._writable: deque[PrefixNode] = deque()  # in a slot
        self._num_writes = 0  # on their way
        self._ops: list[StoreOp] = []  # not taken yet
        # By number: the slot that a write holds, and what to do in the end.
        self._on_the_way: dict[int, tuple[int, Callable[[StoreResult], None]]] = {}
        self._next_number = 0
        if has_store:
            copies.on_evicted = self._persist_evicted

    # --- writing -----------------------------------------------------------------------------

    def persist(self, path: Iterable[PrefixNode]) -> None:
        """Write those of these full blocks that are not on disk, some time."""
        if not self._max_writing:
            return
        for node in path:
            if node.record < 0 and not node.is_queued:
                if len(self._queue) >= _MAX_QUEUED:
                    return
                node.is_queued = True
                self._queue.append(node)

    def _persist_evicted(self, node: PrefixNode) -> None:
        is_full = len(node.key) == self._tiers.tree.key_bytes
        if is_full and node.is_attached and node.record < 0 and not node.is_queued:
            node.is_queued = True
            self._writable.append(node)

    @property
    def can_copy(self) -> bool:
        """A block waits to be copied to a slot, and one more may be."""
        num_writing = self._num_copying + len(self._writable) + self._num_writes
        return (
            bool(self._queue)
            and num_writing < self._max_writing
            and self._tiers.has_slot(pinned=False)
        )

    def make_copies(self) -> None:
        """Use what the step has left."""
        while self._copies.num_left > 0 and self.can_copy:
            node = self._queue.popleft()
            if not node.is_attached or node.record >= 0:
                node.is_queued = False
            elif node.slot >= 0:
                self._writable.append(node)
            elif node.block_id >= 0:
                self._num_copying += 1
                self._copies.copy_out(node, node.block_id, hold=True, on_end=self._end_copy)
            else:  # evicted; if a copy is on its way to a slot, it will be written from there
                node.is_queued = False

    def _end_copy(self, node: PrefixNode) -> None:
        self._num_copying -= 1
        if node.slot >= 0:
            self._writable.append(node)
        else:
            node.is_queued = False

    def _begin_writes(self) -> None:
        while self._writable and self._num_writes < self._max_writing:
            node = self._writable.popleft()
            parent = node.parent
            if parent is None or node.record >= 0 or node.slot < 0:
                node.is_queued = False
                continue
            self._tiers.slots.acquire(node.slot)
            node.num_users += 1
            self._num_writes += 1
            block = StoredBlock(NOWHERE, node.digest, parent.digest, node.key)
            self._begin(node.slot, block, True, partial(self._end_write, node, node.slot))

    def _end_write(self, node: PrefixNode, slot: int, result: StoreResult) -> None:
        node.is_queued = False
        self._num_writes -= 1
        if result.ok and result.record >= 0:
            self._stats.num_store_writes += 1
            self._tiers.set_record(node, result.record)
        elif not result.ok:
            self._stats.num_store_failures += 1
        node.num_users -= 1
        self._tiers.release_slot(slot)
        self._tiers.tree.prune(node)

    # --- reading -----------------------------------------------------------------------------

    def read(self, node: PrefixNode, slot: int, on_end: Callable[[bool], None]) -> None:
        """From its record to a slot that the caller holds."""
        assert node.parent is not None, "only what was found in the tree is read"
        block = StoredBlock(node.record, node.digest, node.parent.digest, node.key)
        self._begin(slot, block, False, partial(self._end_read, node, node.record, on_end))

    def _end_read(
        self, node: PrefixNode, record: int, on_end: Callable[[bool], None], result: StoreResult
    ) -> None:
        if result.ok:
            self._stats.num_store_reads += 1
        else:
            self._stats.num_store_failures += 1
            if node.record == record:  # it isn't what it should be
                self._tiers.forget_records((record,))
        on_end(result.ok)

    # --- ops ---------------------------------------------------------------------------------

    def _begin(
        self, slot: int, block: StoredBlock, is_write: bool, on_end: Callable[[StoreResult], None]
    ) -> None:
        number = self._next_number
        self._next_number = (number + 1) % _NUM_NUMBERS
        self._on_the_way[number] = (slot if is_write else NOWHERE, on_end)
        self._ops.append(StoreOp(number, slot, block, is_write))

    @property
    def num_on_the_way(self) -> int:
        return len(self._on_the_way)

    def take_ops(self) -> list[StoreOp]:
        self._begin_writes()
        ops, self._ops = self._ops, []
        return ops

    def on_result(self, result: StoreResult) -> None:
        self._tiers.forget_records(result.dropped)
        entry = self._on_the_way.pop(result.number, None)
        if entry is None:
            raise IntegrityError(
                "I4", f"expected the number of a store op on its way, got {result.number}"
            )
        entry[1](result)

    @property
    def has_ops(self) -> bool:
        """There is something to take, or a result to come."""
        return bool(self._on_the_way or self._writable)

    def held_slots(self) -> list[int]:
        """Once for each reference to them (for checks)."""
        return [slot for slot, _ in self._on_the_way.values() if slot >= 0]
