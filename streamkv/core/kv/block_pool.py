"""BlockPool: reference counts of KV blocks, and the order in which free ones are taken.

Owns which block is free and which is next to be taken. Must not know sequences, tokens or what
a block contains. Invariant: a block below `num_blocks` is in one of the free lists exactly while
its count is 0; one above (after `resize`) never is.

A free block keeps its contents until it is taken, so a cached one can be revived by `acquire`.
Pinned blocks are in a list of their own, from which is taken when the other one is empty. Both
are circular doubly linked lists threaded through two lists of numbers, so that each operation takes
the same time whatever the size of the pool (a dict in this order would be built anew now and then).
Host slots have a pool as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..integrity import IntegrityError

_FREE, _PINNED = 0, 1  # the entries that are the ends of the lists; block b's entry is b + _BLOCKS
_BLOCKS = 2


class BlockPool:
    """Blocks 0 .. num_blocks-1, all usable."""

    __slots__ = (
        "_is_pinned",
        "_next",
        "_num_retiring",
        "_prev",
        "num_blocks",
        "num_free",
        "num_pinned",
        "ref_counts",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = 0
        self.num_free = 0  # pinned ones included
        self.num_pinned = 0  # free ones that are taken last
        self.ref_counts: list[int] = []
        self._num_retiring = 0  # referenced ones from `num_blocks` on
        self._is_pinned: list[bool] = []  # free, and in the pinned list
        self._next = [_FREE, _PINNED]
        self._prev = [_FREE, _PINNED]
        self.resize(num_blocks)

    @property
    def num_held(self) -> int:
        """Referenced ones, those included that retire when they are released."""
        return self.num_blocks - self.num_free + self._num_retiring

    def take(self) -> int:
        """The free block that was unused for longest, now referenced once; pinned ones last."""
        following = self._next
        entry = following[_FREE]
        block_id = entry - _BLOCKS
        if entry:  # as `_unlink` does it
            after = following[entry]
            following[_FREE] = after
            self._prev[after] = _FREE
            self.num_free -= 1
        elif self.num_pinned:
            block_id = following[_PINNED] - _BLOCKS
            self._unlink(block_id)
        else:
            raise IntegrityError("I1", "expected a free block, got an empty pool")
        self.ref_counts[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """One more reference; a free block is revived with its contents."""
        count = self.ref_counts[block_id]
        if count == 0:
            self._unlink(block_id)
        self.ref_counts[block_id] = count + 1

    def release(self, block_id: int, reuse_first: bool = False, pinned: bool = False) -> None:
        """One reference less. At 0 the block is free: next to be taken, or last of its list."""
        count = self.ref_counts[block_id] - 1
        if count < 0:
            raise IntegrityError("I1", f"block {block_id} was released more often than referenced")
        self.ref_counts[block_id] = count
        if count == 0:
            if block_id >= self.num_blocks:
                self._num_retiring -= 1
            else:
                self._link(block_id, reuse_first, pinned)

    def release_all(self, block_ids: Iterable[int]) -> None:
        """One reference less of each, which must be below `num_blocks`; the free ones go last."""
        ref_counts, previous, following = self.ref_counts, self._prev, self._next
        last = previous[_FREE]
        num_freed = 0
        for block_id in block_ids:
            count = ref_counts[block_id] - 1
            ref_counts[block_id] = count
            if count == 0:
                entry = block_id + _BLOCKS
                following[last] = entry
                previous[entry] = last
                last = entry
                num_freed += 1
            elif count < 0:
                raise IntegrityError("I1", f"block {block_id} was released, but not referenced")
        following[last] = _FREE
        previous[_FREE] = last
        self.num_free += num_freed

    def touch(self, block_id: int, reuse_first: bool = False, pinned: bool = False) -> None:
        """Put a block, if it is free, where `release` would put it now."""
        if self.ref_counts[block_id] == 0:
            self._unlink(block_id)
            self._link(block_id, reuse_first, pinned)

    def resize(self, num_blocks: int) -> list[int]:
        """Have that many blocks. Returns the free ones that are gone: nobody may name them again.

        Referenced ones retire when they are released.
        """
        old, ref_counts = self.num_blocks, self.ref_counts
        retired = [block_id for block_id in range(num_blocks, old) if ref_counts[block_id] == 0]
        for block_id in retired:
            self._unlink(block_id)
        num_more = num_blocks - len(ref_counts)
        for numbers in (ref_counts, self._next, self._prev):
            numbers += [0] * num_more
        self._is_pinned += [False] * num_more
        self.num_blocks = num_blocks
        self._num_retiring = sum(count > 0 for count in ref_counts[num_blocks:])
        for block_id in range(num_blocks - 1, old - 1, -1):  # to be taken in order
            if ref_counts[block_id] == 0:
                self._link(block_id, True, False)
        return retired

    def _link(self, block_id: int, reuse_first: bool, pinned: bool) -> None:
        following, previous, entry = self._next, self._prev, block_id + _BLOCKS
        end = _PINNED if pinned else _FREE
        after = following[end] if reuse_first else end
        before = previous[after]
        following[before] = previous[after] = entry
        previous[entry] = before
        following[entry] = after
        self.num_free += 1
        if pinned:
            self._is_pinned[block_id] = True
            self.num_pinned += 1

    def _unlink(self, block_id: int) -> None:
        following, previous, entry = self._next, self._prev, block_id + _BLOCKS
        before, after = previous[entry], following[entry]
        previous[after] = before
        following[before] = after
        self.num_free -= 1
        if self._is_pinned[block_id]:
            self._is_pinned[block_id] = False
            self.num_pinned -= 1

    def free_blocks(self, *, pinned: bool = False) -> list[int]:
        """One of the lists, next to be taken first (walks it: for checks and tests)."""
        blocks: list[int] = []
        end = _PINNED if pinned else _FREE
        entry = self._next[end]
        while entry != end and len(blocks) <= self.num_blocks:
            blocks.append(entry - _BLOCKS)
            entry = self._next[entry]
        return blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the free lists hold each unreferenced block once."""
        pinned = self.free_blocks(pinned=True)
        free = self.free_blocks() + pinned
        num_unreferenced = self.ref_counts[: self.num_blocks].count(0)
        if not len(set(free)) == len(free) == self.num_free == num_unreferenced:
            raise IntegrityError(
                "I1",
                f"{num_unreferenced} blocks are unreferenced, {self.num_free} are counted as free, "
                f"{len(free)} are in the free lists",
            )
        if any(self.ref_counts[block_id] or block_id >= self.num_blocks for block_id in free):
            raise IntegrityError("I1", "a referenced or retired block is in a free list")
        num_held = len(self.ref_counts) - self.ref_counts.count(0)
        if self.num_held != num_held:
            raise IntegrityError("I1", f"{num_held} are held, {self.num_held} are counted as held")
        marked = [block_id for block_id, mark in enumerate(self._is_pinned) if mark]
        if sorted(pinned) != marked or len(pinned) != self.num_pinned:
            raise IntegrityError(
                "I1", f"blocks {marked} are marked as pinned and free, listed are {sorted(pinned)}"
            )
