"""Copies: numbered copies of blocks, from the step that makes them to their acknowledgement.

Owns the numbers, how many copies a step has, and one reference to each block and slot that a copy
still needs. Must not know sequences or the disk. Invariants: each copy ends exactly once; what
it holds is released after its end was told, so that a place that is cached by then stays so.

The device makes a step's copies in order, before it writes anything: so the block of an eviction
is its new owner's at once, and isn't held.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ...protocol import CopyKind, StepOutput, unpack_ints
from ..integrity import IntegrityError
from .prefix_node import NOWHERE, PrefixNode
from .tiers import KVTiers
from .types import Copy, KVStats

_NUM_NUMBERS = 2**31


class _OnTheWay(NamedTuple):
    """What a copy holds, and who wants to know whether it was made."""

    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    on_end: Callable[[bool], None]


class Copies:
    """`num_left`: OUT and IN copies that the step being built may still have."""

    __slots__ = (
        "_block_refs",
        "_cached",
        "_has_slots",
        "_max_copies",
        "_next_number",
        "_on_the_way",
        "_pool",
        "_queue",
        "_stats",
        "_tiers",
        "num_left",
        "on_evicted",
    )

    def __init__(self, tiers: KVTiers, stats: KVStats, max_copies: int) -> None:
        self._tiers = tiers
        self._pool = tiers.pool
        self._cached = tiers.tree.blocks
        self._has_slots = tiers.slots.num_blocks > 0
        self._stats = stats
        self._max_copies = max_copies
        self.num_left = max_copies
        self.on_evicted: Callable[[PrefixNode], None] | None = None  # told once it has a slot only
        self._queue: list[Copy] = []  # of the step being built
        self._on_the_way: dict[int, _OnTheWay] = {}  # by number; those of the queue included
        self._block_refs: dict[int, int] = {}  # references that copies hold
        self._next_number = 0

    # --- making them -------------------------------------------------------------------------

    def take_block(self) -> int:
        """A block for something else. What was cached in it goes to a host slot, if it may."""
        block_id = self._pool.take()
        node = self._cached[block_id]
        if node is not None:
            self._evict(node, block_id)
        return block_id

    def _evict(self, node: PrefixNode, block_id: int) -> None:
        tiers = self._tiers
        self._stats.num_evictions += 1
        self._cached[block_id] = None
        node.block_id = NOWHERE
        if node.slot >= 0:
            tiers.touch(node)
            if self.on_evicted is not None:
                self.on_evicted(node)
        elif (
            self._has_slots
            and self.num_left > 0
            and not node.given_up
            and not node.num_users  # another copy will say where it is
            and tiers.has_slot(pinned=node.pins > 0)
        ):
            self.copy_out(node, block_id)
        else:
            tiers.tree.prune(node)

    def copy_out(
        self, node: PrefixNode, block_id: int, *, hold: bool = False, on_end: _OnOut | None = None
    ) -> None:
        """To a slot, of which there must be one. `hold`: the block isn't taken by anybody."""
        tiers = self._tiers
        node.num_users += 1  # first: the slot may be its parent's, or its child's
        slot = tiers.take_slot()
        if hold:
            tiers.pool.acquire(block_id)
        self.num_left -= 1
        end = partial(self._end_out, node, slot, on_end)
        self._add(CopyKind.OUT, block_id, slot, (block_id,) if hold else (), (slot,), end)

    def _end_out(self, node: PrefixNode, slot: int, on_end: _OnOut | None, ok: bool) -> None:
        tree = self._tiers.tree
        node.num_users -= 1
        if ok:
            self._stats.num_blocks_out += 1
            if node.is_attached and node.slot < 0:
                tree.set_slot(node, slot)
        if on_end is not None:
            on_end(node)
        elif node.slot >= 0 and self.on_evicted is not None:
            self.on_evicted(node)
        tree.prune(node)

    def copy_in(self, slot: int, on_end: Callable[[int, bool], None]) -> None:
        """To a block, of which there must be a free one. Who calls this holds the slot."""
        self.num_left -= 1
        block_id = self.take_block()
        self._add(CopyKind.IN, slot, block_id, (block_id,), (), partial(on_end, block_id))

    def copy_block(self, source: int, target: int, on_end: Callable[[bool], None]) -> None:
        """Who calls this passes on one reference of each."""
        self._stats.num_block_copies += 1
        self._add(CopyKind.BLOCK, source, target, (source, target), (), on_end)

    def _add(
        self,
        kind: CopyKind,
        source: int,
        target: int,
        blocks: tuple[int, ...],
        slots: tuple[int, ...],
        on_end: Callable[[bool], None],
    ) -> None:
        number = self._next_number
        self._next_number = (number + 1) % _NUM_NUMBERS
        for block_id in blocks:
            self._block_refs[block_id] = self._block_refs.get(block_id, 0) + 1
        self._on_the_way[number] = _OnTheWay(blocks, slots, on_end)
        self._queue.append(Copy(number, kind, source, target))

    # --- their way ---------------------------------------------------------------------------

    @property
    def num_on_the_way(self) -> int:
        return len(self._on_the_way)

    @property
    def has_queued(self) -> bool:
        return bool(self._queue)

    def num_refs(self, block_id: int) -> int:
        """References to it that copies hold, not tables."""
        return self._block_refs.get(block_id, 0)

    def num_returning_blocks(self) -> int:
        """Blocks that nothing but copies hold: they are free once those have ended."""
        ref_counts = self._tiers.pool.ref_counts
        return sum(ref_counts[block_id] == num for block_id, num in self._block_refs.items())

    def take(self) -> list[Copy]:
        """Those of the step being built, in order; the next step begins."""
        queue, self._queue = self._queue, []
        self.num_left = self._max_copies
        return queue

    def acknowledge(self, copies: list[Copy], output: StepOutput) -> None:
        """`copies`: of the output's own step; with an error, what it doesn't name failed."""
        for number in unpack_ints(output.copies_done):
            self._end(number, True)
        for number in unpack_ints(output.copies_failed):
            self._end(number, False)
        if output.error:
            for copy in copies:
                if copy.number in self._on_the_way:
                    self._end(copy.number, False)

    def _end(self, number: int, ok: bool) -> None:
        entry = self._on_the_way.pop(number, None)
        if entry is None:
            raise IntegrityError("I4", f"expected the number of a copy on its way, got {number}")
        if not ok:
            self._stats.num_failed_copies += 1
        entry.on_end(ok)
        for block_id in entry.blocks:
            num = self._block_refs.pop(block_id) - 1
            if num:
                self._block_refs[block_id] = num
            self._tiers.release_block(block_id)
        for slot in entry.slots:
            self._tiers.release_slot(slot)

    def held(self) -> tuple[list[int], list[int]]:
        """Blocks and slots, once for each reference to them (for checks)."""
        blocks = [block_id for entry in self._on_the_way.values() for block_id in entry.blocks]
        slots = [slot for entry in self._on_the_way.values() for slot in entry.slots]
        return blocks, slots


_OnOut = Callable[[PrefixNode], None]
