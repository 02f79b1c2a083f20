"""BlockPool: reference counts of KV blocks, and the free list in the order of reuse.

Owns which block is free and which is next to be taken. Must not know sequences, tokens or what
a block contains. Invariant: a block is in the free list exactly while its count is 0.

A free block keeps its contents until it is taken, so a cached one can be revived by `acquire`.
The free list is a circular doubly linked list threaded through two int arrays, so that each
operation takes the same time whatever the size of the pool.
"""

from __future__ import annotations

from array import array

from .integrity import IntegrityError


class BlockPool:
    """Blocks 0 .. num_blocks-1, all usable."""

    __slots__ = ("_end", "_next", "_prev", "num_blocks", "num_free", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts: array[int] = array("i", bytes(4 * num_blocks))
        # The entry after the last block is the list's two ends: next of it is taken first.
        self._end = num_blocks
        self._next: array[int] = array("i", range(1, num_blocks + 2))
        self._prev: array[int] = array("i", range(-1, num_blocks))
        self._next[self._end] = 0
        self._prev[0] = self._end

    def take(self) -> int:
        """The free block that was unused for longest, now referenced once."""
        block_id = self._next[self._end]
        if block_id == self._end:
            raise IntegrityError("I1", "expected a free block, got an empty pool")
        self._unlink(block_id)
        self.ref_counts[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """One more reference; a free block is revived with its contents."""
        if self.ref_counts[block_id] == 0:
            self._unlink(block_id)
        self.ref_counts[block_id] += 1

    def release(self, block_id: int, *, reuse_first: bool) -> None:
        """One reference less. At 0 the block is free: next to be taken, or last (`reuse_first`)."""
        count = self.ref_counts[block_id] - 1
        if count < 0:
            raise IntegrityError("I1", f"block {block_id} was released more often than referenced")
        self.ref_counts[block_id] = count
        if count == 0:
            after = self._end if reuse_first else self._prev[self._end]
            before = self._next[after]
            self._next[after] = self._prev[before] = block_id
            self._prev[block_id], self._next[block_id] = after, before
            self.num_free += 1

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def free_blocks(self) -> list[int]:
        """Free blocks, next to be taken first (walks the list: for checks and tests)."""
        blocks: list[int] = []
        block_id = self._next[self._end]
        while block_id != self._end and len(blocks) <= self.num_blocks:
            blocks.append(block_id)
            block_id = self._next[block_id]
        return blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the free list holds each unreferenced block once."""
        free = self.free_blocks()
        num_unreferenced = self.ref_counts.count(0)
        if not len(set(free)) == len(free) == self.num_free == num_unreferenced:
            raise IntegrityError(
                "I1",
                f"{num_unreferenced} blocks are unreferenced, {self.num_free} are counted as free, "
                f"{len(free)} are in the free list",
            )
        if any(self.ref_counts[block_id] for block_id in free):
            raise IntegrityError("I1", "a referenced block is in the free list")
