"""FakeMemory: blocks and host slots of the FakeRunner, with copies between them. FakeStore: a disk.

A place for one token holds (token, position). Copies to and from host memory may take some steps:
until then their target holds nothing, so that a read that comes too early shows, and what they
read must not change meanwhile.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from streamkv.protocol import CopyKind, StoredBlock, StoreOp, StoreResult, unpack_ints

EMPTY = -1


class Content(NamedTuple):
    """Of one block or slot; both [block_size]."""

    token_ids: array[int]
    positions: array[int]

    def copy(self) -> Content:
        return Content(self.token_ids[:], self.positions[:])

    @property
    def is_empty(self) -> bool:
        return all(position == EMPTY for position in self.positions)


class _Copy(NamedTuple):
    number: int
    kind: CopyKind
    source: int
    target: int
    content: Content  # of the source when the copy began
    end_step: int  # the step whose output tells of it


class FakeMemory:
    """`copy_delay`: steps that a copy to or from host memory takes; one without tokens waits for
    all. `fails_copy(number, kind)`: which copies fail. `violate` is told what is wrong."""

    def __init__(
        self,
        num_blocks: int,
        num_host_slots: int,
        block_size: int,
        violate: Callable[[str], None],
        *,
        copy_delay: int = 0,
    ) -> None:
        self.block_size = block_size
        self.blocks = [self._empty() for _ in range(num_blocks)]
        self.slots = [self._empty() for _ in range(num_host_slots)]
        self.copy_delay = copy_delay
        self.fails_copy: Callable[[int, CopyKind], bool] = lambda number, kind: False
        self.num_copies = {kind: 0 for kind in CopyKind}
        self._violate = violate
        self._pending: list[_Copy] = []

    def _empty(self) -> Content:
        return Content(*(array("i", [EMPTY] * self.block_size) for _ in range(2)))

    def _side(self, kind: CopyKind, *, is_source: bool) -> list[Content]:
        is_host = kind is (CopyKind.IN if is_source else CopyKind.OUT)
        return self.slots if is_host else self.blocks

    def begin(
        self, step_id: int, copies: Sequence[tuple[int, ...]], *, waits: bool, fails: bool
    ) -> list[int]:
        """Begin a step's copies, in this order. Returns the blocks that now hold nothing because a
        copy to them failed. With `fails` none is made, nor told of."""
        spoilt: list[int] = []
        for number, code, source, target in copies:
            kind = CopyKind(code)
            sources = self._side(kind, is_source=True)
            targets = self._side(kind, is_source=False)
            if not (0 <= source < len(sources) and 0 <= target < len(targets)):
                self._violate(f"{kind.name} copy {number} from {source} to {target}: no such place")
                continue
            if any(number == other.number for other in self._pending):
                self._violate(f"copy {number} is on its way already")
            content = sources[source].copy()
            if content.is_empty:
                self._violate(f"{kind.name} copy {number} reads {source}, which was never written")
            targets[target] = self._empty()
            if fails:
                continue
            self.num_copies[kind] += 1
            is_now = kind is CopyKind.BLOCK or waits
            end_step = step_id + (0 if is_now else self.copy_delay)
            copy = _Copy(number, kind, source, target, content, end_step)
            if kind is not CopyKind.BLOCK:
                self._pending.append(copy)
            elif self.fails_copy(number, kind):
                spoilt.append(target)
                self._pending.append(copy)
            else:
                targets[target] = content
                self._pending.append(copy)
        return spoilt

    def end(self, step_id: int, *, waits: bool) -> tuple[list[int], list[int]]:
        """The numbers of copies that are done with this step, and of those that failed."""
        done: list[int] = []
        failed: list[int] = []
        ended = [copy for copy in self._pending if waits or copy.end_step <= step_id]
        self._pending = [copy for copy in self._pending if copy not in ended]
        for copy in ended:
            if self.fails_copy(copy.number, copy.kind):
                failed.append(copy.number)
                continue
            done.append(copy.number)
            if copy.kind is CopyKind.BLOCK:
                continue
            targets = self._side(copy.kind, is_source=False)
            if not targets[copy.target].is_empty:
                self._violate(f"the target of {copy} was written meanwhile")
            # The block of an eviction may have a new owner by now; a slot may not.
            if copy.kind is CopyKind.IN and self.slots[copy.source] != copy.content:
                self._violate(f"the source of {copy} was written meanwhile")
            targets[copy.target] = copy.content.copy()
        return done, failed

    def write(self, block_id: int, place: int, token_id: int, position: int) -> None:
        self.blocks[block_id].token_ids[place] = token_id
        self.blocks[block_id].positions[place] = position

    def read(self, block_ids: Iterable[int]) -> Content:
        """Of all places of these blocks, in order."""
        token_ids, positions = array("i"), array("i")
        for block_id in block_ids:
            token_ids += self.blocks[block_id].token_ids
            positions += self.blocks[block_id].positions
        return Content(token_ids, positions)


def root_digest(cache_salt: str) -> bytes:
    return hashlib.blake2b(cache_salt.encode(), digest_size=32).digest()


def block_digest(parent: bytes, token_ids: bytes) -> bytes:
    return hashlib.blake2b(parent + token_ids, digest_size=32).digest()


class FakeStore:
    """Implements protocol.BlockStore over the slots of a FakeMemory, which may be another one at
    each start: the records stay. Results come when `deliver` is called, or at once (`is_prompt`).

    `fails(op)`: which operations fail. `drop` says with the next result that records are gone.
    """

    def __init__(self, *, is_prompt: bool = False) -> None:
        self.memory: FakeMemory | None = None  # the runner's, given by `attach`
        self.is_prompt = is_prompt
        self.fails: Callable[[StoreOp], bool] = lambda op: False
        self.records: dict[int, tuple[StoredBlock, Content]] = {}
        self.violations: list[str] = []
        self.closed = False
        self._callback: Callable[[StoreResult], None] | None = None
        self._ops: deque[tuple[StoreOp, Content]] = deque()
        self._dropped: list[int] = []
        self._numbers = itertools.count()

    def attach(self, memory: FakeMemory) -> None:
        """A start: what was on its way is lost, the callback is to be given anew."""
        self.memory, self.closed = memory, False
        self._ops.clear()
        self._dropped.clear()
        self._callback = None

    @property
    def num_pending(self) -> int:
        return len(self._ops)

    # --- protocol.BlockStore -----------------------------------------------------------------

    def index(self) -> Iterable[StoredBlock]:
        return [block for block, _ in self.records.values()]

    def on_result(self, callback: Callable[[StoreResult], None]) -> None:
        self._callback = callback

    def submit(self, op: StoreOp) -> None:
        assert self.memory is not None
        content = self.memory.slots[op.slot]
        if op.is_write:
            if content.token_ids != unpack_ints(op.block.token_ids):
                self.violations.append(f"{op} writes a slot that holds {content}")
            if op.block.digest != block_digest(op.block.parent, op.block.token_ids):
                self.violations.append(f"{op} has another digest")
        else:
            self.memory.slots[op.slot] = content = self.memory._empty()
        self._ops.append((op, content.copy()))
        if self.is_prompt:
            self.deliver()

    def close(self) -> None:
        if not self.closed:
            self.deliver()
        self.closed = True

    # --- for the test ------------------------------------------------------------------------

    def drop(self, record: int) -> None:
        self.records.pop(record, None)
        self._dropped.append(record)

    def deliver(self, num: int | None = None) -> None:
        """The results of the oldest `num` operations, of all without a number."""
        for _ in range(len(self._ops) if num is None else min(num, len(self._ops))):
            assert self._callback is not None, "the scheduler never asked for results"
            self._callback(self._end(*self._ops.popleft()))

    def _end(self, op: StoreOp, content: Content) -> StoreResult:
        assert self.memory is not None
        dropped, self._dropped = tuple(self._dropped), []
        if self.memory.slots[op.slot] != content:
            self.violations.append(f"the slot of {op} was written meanwhile")
        if self.fails(op):
            return StoreResult(op.number, False, dropped=dropped)
        if op.is_write:
            record = next(self._numbers)
            self.records[record] = op.block._replace(record=record), content
            return StoreResult(op.number, True, record, dropped)
        block, stored = self.records.get(op.block.record, (None, None))
        if block is None or stored is None or block.digest != op.block.digest:
            return StoreResult(op.number, False, dropped=dropped)
        self.memory.slots[op.slot] = stored.copy()
        return StoreResult(op.number, True, op.block.record, dropped)
