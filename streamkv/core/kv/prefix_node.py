"""PrefixNode: a block of tokens after a prefix, and where its KV is.

Owns the node's place among its siblings. Must not know who uses it, or which tier is full.
Invariants: keys are the tokens themselves (packed int32), so equal hashes of different tokens
can't be confused; a child with fewer than block_size tokens has no children; `sorted_keys`, once
there are many children, has the keys of all of them. A child is the only one or in a dict: most
nodes have one at most, and there are many nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from .sorted_keys import SortedKeys

INT32_BYTES = 4
NOWHERE = -1
_FEW = 8  # children that are looked through one by one


class PrefixNode:
    """`parent` is None for a root and for a node that is in no tree any more."""

    __slots__ = (
        "_digest",
        "_many",
        "block_id",
        "given_up",
        "is_queued",
        "key",
        "num_tokens",
        "num_users",
        "only_child",
        "parent",
        "pins",
        "record",
        "slot",
        "sorted_keys",
    )

    def __init__(self, parent: PrefixNode | None, key: bytes, digest: bytes = b"") -> None:
        self.parent = parent
        self.key = key  # int32 [1 .. block_size]; empty for a root
        self.num_tokens: int = (  # root .. here
            0 if parent is None else parent.num_tokens + len(key) // INT32_BYTES
        )
        self.block_id = NOWHERE  # on the device
        self.slot = NOWHERE  # in host memory
        self.record = NOWHERE  # on disk
        self.only_child: PrefixNode | None = None
        self._many: dict[bytes, PrefixNode] = _NONE  # all children, unless there is only one
        self.sorted_keys: SortedKeys | None = None
        self.pins = 0  # who wants it to be evicted last
        self.num_users = 0  # copies and reads on their way that end here: it stays in the tree
        self.given_up = False  # not worth a copy to host memory
        self.is_queued = False  # to be written to disk
        self._digest = digest

    @property
    def has_location(self) -> bool:
        return self.block_id >= 0 or self.slot >= 0 or self.record >= 0

    @property
    def is_attached(self) -> bool:
        """In a tree; asked of a node, not of a root."""
        return self.parent is not None

    @property
    def digest(self) -> bytes:
        """Of the prefix that ends here; computed when asked for, and those of its parents."""
        path = []
        node = self
        while not node._digest:
            assert node.parent is not None, "asked of a node in a tree"
            path.append(node)
            node = node.parent
        digest = node._digest
        for node in reversed(path):
            digest = node._digest = blake2b(digest + node.key, digest_size=32).digest()
        return digest

    def path(self) -> list[PrefixNode]:
        """From the first block to this one; the root isn't in it. Empty if not in a tree."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    @property
    def has_children(self) -> bool:
        return self.only_child is not None or bool(self._many)

    def children(self) -> Collection[PrefixNode]:
        only = self.only_child
        return self._many.values() if only is None else (only,)

    def child(self, key: bytes) -> PrefixNode | None:
        only = self.only_child
        if only is None:
            return self._many.get(key)
        return only if only.key == key else None

    def add_child(self, key: bytes) -> PrefixNode:
        """A new one, nowhere yet."""
        child, many, only = PrefixNode(self, key), self._many, self.only_child
        if only is not None:
            self._many, self.only_child = {only.key: only, key: child}, None
        elif many:
            many[key] = child
            if self.sorted_keys is not None:
                self.sorted_keys.add(key)
            elif len(many) > _FEW:
                self.sorted_keys = SortedKeys(many)
        else:
            self.only_child = child
        return child

    def remove_child(self, child: PrefixNode) -> None:
        child.parent = None
        if self.only_child is child:
            self.only_child = None
            return
        del self._many[child.key]
        if not self._many:
            self._many, self.sorted_keys = _NONE, None
        elif self.sorted_keys is not None:
            self.sorted_keys.remove(child.key)

    def similar_children(self, key: bytes) -> Iterable[PrefixNode]:
        """Those with the longest common beginning with `key`, and a few others."""
        if self.sorted_keys is None:
            return self.children()
        return [self._many[key] for key in self.sorted_keys.around(key, 2)]

    def __repr__(self) -> str:
        return (
            f"<PrefixNode tokens={self.num_tokens} block={self.block_id} slot={self.slot} "
            f"record={self.record} pins={self.pins} users={self.num_users}>"
        )


_NONE: dict[bytes, PrefixNode] = {}  # of all that have none or one; never written to


class PrefixMatch(NamedTuple):
    """What is cached of some tokens, from their beginning; at least one token isn't in it."""

    nodes: list[PrefixNode]  # full blocks, in order, each on some tier
    num_device: int  # of them, from the first, that are on the device
    tail: PrefixNode | None = None  # the next block, if it begins with the tokens that follow
    num_tail_tokens: int = 0  # how many of its tokens match

    @property
    def is_on_device(self) -> bool:
        return self.num_device == len(self.nodes) and (self.tail is None or self.tail.block_id >= 0)


def num_common_tokens(a: bytes, b: bytes) -> int:
    """Packed int32 that are equal in both, from the beginning."""
    num_bytes = min(len(a), len(b))
    different = int.from_bytes(a[:num_bytes], "little") ^ int.from_bytes(b[:num_bytes], "little")
    if different:
        num_bytes = ((different & -different).bit_length() - 1) // 8
    return num_bytes // INT32_BYTES


@lru_cache(maxsize=1024)
def salt_digest(cache_salt: str) -> bytes:
    """Of the empty prefix."""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
