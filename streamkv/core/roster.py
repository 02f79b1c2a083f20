"""Roster: who waits, loads and runs, and in which row.

Owns the queues, the rows and every change of a Sequence's status, so also the moment when its
blocks go back to the KVManager. Must not know budgets, tokens or what a step computes. Invariant
(I3): status matches the queue, and a row belongs to at most one sequence. A group that is paused
has no row, and is in no queue.

Whatever a step in flight names, blocks and rows, stays taken until that step is committed, even if
the sequence ended or was preempted meanwhile.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from ..protocol import FinishReason
from .groups import SequenceGroup
from .integrity import IntegrityError
from .kv.manager import KVManager
from .kv.types import Keep
from .sequence import NO_ROW, Sequence, SequenceStatus, check_queue

_order = attrgetter("order")


class Roster:
    """All sequences that have not ended, and those that a step in flight still names."""

    __slots__ = (
        "_free_rows",
        "_kv",
        "_num_rows",
        "last_committed_step_id",
        "leading",
        "loading",
        "num_live",
        "num_paused",
        "num_releasing_blocks",
        "now_s",
        "paused",
        "removed_rows",
        "running",
        "waiting",
    )

    def __init__(self, kv: KVManager, num_rows: int) -> None:
        self._kv = kv
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows))  # a heap: low rows first
        self.removed_rows: list[int] = []  # for the next step
        self.waiting: list[Sequence] = []  # by order: for admission; not those of `aside`, `spare`
        self.running: list[Sequence] = []  # by order
        # By the free blocks each will need: they are not for others. In order, as all dicts here.
        self.loading: dict[Sequence, int] = {}
        # Groups whose leader runs while others are held back for it.
        self.leading: dict[SequenceGroup, None] = {}
        self.paused: dict[SequenceGroup, None] = {}  # until it is resumed
        self.num_live = 0  # not ended
        self.num_paused = 0  # of them
        self.num_releasing_blocks = 0  # in tables of those that left, but not yet their row
        self.last_committed_step_id = -1
        self.now_s = 0.0

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_used_rows(self) -> int:
        return self._num_rows - len(self._free_rows)

    @property
    def num_held_back(self) -> int:
        """Sequences whose row, and one block, isn't for others."""
        return sum(group.num_held_back for group in self.leading) if self.leading else 0

    # --- coming ------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        self.num_live += len(group.sequences)
        insort(self.waiting, group.sequences[0], key=_order)

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            insort(self.waiting, sequence, key=_order)

    @property
    def num_loading_blocks(self) -> int:
        """What is loaded isn't held: without these, loads would evict each other's blocks."""
        return sum(self.loading.values()) if self.loading else 0

    def begin_load(self, sequence: Sequence, num_blocks: int) -> None:
        """It waits for blocks, and others go on meanwhile."""
        self._leave(self.waiting, sequence)
        sequence.status = SequenceStatus.LOADING
        self.loading[sequence] = num_blocks

    def end_load(self, sequence: Sequence) -> None:
        """Back to its place in the queue; or aside, if its group has begun anew meanwhile."""
        del self.loading[sequence]
        sequence.status = SequenceStatus.WAITING
        group = sequence.group
        if group.leader is None or group.leader is sequence:
            insort(self.waiting, sequence, key=_order)
        else:
            insort(group.aside, sequence, key=_order)

    def take_row(self, sequence: Sequence) -> None:
        """It waited, and runs."""
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_order)

    def admit(self, sequence: Sequence) -> None:
        """From the queue."""
        self._leave(self.waiting, sequence)
        if sequence.num_preemptions:
            self._kv.unpin(sequence)
        self.take_row(sequence)
        group = sequence.group
        if sequence is group.leader:
            if group.num_held_back:
                self.leading[group] = None
            else:
                group.leader = None

    def let_followers_go(self, group: SequenceGroup) -> None:
        """The leader's prompt is cached."""
        self.enqueue(group.let_go())
        if not group.num_held_back:
            del self.leading[group]

    def settle_leading(self, group: SequenceGroup) -> None:
        """Its leader goes on alone if nobody is held back any more."""
        if group in self.leading and not group.num_held_back:
            del self.leading[group]
            group.leader = None

    def retable(self, sequence: Sequence) -> None:
        """Its row is to be added anew, with another table or other tokens."""
        sequence.num_slots = 0
        if sequence.is_row_known:
            sequence.is_row_known = False
            self.removed_rows.append(sequence.row)

    # --- leaving -----------------------------------------------------------------------------

    def preempt(self, group: SequenceGroup, keep: Keep) -> list[Sequence]:
        """All of the group that run go back to the queue, the first as leader. The last first."""
        running = [s for s in group.sequences if s.status is SequenceStatus.RUNNING]
        for sequence in running:
            self._stop_running(sequence, keep)
        self._gather(group)
        return running[::-1]

    def _gather(self, group: SequenceGroup) -> None:
        """Those of it that wait begin anew: the leader in the queue, unless it is paused."""
        self.leading.pop(group, None)
        for sequence in group.sequences:
            if sequence.status is SequenceStatus.WAITING:
                self._leave(self.waiting, sequence)
        leader = group.gather()
        if leader is not None and group not in self.paused:
            insort(self.waiting, leader, key=_order)

    def preempt_one(self, sequence: Sequence, keep: Keep) -> None:
        """It alone steps back; its group goes on."""
        self._stop_running(sequence, keep)
        insort(self.waiting, sequence, key=_order)

    def pause(self, group: SequenceGroup) -> None:
        """It leaves the queues, and its blocks stay cached as if it had ended. Idempotent."""
        live = [s for s in group.sequences if s.finish_reason is None]
        if not live or group in self.paused:
            return
        self.paused[group] = None
        self.num_paused += len(live)
        for sequence in live:
            if sequence.status is SequenceStatus.LOADING:
                del self.loading[sequence]
                self._kv.cancel_load(sequence)
                sequence.status = SequenceStatus.WAITING
            self._kv.unpin(sequence)
            sequence.keep = Keep.CACHE
        self.preempt(group, Keep.CACHE)

    def resume(self, group: SequenceGroup) -> None:
        """To its place in the queue. Idempotent."""
        if group in self.paused:
            del self.paused[group]
            self.num_paused -= sum(s.finish_reason is None for s in group.sequences)
            self._gather(group)

    def _stop_running(self, sequence: Sequence, keep: Keep) -> None:
        self._leave(self.running, sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        sequence.keep = keep
        if sequence.is_beam:  # what comes for it is of no use: beams go on together
            sequence.num_pending_tokens = 0
            sequence.group.drop_candidates()
        self._leave_row(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """For good."""
        group, status = sequence.group, sequence.status
        if status is SequenceStatus.RUNNING:
            self._leave(self.running, sequence)
        elif status is SequenceStatus.LOADING:
            del self.loading[sequence]
        elif not group.drop(sequence):
            self._leave(self.waiting, sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.num_pending_tokens = 0
        sequence.keep = Keep.CACHE
        self.num_live -= 1
        if status is SequenceStatus.RUNNING:
            self._leave_row(sequence)
        elif sequence.row == NO_ROW:
            self._settle(sequence)
        if self.paused and group in self.paused:
            self._end_paused(group)
        if sequence is group.leader:
            self._gather(group)
        else:
            self.settle_leading(group)

    def _end_paused(self, group: SequenceGroup) -> None:
        self.num_paused -= 1
        if all(s.finish_reason is not None for s in group.sequences):
            del self.paused[group]

    def _leave(self, queue: list[Sequence], sequence: Sequence) -> None:
        """It need not be in there."""
        index = bisect_left(queue, sequence.order, key=_order)
        if index < len(queue) and queue[index] is sequence:
            del queue[index]

    # --- rows and blocks ---------------------------------------------------------------------

    def rest(self, beam: Sequence) -> None:
        """There are fewer beams now: it is spare, and gives back row and blocks."""
        self._leave(self.running, beam)
        beam.status = SequenceStatus.WAITING
        self._leave_row(beam)

    def release_committed(self, sequences: Iterable[Sequence]) -> None:
        """Their step is committed: those that left meanwhile, and that no other step names, go."""
        for sequence in sequences:
            left = sequence.status is not SequenceStatus.RUNNING and sequence.row != NO_ROW
            if left and not self.is_in_flight(sequence):
                self.num_releasing_blocks -= len(sequence.block_table)
                self._release(sequence)

    def is_in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step_id > self.last_committed_step_id

    def _leave_row(self, sequence: Sequence) -> None:
        """Free blocks and row of one that no longer runs: now, or when `commit` says so."""
        if self.is_in_flight(sequence):
            self.num_releasing_blocks += len(sequence.block_table)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        kv, is_over = self._kv, sequence.status is SequenceStatus.FINISHED
        if sequence.is_lost:
            sequence.keep = Keep.FORGET
        else:
            # Of a token that was dropped in flight, nobody knows the content.
            num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
            kv.publish(sequence, num_known, tail=True)
            if is_over and sequence.request.session_id and sequence.group.holds_session(sequence):
                kv.keep_session(sequence.request, sequence, self.now_s)
        kv.release(sequence, keep=sequence.keep)
        sequence.num_slots = 0
        if sequence.is_row_known:
            sequence.is_row_known = False
            self.removed_rows.append(sequence.row)
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = NO_ROW
        if is_over:
            self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """It has ended and holds nothing any more."""
        kv = self._kv
        kv.cancel_load(sequence)
        kv.unpin(sequence)
        if sequence.group.is_over:
            kv.end_request(sequence.request)

    # --- checks ------------------------------------------------------------------------------

    def check_integrity(self, named: Iterable[Sequence]) -> list[Sequence]:
        """I3, and the sequences with a row: `named` are those of the steps in flight."""
        check_queue(self.waiting, SequenceStatus.WAITING)
        check_queue(self.running, SequenceStatus.RUNNING)
        holders = {s.order: s for s in self.running}
        holders.update((s.order, s) for s in named if s.row != NO_ROW)
        rows = sorted([*self._free_rows, *(s.row for s in holders.values())])
        if rows != list(range(self._num_rows)):
            raise IntegrityError("I3", f"rows {rows} are free or held, by {list(holders.values())}")
        self._check_without_row(holders)
        left = [s for s in holders.values() if s.status is not SequenceStatus.RUNNING]
        if sum(len(s.block_table) for s in left) != self.num_releasing_blocks:
            raise IntegrityError(
                "I1", f"{self.num_releasing_blocks} blocks wait for release, held by {left}"
            )
        return list(holders.values())

    def _check_without_row(self, holders: dict[tuple[int, int], Sequence]) -> None:
        leaders = [group.leader for group in self.paused if group.leader is not None]
        queued = {s: None for s in (*self.running, *self.waiting, *self.loading, *leaders)}
        groups = {s.group: None for s in queued}
        held_back = [s for group in groups for s in (*group.aside, *group.spare)]
        if len(queued) + len(held_back) != self.num_live or not queued.keys().isdisjoint(held_back):
            raise IntegrityError(
                "I3",
                f"expected {self.num_live} sequences in one queue each, got {list(queued)}, "
                f"held back {held_back}",
            )
        for sequence in (*queued, *held_back):
            if sequence.order not in holders and (sequence.row != NO_ROW or sequence.block_table):
                raise IntegrityError("I3", f"{sequence} waits with a row or blocks")
        self._check_paused()
        for group in self.leading:
            if not group.num_held_back or group not in groups:
                raise IntegrityError("I3", f"nobody of {group.sequences} is held back")

    def _check_paused(self) -> None:
        queued = (*self.running, *self.waiting, *self.loading)
        if any(sequence.group in self.paused for sequence in queued):
            raise IntegrityError("I3", f"a paused one is in a queue: {queued}")
        num_paused = sum(s.finish_reason is None for group in self.paused for s in group.sequences)
        if num_paused != self.num_paused:
            raise IntegrityError("I3", f"{num_paused} are paused, counted {self.num_paused}")
