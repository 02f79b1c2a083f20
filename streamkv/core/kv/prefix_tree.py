"""PrefixTree: which block, host slot and disk record holds the KV of which token prefix.

Owns the one map from token content to places on all tiers: a radix tree with one block per node,
one root per cache salt. Must not know sequences, reference counts or the order of eviction.
Invariants: a block, slot or record belongs to at most one node; each node is reachable from its
root; the keys on the way from the root are the tokens whose KV the places hold.

A node lives as long as it has a place, children, or a copy that is on its way to it. One without
a place is a hole: a match ends there, and publishing the same tokens again fills it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from ...protocol import StoredBlock
from ..integrity import IntegrityError
from .prefix_node import (
    INT32_BYTES,
    NOWHERE,
    PrefixMatch,
    PrefixNode,
    num_common_tokens,
    salt_digest,
)

__all__ = ["PrefixMatch", "PrefixNode", "PrefixTree"]


class PrefixTree:
    """Cached blocks by token content and salt. Its three maps are read by others, never written.

    `blocks` and `slots` are lists by number: a large dict would be built anew now and then.
    """

    __slots__ = (
        "_roots",
        "block_size",
        "blocks",
        "key_bytes",
        "num_cached_slots",
        "records",
        "slots",
    )

    def __init__(self, block_size: int, *, num_blocks: int = 0, num_slots: int = 0) -> None:
        self.block_size = block_size
        self.key_bytes = block_size * INT32_BYTES
        self._roots: dict[bytes, PrefixNode] = {}  # by digest
        self.blocks: list[PrefixNode | None] = [None] * num_blocks
        self.slots: list[PrefixNode | None] = [None] * num_slots
        self.records: dict[int, PrefixNode] = {}
        self.num_cached_slots = 0

    def extend_blocks(self, num_blocks: int) -> None:
        """There are at least that many."""
        self.blocks += [None] * (num_blocks - len(self.blocks))

    # --- by content --------------------------------------------------------------------------

    def root(self, cache_salt: str) -> PrefixNode:
        """It is made if it isn't there."""
        digest = salt_digest(cache_salt)
        root = self._roots.get(digest)
        if root is None:
            root = self._roots[digest] = PrefixNode(None, b"", digest)
        return root

    def child(self, parent: PrefixNode, key: bytes) -> PrefixNode:
        """The node of these tokens after `parent`; a new one is nowhere yet."""
        return parent.child(key) or parent.add_child(key)

    def match(self, token_ids: array[int], cache_salt: str) -> PrefixMatch:
        """The longest cached prefix that leaves at least one token to compute."""
        nodes: list[PrefixNode] = []
        node = self._roots.get(salt_digest(cache_salt))
        if node is None:
            return PrefixMatch(nodes, 0)
        packed = token_ids.tobytes()
        begin, end, step = 0, len(packed) - INT32_BYTES, self.key_bytes
        num_device, is_on_device = 0, True
        while begin + step <= end:
            child = node.child(packed[begin : begin + step])
            if child is None:
                break
            if child.block_id < 0:
                if not child.has_location:
                    break
                is_on_device = False
            elif is_on_device:
                num_device += 1
            nodes.append(child)
            node = child
            begin += step
        tail, num_tail_tokens = self._best_tail(node, packed[begin : min(begin + step, end)])
        return PrefixMatch(nodes, num_device, tail, num_tail_tokens)

    def _best_tail(self, node: PrefixNode, rest: bytes) -> tuple[PrefixNode | None, int]:
        """The child that begins with most of these tokens; one to be loaded only for many."""
        best, num_best = None, 0
        if not rest:
            return best, num_best
        first = rest[:INT32_BYTES]
        for child in node.similar_children(rest):
            if not child.key.startswith(first):
                continue
            num = num_common_tokens(child.key, rest)
            if child.block_id < 0 and (not child.has_location or 2 * num < self.block_size):
                continue
            nearer = best is not None and best.block_id < 0 <= child.block_id
            if num > num_best or (nearer and num == num_best):
                best, num_best = child, num
        return best, num_best

    # --- places: what is set must be free of another, what is cleared must be there ----------

    def set_block(self, node: PrefixNode, block_id: int) -> None:
        self.blocks[block_id] = node
        node.block_id = block_id

    def clear_block(self, node: PrefixNode) -> None:
        self.blocks[node.block_id] = None
        node.block_id = NOWHERE

    def set_slot(self, node: PrefixNode, slot: int) -> None:
        self.slots[slot] = node
        self.num_cached_slots += 1
        node.slot = slot

    def clear_slot(self, node: PrefixNode) -> None:
        self.slots[node.slot] = None
        self.num_cached_slots -= 1
        node.slot = NOWHERE

    def set_record(self, node: PrefixNode, record: int) -> None:
        self.records[record] = node
        node.record = record

    def clear_record(self, node: PrefixNode) -> None:
        del self.records[node.record]
        node.record = NOWHERE

    def prune(self, node: PrefixNode) -> None:
        """Take it out if nothing keeps it, and then its parents likewise."""
        while node.slot < 0 and node.block_id < 0 and node.record < 0:
            if node.has_children or node.num_users:
                return
            parent = node.parent
            if parent is None:
                if not node.key:
                    self._roots.pop(node.digest, None)
                return
            parent.remove_child(node)
            node = parent

    def drop_root(self, cache_salt: str) -> list[PrefixNode]:
        """Take a root out with all below it. The nodes keep no place in the maps, but know it."""
        root = self._roots.pop(salt_digest(cache_salt), None)
        nodes = [] if root is None else [root]
        for node in nodes:  # it grows meanwhile
            nodes += node.children()
        for node in nodes:
            node.parent = None
            if node.block_id >= 0:
                self.blocks[node.block_id] = None
            if node.slot >= 0:
                self.slots[node.slot] = None
                self.num_cached_slots -= 1
            self.records.pop(node.record, None)
        return nodes[1:]

    def insert_stored(self, blocks: Iterable[StoredBlock]) -> None:
        """What is on disk, parents first. A prefix of unknown parent is kept apart, as a root's."""
        known = dict(self._roots)
        for block in blocks:
            parent = known.get(block.parent)
            if parent is None:
                parent = PrefixNode(None, b"", block.parent)
                known[block.parent] = self._roots[block.parent] = parent
            if len(block.token_ids) == self.key_bytes:
                node = known[block.digest] = self.child(parent, block.token_ids)
                if node.record < 0 and block.record not in self.records:
                    self.set_record(node, block.record)
            else:
                self.prune(parent)

    # --- checks ------------------------------------------------------------------------------

    def prefix_of(self, block_id: int) -> tuple[bytes, bytes] | None:
        """(root's digest, int32 tokens) of a cached block (walks to the root: for checks)."""
        node = self.blocks[block_id]
        if node is None:
            return None
        keys = []
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return node.digest, b"".join(reversed(keys))

    def nodes(self) -> list[PrefixNode]:
        """All of them, parents first, roots left out (for checks)."""
        nodes = list(self._roots.values())
        num_roots = len(nodes)
        for node in nodes:
            nodes += node.children()
        return nodes[num_roots:]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless maps, sorted keys and what is below the roots agree."""
        for digest, root in self._roots.items():
            if root.parent is not None or root.key or root.digest != digest:
                raise IntegrityError("I6", f"{root} is not a root")
        blocks, slots, records = {}, {}, {}
        for node in [*self._roots.values(), *self.nodes()]:
            if not (node.has_children or node.num_users or node.has_location):
                raise IntegrityError("I6", f"{node} is of no use, but in the tree")
            keys = sorted(child.key for child in node.children())
            for child in node.children():
                sound = node.child(child.key) is child and 0 < len(child.key) <= self.key_bytes
                if not sound or child.parent is not node:
                    raise IntegrityError("I6", f"{child} is misplaced in the tree")
            if node.sorted_keys is not None and list(node.sorted_keys) != keys:
                raise IntegrityError("I6", f"the sorted keys of {node} are not its children's")
            is_partial = 0 < len(node.key) < self.key_bytes
            if is_partial and (node.has_children or node.record >= 0):
                raise IntegrityError("I6", f"{node} is not full, but has children or a record")
            blocks[node.block_id] = slots[node.slot] = records[node.record] = node
        for name, found, known in (
            ("block", blocks, _by_number(self.blocks)),
            ("slot", slots, _by_number(self.slots)),
            ("record", records, self.records),
        ):
            found.pop(NOWHERE, None)
            if found != known:
                raise IntegrityError("I6", f"{name}s of nodes: {found}, in the map: {known}")
        if len(slots) != self.num_cached_slots:
            raise IntegrityError("I6", f"{len(slots)} slots, {self.num_cached_slots} are counted")


def _by_number(nodes: list[PrefixNode | None]) -> dict[int, PrefixNode]:
    return {number: node for number, node in enumerate(nodes) if node is not None}
