"""PrefixTree: which block holds the KV of which token prefix.

Owns the map from token content to published blocks: a radix tree with one full block per node,
one root per cache salt. Must not know sequences, reference counts or the order of eviction.
Invariants: a block belongs to at most one node; each node is reachable from its root; the keys
on the way from the root are the tokens whose KV the blocks hold. Keys are the tokens themselves
(packed int32), so equal hashes of different tokens can't be confused.

A node may outlive its parent's block, since a sequence that computed the same prefix twice holds
its own copy of the parent. Evicting a node therefore takes its whole subtree out of the tree.
"""

from __future__ import annotations

from typing import NamedTuple

from ..protocol import pack_ints
from .integrity import IntegrityError

INT32_BYTES = 4
ROOT = -1


class PrefixNode:
    """A full block and the prefix it ends. `parent` is None for a root and once evicted."""

    __slots__ = ("block_id", "cache_salt", "children", "key", "num_blocks", "parent")

    def __init__(
        self, parent: PrefixNode | None, cache_salt: str, key: bytes, block_id: int
    ) -> None:
        self.parent = parent
        self.cache_salt = cache_salt
        self.key = key  # int32 [block_size]; empty for a root
        self.block_id = block_id  # ROOT for a root
        self.num_blocks: int = 0 if parent is None else parent.num_blocks + 1  # root .. here
        self.children: dict[bytes, PrefixNode] = {}


class PrefixMatch(NamedTuple):
    """The longest cached prefix: its last node (None: no hit) and its blocks in order."""

    node: PrefixNode | None
    block_ids: list[int]


class PrefixTree:
    """Published blocks by token content and salt."""

    __slots__ = ("_block_len_bytes", "_nodes", "_roots", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block_len_bytes = block_size * INT32_BYTES
        self._roots: dict[str, PrefixNode] = {}
        self._nodes: dict[int, PrefixNode] = {}  # by block id

    def __len__(self) -> int:
        """Number of published blocks."""
        return len(self._nodes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._nodes

    def match(self, token_ids: list[int], cache_salt: str) -> PrefixMatch:
        """The longest published prefix that leaves at least one token to compute."""
        node = self._roots.get(cache_salt)
        block_ids: list[int] = []
        if node is None:
            return PrefixMatch(None, block_ids)
        packed = pack_ints(token_ids)
        step = self._block_len_bytes
        end = (len(token_ids) - 1) // self.block_size * step
        for begin in range(0, end, step):
            child = node.children.get(packed[begin : begin + step])
            if child is None:
                break
            node = child
            block_ids.append(node.block_id)
        return PrefixMatch(node if block_ids else None, block_ids)

    def publish(
        self, parent: PrefixNode | None, cache_salt: str, token_ids: list[int], block_id: int
    ) -> PrefixNode:
        """The node of these `block_size` tokens after `parent` (None: at the beginning).

        If the content is published already, the block that came first stays the shared one.
        """
        if parent is None:
            parent = self._roots.get(cache_salt)
            if parent is None:
                parent = PrefixNode(None, cache_salt, b"", ROOT)
                self._roots[cache_salt] = parent
        key = pack_ints(token_ids)
        node = parent.children.get(key)
        if node is None:
            if block_id in self._nodes:
                raise IntegrityError("I6", f"block {block_id} is published for two prefixes")
            node = PrefixNode(parent, cache_salt, key, block_id)
            parent.children[key] = node
            self._nodes[block_id] = node
        return node

    def evict(self, block_id: int) -> None:
        """Forget the block and every prefix that goes on from it; unpublished: nothing to do."""
        evicted = self._nodes.get(block_id)
        if evicted is None:
            return
        parent = evicted.parent
        if parent is not None:
            del parent.children[evicted.key]
            if parent.block_id == ROOT and not parent.children:
                del self._roots[parent.cache_salt]
        subtree = [evicted]
        while subtree:
            node = subtree.pop()
            subtree.extend(node.children.values())
            node.children = {}
            node.parent = None
            del self._nodes[node.block_id]

    def prefix_of(self, block_id: int) -> tuple[str, bytes] | None:
        """(salt, int32 tokens) of a published block (walks to the root: for checks)."""
        node = self._nodes.get(block_id)
        if node is None:
            return None
        keys = []
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return node.cache_salt, b"".join(reversed(keys))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the nodes by block are exactly those below the roots."""
        reachable: dict[int, PrefixNode] = {}
        stack = list(self._roots.values())
        for root in stack:
            if not root.children or root.parent is not None:
                raise IntegrityError(
                    "I6", f"root of salt {root.cache_salt!r} is empty or not a root"
                )
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                sound = child.key == key and len(key) == self._block_len_bytes
                if not sound or child.parent is not node or child.block_id in reachable:
                    raise IntegrityError("I6", f"block {child.block_id} is misplaced in the tree")
                reachable[child.block_id] = child
                stack.append(child)
        if reachable != self._nodes:
            raise IntegrityError(
                "I6", f"published blocks {sorted(self._nodes)}, reachable {sorted(reachable)}"
            )
