"""KVTiers: blocks on the device and slots in host memory, with what is cached in them.

Owns the two pools, the tree, and that they agree: what is taken for something else leaves the
tree, what is cached stays revivable, what is pinned is evicted last. Must not know sequences, nor
how anything gets from one tier to the other. Invariant: a free block is in its pool's pinned list
exactly if its node is pinned; a free slot, if its node is pinned and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

from .block_pool import BlockPool
from .prefix_node import NOWHERE, PrefixNode
from .prefix_tree import PrefixTree


class KVTiers:
    __slots__ = ("pool", "slots", "tree")

    def __init__(self, num_blocks: int, num_host_slots: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.slots = BlockPool(num_host_slots)
        self.tree = PrefixTree(block_size, num_blocks=num_blocks, num_slots=num_host_slots)

    def release_block(self, block_id: int) -> None:
        """One reference less; a free one is kept for what is cached in it, or is next to go."""
        pool = self.pool
        node = self.tree.blocks[block_id]
        if node is not None and block_id >= pool.num_blocks and pool.ref_counts[block_id] == 1:
            self.forget_block(node)  # it retires
            node = None
        pool.release(block_id, reuse_first=node is None, pinned=node is not None and node.pins > 0)

    def release_slot(self, slot: int) -> None:
        node = self.tree.slots[slot]
        self.slots.release(
            slot, reuse_first=node is None, pinned=node is not None and _is_slot_pinned(node)
        )

    def take_slot(self) -> int:
        """A slot for something else: what was in it is on the other tiers, or gone."""
        slot = self.slots.take()
        node = self.tree.slots[slot]
        if node is not None:
            self.tree.clear_slot(node)
            self.tree.prune(node)
        return slot

    def has_slot(self, *, pinned: bool) -> bool:
        """Whether one can be taken without evicting what is pinned (`pinned`: or with that)."""
        return self.slots.num_free > (0 if pinned else self.slots.num_pinned)

    def touch(self, node: PrefixNode) -> None:
        """It is the most recently used one, on each tier. Of a path, parents come last."""
        if node.block_id >= 0:
            self.pool.touch(node.block_id, pinned=node.pins > 0)
        if node.slot >= 0:
            self.slots.touch(node.slot, pinned=_is_slot_pinned(node))

    def pin(self, path: list[PrefixNode]) -> None:
        for node in reversed(path):
            node.pins += 1
            node.given_up = False
            if node.pins == 1:
                self.touch(node)

    def unpin(self, path: list[PrefixNode]) -> None:
        for node in reversed(path):
            node.pins -= 1
            if node.pins == 0:
                self.touch(node)

    # --- places of nodes ---------------------------------------------------------------------

    def fill(self, node: PrefixNode, block_id: int) -> None:
        """A hole, or what is on other tiers only, is in this block as well. Somebody holds it.

        If the block held a beginning of the same tokens (a leaf), it is moved.
        """
        if node.block_id >= 0:
            return
        blocks = self.tree.blocks
        former = blocks[block_id]
        if former is not None:
            self.forget_block(former)
        blocks[block_id] = node
        node.block_id = block_id
        if node.slot >= 0:
            self._place_slot(node)

    def forget_block(self, node: PrefixNode) -> None:
        self.tree.clear_block(node)
        self._place_slot(node)
        self.tree.prune(node)

    def set_record(self, node: PrefixNode, record: int) -> None:
        """Whatever the node or the record was said to have before is forgotten."""
        self.forget_records((record, node.record))
        self.tree.set_record(node, record)
        self._place_slot(node)

    def drop_root(self, cache_salt: str) -> None:
        """Nothing below it is worth anything."""
        for node in self.tree.drop_root(cache_salt):
            if node.block_id >= 0:
                self.pool.touch(node.block_id, reuse_first=True)
            if node.slot >= 0:
                self.slots.touch(node.slot, reuse_first=True)
            node.block_id = node.slot = node.record = NOWHERE

    def forget_records(self, records: Iterable[int]) -> None:
        for record in records:
            node = self.tree.records.get(record)
            if node is not None:
                self.tree.clear_record(node)
                self._place_slot(node)
                self.tree.prune(node)

    def _place_slot(self, node: PrefixNode) -> None:
        """Its slot may be the only place now, or isn't any more."""
        if node.slot >= 0:
            self.slots.touch(node.slot, pinned=_is_slot_pinned(node))

    # --- whole prefixes ----------------------------------------------------------------------

    def resize(self, num_blocks: int) -> None:
        self.tree.extend_blocks(num_blocks)
        for block_id in self.pool.resize(num_blocks):
            node = self.tree.blocks[block_id]
            if node is not None:
                self.forget_block(node)


def _is_slot_pinned(node: PrefixNode) -> bool:
    """Whoever pinned it would miss it."""
    return node.pins > 0 and node.block_id < 0 and node.record < 0
