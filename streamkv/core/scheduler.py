"""Scheduler: which tokens run in the next step, and what its results mean.

Owns every Sequence from `add` to its release: queues, rows, block tables (through KVManager) and
the steps in flight. Must not know devices, text, clocks or randomness: the same commands give the
same decisions. One thread calls it.

There is no prefill or decode phase: a step hands out tokens so that each sequence's
num_computed_tokens catches up with its num_tokens. Running sequences come first, then waiting
ones, both in the order of priority, then arrival; so a preempted sequence stands before all that
came after it. Out of blocks, the last running sequence is preempted and recomputed later; a
sequence with none behind it keeps its blocks and sits out.

`schedule` may be called again before `commit` (overlap): it counts one new token for each row that
asked for a sample in an uncommitted step. Whatever a step in flight names, blocks and rows, stays
taken until that step is committed, even if the sequence ended or was preempted meanwhile.

Invariants (`check_integrity` checks I1-I4, I6, I7; the tests check the rest by simulation):
  I1  a block is free or referenced; its count equals the number of tables that hold it
  I2  computed <= tokens, and a table has exactly the blocks its computed tokens need
  I3  status matches the queue; a row belongs to at most one sequence
  I4  a step has 1 .. max_num_batched_tokens tokens and at most max_num_seqs rows, each >= 1 token
  I5  whatever fits alone finishes: with no step in flight and work to do, `schedule` gives a step
  I6  a block in two tables is full and published, with the prefix of both
  I7  once all sequences are gone, every block and row is free
  I8  a sequence has one terminal event (or one `finish` call) and none after it
  I9  tokens don't depend on batching, chunking, overlap, preemption or caching
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter
from typing import NamedTuple

from ..errors import CapacityError, ContextLengthError, InvalidRequestError
from ..protocol import FinishReason, Request, RowLogprobs, RowSampling, StepOutput, unpack_ints
from .integrity import IntegrityError
from .kv_manager import KVManager
from .sequence import NO_ROW, Sequence, SequenceStatus, check_queue
from .step_plan import SchedulerOutput, StepPlan

__all__ = ["NO_TOKEN", "Scheduler", "SchedulerOutput", "TokenEvent"]

NO_TOKEN = -1  # token_id of a terminal event that carries no token

_order = attrgetter("order")


class TokenEvent(NamedTuple):
    """One committed token, the end of a sequence, or both."""

    sequence: Sequence
    token_id: int  # NO_TOKEN if it ended without one
    logprobs: RowLogprobs | None
    finish_reason: FinishReason | None  # set in the last event of a sequence, in no other


class Scheduler:
    """Iteration-level continuous batching over a paged KV cache."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        enable_prefix_caching: bool = True,
    ) -> None:
        self._kv = KVManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self._max_num_batched_tokens = max_num_batched_tokens
        # A step has a token for each running row, so that none ever starves.
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._waiting: list[Sequence] = []  # by order
        self._running: list[Sequence] = []  # by order
        self._in_flight: deque[StepPlan] = deque()
        self._free_rows = list(range(self._max_num_seqs))  # a heap: low rows first
        self._removed_rows: list[int] = []  # for the next step
        self._num_releasing_blocks = 0  # in tables of sequences that ended or were preempted
        self._refused: tuple[Sequence | None, int] = (None, 0)  # head that didn't fit, free blocks
        self._num_arrivals = 0
        self._next_step_id = 0
        self._last_committed_step_id = -1
        self.num_preemptions = 0
        self.num_prefix_queries_tokens = 0  # tokens looked up at first admissions
        self.num_prefix_hit_tokens = 0  # of these, found

    # --- what goes on ------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight_steps(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Something waits, runs, or is named by a step in flight."""
        return bool(self._waiting or self._running or self._in_flight)

    @property
    def num_free_blocks(self) -> int:
        return self._kv.pool.num_free

    @property
    def num_held_blocks(self) -> int:
        """Blocks in the tables of sequences (cached blocks that nobody uses count as free)."""
        return self._kv.pool.num_blocks - self._kv.pool.num_free

    # --- commands ----------------------------------------------------------------------------

    def check_admissible(self, request: Request) -> None:
        """Raise InvalidRequestError, ContextLengthError or CapacityError if it could never run."""
        num_prompt_tokens = len(request.prompt_token_ids)
        for name, number in (("prompt", num_prompt_tokens), ("max_tokens", request.max_tokens)):
            if number < 1:
                raise InvalidRequestError(
                    f"{name}: expected at least one token, got {number}", param=name
                )
        num_tokens = num_prompt_tokens + request.max_tokens
        if num_tokens > self._max_model_len:
            raise ContextLengthError(
                f"expected at most {self._max_model_len} tokens of context, got {num_tokens} "
                f"({num_prompt_tokens} in the prompt + max_tokens {request.max_tokens}); "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        block_size, num_blocks = self._kv.block_size, self._kv.pool.num_blocks
        num_needed = self._kv.num_blocks_for(num_tokens)
        if num_needed > num_blocks:
            raise CapacityError(
                f"needs {num_needed} blocks of {block_size} tokens ({num_prompt_tokens} in the "
                f"prompt + max_tokens {request.max_tokens}), the pool has {num_blocks} "
                f"({num_blocks * block_size} tokens); shorten the prompt, lower max_tokens, or "
                "give the server more KV memory",
                param="max_tokens",
            )

    def add(self, request: Request) -> list[Sequence]:
        """Queue its `sampling.n` choices. Raises as `check_admissible` does."""
        self.check_admissible(request)
        params = request.sampling
        end_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        if params.stop_token_ids:
            end_token_ids = end_token_ids.union(params.stop_token_ids)
        token_ids = list(request.prompt_token_ids)
        sampling = RowSampling.build(request, 0, self._eos_token_ids)
        sequences = []
        for choice in range(params.n):
            sequence = Sequence(
                request,
                choice,
                arrival=self._num_arrivals,
                token_ids=token_ids,
                end_token_ids=end_token_ids,
                sampling=sampling,
            )
            self._num_arrivals += 1
            insort(self._waiting, sequence, key=_order)
            sequences.append(sequence)
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence from outside; its later tokens are dropped. Idempotent."""
        if sequence.finish_reason is None:
            self._end(sequence, reason)

    # --- a step ------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if no token can be scheduled before the next commit or add."""
        plan = StepPlan(self._next_step_id, self._max_num_batched_tokens)
        all_served = self._schedule_running(plan)
        if all_served and not plan.preempted:
            self._admit_waiting(plan)
        if not plan.scheduled:
            return None
        output = plan.build(self._removed_rows)
        self._removed_rows.clear()
        self._next_step_id += 1
        self._in_flight.append(plan)
        return output

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Give each running sequence tokens, in order. False if one sat out for want of blocks."""
        running, block_size = self._running, self._kv.block_size
        all_served = True
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            count = sequence.num_uncomputed_tokens
            if count > 1:
                # One token of the budget is kept for each row behind: decode never starves.
                count = min(count, plan.budget - (len(running) - index))
            elif count == 0:  # its last token is in flight
                continue
            end = sequence.num_computed_tokens + count
            if end > len(sequence.block_table) * block_size:
                # Blocks go to the first in need: who comes after one that sat out gets none.
                if not all_served or not self._make_room(sequence, end, plan):
                    all_served = False
                    continue
                num_new = self._kv.num_blocks_for(end) - len(sequence.block_table)
                plan.append_blocks(sequence.row, self._kv.append(sequence, num_new))
            plan.schedule_tokens(sequence, count)
        return all_served

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Preempt from the end until the blocks for `num_tokens` are free. False: not yet.

        Nobody is preempted for blocks that come back with a step in flight, and only sequences
        behind this one are: preempting itself would give its blocks to nobody who asked.
        """
        pool = self._kv.pool
        num_new = self._kv.num_blocks_for(num_tokens) - len(sequence.block_table)
        while pool.num_free < num_new:
            last = self._running[-1]
            will_be_free = pool.num_free + self._num_releasing_blocks
            if will_be_free >= num_new or last is sequence or last.num_uncomputed_tokens == 0:
                return False
            self._preempt(self._running.pop(), plan)
        return True

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Back to the queue, to be recomputed; tokens in flight will still be committed."""
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_order)
        plan.preempted.append(sequence)
        self._leave_row(sequence)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Admit from the front while budget, rows and blocks last; nobody overtakes the head."""
        waiting, kv = self._waiting, self._kv
        while waiting and plan.budget and self._free_rows:
            sequence = waiting[0]
            if sequence.row != NO_ROW:  # preempted, and a step that names it is in flight
                return
            refused, num_free_blocks = self._refused
            if sequence is refused and kv.pool.num_free <= num_free_blocks:
                return
            match = kv.match(sequence)
            if kv.num_free_blocks_needed(sequence, match) > kv.pool.num_free:
                self._refused = (sequence, kv.pool.num_free)
                return
            del waiting[0]
            kv.share(sequence, match)
            self._admit(sequence, plan)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> None:
        """Give it a row and its first tokens."""
        kv = self._kv
        num_hit_tokens = sequence.num_computed_tokens
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_hit_tokens
            self.num_prefix_queries_tokens += len(sequence.token_ids)
            self.num_prefix_hit_tokens += num_hit_tokens
            sequence.token_ids = sequence.token_ids.copy()  # its own from now on
        count = min(sequence.num_uncomputed_tokens, plan.budget)
        num_blocks = kv.num_blocks_for(num_hit_tokens + count)
        kv.append(sequence, num_blocks - len(sequence.block_table))
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=_order)
        plan.add_row(sequence, sequence.sampling.of_choice(sequence.choice))
        plan.schedule_tokens(sequence, count)

    # --- its results -------------------------------------------------------------------------

    def commit(self, output: StepOutput) -> list[TokenEvent]:
        """Take in the results of the oldest step in flight and release what waited for it."""
        if not self._in_flight or self._in_flight[0].step_id != output.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none in flight"
            raise IntegrityError("I4", f"expected step {expected}, got step {output.step_id}")
        step = self._in_flight.popleft()
        self._last_committed_step_id = step.step_id
        events = self._fail(step) if output.error else self._take_tokens(step, output)
        if self._num_releasing_blocks:
            for sequence, _, _ in step.scheduled:
                left = sequence.status is not SequenceStatus.RUNNING and sequence.row != NO_ROW
                if left and not self._is_in_flight(sequence):
                    self._num_releasing_blocks -= len(sequence.block_table)
                    self._release(sequence)
        return events

    def _take_tokens(self, step: StepPlan, output: StepOutput) -> list[TokenEvent]:
        sampled = unpack_ints(output.sampled)
        num_asking = sum(step.asks)
        if len(sampled) != num_asking or len(output.logprobs) not in (0, num_asking):
            raise IntegrityError(
                "I4",
                f"expected {num_asking} tokens for step {step.step_id}, got {len(sampled)} "
                f"with {len(output.logprobs)} logprobs",
            )
        failed = frozenset(unpack_ints(output.failed))
        if not failed <= frozenset(range(num_asking)):
            raise IntegrityError(
                "I4", f"expected places below {num_asking} as failed, got {sorted(failed)}"
            )
        block_size = self._kv.block_size
        results = iter(
            enumerate(zip(sampled, output.logprobs or (None,) * num_asking, strict=True))
        )
        events = []
        for (sequence, start, count), asks in zip(step.scheduled, step.asks, strict=True):
            place, (token_id, logprobs) = next(results) if asks else (NO_TOKEN, (NO_TOKEN, None))
            if place in failed:
                events += self._lose(sequence)
                continue
            end = start + count
            if end // block_size > start // block_size:
                self._publish(sequence, end)
            if asks and sequence.finish_reason is None:
                events.append(self._take_token(sequence, token_id, logprobs))
        return events

    def _publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Share what a step has computed, unless an earlier step failed to compute its prefix."""
        if not sequence.is_lost:
            # Of a token that was dropped in flight, nobody knows the content.
            self._kv.publish(sequence, min(num_computed_tokens, len(sequence.token_ids)))

    def _take_token(
        self, sequence: Sequence, token_id: int, logprobs: RowLogprobs | None
    ) -> TokenEvent:
        sequence.token_ids.append(token_id)
        sequence.num_pending_tokens -= 1
        reason = None
        if token_id in sequence.end_token_ids:
            reason = FinishReason.STOP
            params = sequence.request.sampling
            if params.ignore_eos or token_id not in self._eos_token_ids:
                sequence.stop_reason = token_id
        elif len(sequence.token_ids) >= sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence, reason)
        return TokenEvent(sequence, token_id, logprobs, reason)

    def _fail(self, step: StepPlan) -> list[TokenEvent]:
        return [event for sequence, _, _ in step.scheduled for event in self._lose(sequence)]

    def _lose(self, sequence: Sequence) -> list[TokenEvent]:
        """A step failed for it: what its later steps compute means nothing."""
        sequence.is_lost = True
        if sequence.finish_reason is not None:
            return []
        self._end(sequence, FinishReason.ERROR)
        return [TokenEvent(sequence, NO_TOKEN, None, FinishReason.ERROR)]

    # --- leaving -----------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        running = sequence.status is SequenceStatus.RUNNING
        queue = self._running if running else self._waiting
        del queue[bisect_left(queue, sequence.order, key=_order)]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.num_pending_tokens = 0
        if running:
            self._leave_row(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        """Free blocks and row of one that no longer runs: now, or when `commit` says so."""
        if self._is_in_flight(sequence):
            self._num_releasing_blocks += len(sequence.block_table)
        else:
            self._release(sequence)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step_id > self._last_committed_step_id

    def _release(self, sequence: Sequence) -> None:
        self._kv.release(sequence)
        self._removed_rows.append(sequence.row)
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = NO_ROW

    # --- checks ------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise IntegrityError naming the violated invariant. Takes time: for tests and idling."""
        check_queue(self._waiting, SequenceStatus.WAITING)
        check_queue(self._running, SequenceStatus.RUNNING)
        for step in self._in_flight:
            step.check_integrity(self._max_num_batched_tokens, self._max_num_seqs)
        holders = {s.order: s for s in self._running}
        for step in self._in_flight:
            holders.update((s.order, s) for s, _, _ in step.scheduled)
        self._kv.check_integrity(holders.values())
        rows = sorted([*self._free_rows, *(s.row for s in holders.values())])
        if rows != list(range(self._max_num_seqs)):
            raise IntegrityError("I3", f"rows {rows} are free or held, by {list(holders.values())}")
        for sequence in self._waiting:
            if sequence.order not in holders and (sequence.row != NO_ROW or sequence.block_table):
                raise IntegrityError("I3", f"{sequence} waits with a row or blocks")
        left = [s for s in holders.values() if s.status is not SequenceStatus.RUNNING]
        if sum(len(s.block_table) for s in left) != self._num_releasing_blocks:
            raise IntegrityError(
                "I1", f"{self._num_releasing_blocks} blocks wait for release, held by {left}"
            )
        if not self.has_work and self.num_held_blocks:
            raise IntegrityError("I7", f"nobody is left, {self.num_held_blocks} blocks are held")
