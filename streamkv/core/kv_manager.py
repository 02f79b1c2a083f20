"""KVManager: the block tables of sequences over BlockPool and PrefixTree.

Owns every change to `Sequence.block_table` and `Sequence.prefix_node`, and keeps pool and tree in
step: a block taken for new tokens leaves the tree, a published one stays revivable once released.
Must not know queues, budgets or steps. Invariant: a table has exactly the blocks its computed
tokens need, and a block in two tables is full and published.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol import pack_ints
from .block_pool import BlockPool
from .integrity import IntegrityError
from .prefix_tree import PrefixMatch, PrefixTree
from .sequence import Sequence


class KVManager:
    """Hands out blocks; `tree` is None without prefix caching."""

    __slots__ = ("block_size", "pool", "tree")

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size) if enable_prefix_caching else None

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The cached prefix of its tokens; takes no reference."""
        if self.tree is None:
            return PrefixMatch(None, [])
        return self.tree.match(sequence.token_ids, sequence.request.cache_salt)

    def num_free_blocks_needed(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Free blocks it takes to hold all its tokens: new ones and hits that are free now."""
        ref_counts = self.pool.ref_counts
        num_held_hits = sum(1 for block_id in match.block_ids if ref_counts[block_id])
        return self.num_blocks_for(sequence.num_tokens) - num_held_hits

    def share(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Begin the (empty) table of a sequence with the blocks of a match."""
        for block_id in match.block_ids:
            self.pool.acquire(block_id)
        sequence.block_table = list(match.block_ids)
        sequence.prefix_node = match.node
        sequence.num_computed_tokens = len(match.block_ids) * self.block_size

    def append(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Append that many blocks, which must be free, and return their ids."""
        block_ids = [self.pool.take() for _ in range(num_blocks)]
        if self.tree is not None:
            for block_id in block_ids:
                self.tree.evict(block_id)
        sequence.block_table += block_ids
        return block_ids

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Offer the full blocks of its first `num_tokens` tokens, whose KV is computed."""
        tree, node, block_size = self.tree, sequence.prefix_node, self.block_size
        if tree is None:
            return
        if node is not None and node.parent is None:
            # It was evicted with an ancestor whose block this table does not hold (but a copy).
            node = None
        first = 0 if node is None else node.num_blocks
        for index in range(first, num_tokens // block_size):
            tokens = sequence.token_ids[index * block_size : (index + 1) * block_size]
            block_id = sequence.block_table[index]
            node = tree.publish(node, sequence.request.cache_salt, tokens, block_id)
        sequence.prefix_node = node

    def release(self, sequence: Sequence) -> None:
        """Give back its table, tail first, so that leaves are evicted before their parents."""
        tree, pool = self.tree, self.pool
        for block_id in reversed(sequence.block_table):
            pool.release(block_id, reuse_first=tree is None or block_id not in tree)
        sequence.block_table = []
        sequence.prefix_node = None
        sequence.num_computed_tokens = 0

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raise IntegrityError unless pool and tree agree with the tables of all `holders`."""
        self.pool.check_integrity()
        if self.tree is not None:
            self.tree.check_integrity()
        ref_counts = [0] * self.pool.num_blocks
        for sequence in holders:
            table = sequence.block_table
            num_computed = sequence.num_computed_tokens
            if num_computed > sequence.num_tokens and sequence.finish_reason is None:
                raise IntegrityError("I2", f"{sequence} computed more tokens than it has")
            if len(table) != self.num_blocks_for(num_computed):
                raise IntegrityError("I2", f"{sequence} has a table of the wrong length")
            for block_id in table:
                ref_counts[block_id] += 1
            self._check_shared(sequence)
        if ref_counts != list(self.pool.ref_counts):
            wrong = {
                b: (counted, held)
                for b, (counted, held) in enumerate(
                    zip(self.pool.ref_counts, ref_counts, strict=True)
                )
                if counted != held
            }
            raise IntegrityError("I1", f"blocks by (reference count, tables holding it): {wrong}")

    def _check_shared(self, sequence: Sequence) -> None:
        """I6: a shared or published block of this table holds this sequence's prefix."""
        for index, block_id in enumerate(sequence.block_table):
            prefix = None if self.tree is None else self.tree.prefix_of(block_id)
            if prefix is None and self.pool.ref_counts[block_id] == 1:
                continue
            token_ids = sequence.token_ids[: (index + 1) * self.block_size]
            if prefix != (sequence.request.cache_salt, pack_ints(token_ids)):
                raise IntegrityError("I6", f"block {block_id} of {sequence} holds another prefix")
