"""Scheduler: which tokens run in the next step, and what its results mean.

Owns every Sequence from `add` to its release: queues and rows (Roster), block tables (KVManager),
who is admitted (Admission), the steps in flight, and what their results mean (Committer). Must
not know devices, text, clocks or randomness: the same commands give the same decisions. One thread
calls it.

There is no prefill or decode phase: a step hands out tokens so that each sequence's
num_computed_tokens catches up with its num_tokens. Running sequences come first, then waiting
ones, both in the order of priority, then arrival; so a preempted sequence stands before all that
came after it. One whose prefix lies in host memory or on disk loads it first, once, while others
go on; what could not be loaded is computed. A step may have copies and no tokens.

The sequences of a request are a SequenceGroup: the first computes the prompt, the others join as
hits once that is cached, and rows and blocks are kept for them till then. Out of blocks, the last
running group is preempted, swapped or to be recomputed as CostModel says; a group with none behind
it takes from its own last sequence, or keeps its blocks and sits out.

`schedule` may be called again before `commit` (overlap): it counts one new token for each row that
asked for a sample in an uncommitted step, but for beams, which go on together. Whatever a step in
flight names, blocks and rows, stays taken until that step is committed.

Invariants (`check_integrity` checks I1-I4, I6, I7; the tests check the rest by simulation):
  I1  a block is free or referenced; its count equals the number of tables, copies and loads that
      hold it
  I2  computed <= tokens, and a table has exactly the blocks its computed tokens need
  I3  a sequence is in one queue, or held back by its group, as its status says; a row belongs to
      at most one; who waits or loads has neither row nor blocks
  I4  a step has at most max_num_batched_tokens tokens and max_num_seqs rows, each >= 1 token, and
      at most max_copies copies between tiers
  I5  whatever fits alone finishes: with work to do, a step is in flight, `schedule` gives one, or
      the store has something to report
  I6  a block in two tables holds the prefix of both; only one of them writes it, after a copy
  I7  once all sequences are gone, and copies and the store have ended, every block and row is free
  I8  a sequence has one terminal event (or one `finish` call) and none after it
  I9  tokens don't depend on batching, chunking, overlap, preemption, swapping, forks or caching
  I10 a host slot or record is read only after what it holds was acknowledged as written
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..errors import CapacityError
from ..protocol import FinishReason, Request, StepOutput, StoredBlock, StoreOp, StoreResult
from .admissible import check_admissible, num_blocks_needed
from .admission import Admission
from .committer import NO_TOKEN, Committer, TokenEvent
from .cost_model import CostModel
from .groups import SequenceGroup
from .integrity import IntegrityError
from .kv.manager import KVManager
from .kv.types import Copy, Keep, KVStats
from .roster import Roster
from .sequence import Sequence
from .step_plan import SchedulerOutput, StepPlan

__all__ = ["NO_TOKEN", "Scheduler", "SchedulerOutput", "TokenEvent"]


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
        num_host_slots: int = 0,
        has_store: bool = False,
        max_copies: int = 32,
        max_session_blocks: int = 0,
        preemption_mode: str = "auto",
        copy_block_s: float = 0.0,
        token_s: float = 0.0,
        min_lookahead: int = 32,
    ) -> None:
        """`preemption_mode`, `copy_block_s`, `token_s`: see EngineConfig and RunnerInfo.
        `min_lookahead`: tokens for which running sequences are to have blocks, at least, when
        others are admitted."""
        self.block_size = block_size
        self._kv = KVManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_host_slots=num_host_slots,
            has_store=has_store and enable_prefix_caching,
            max_copies=max_copies,
            max_session_blocks=max_session_blocks,
        )
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._can_swap = num_host_slots > 0 and preemption_mode != "recompute"
        self._always_swaps = preemption_mode == "swap"
        self._cost = CostModel(
            copy_block_s, token_s, min_num_tokens=max_num_batched_tokens // 2 + 1
        )
        # A step has a token for each running row, so that none ever starves.
        num_rows = min(max_num_seqs, max_num_batched_tokens)
        self._roster = Roster(self._kv, num_rows)
        self._admission = Admission(self._kv, self._roster, num_rows, min_lookahead)
        self._committer = Committer(self._kv, self._roster, eos_token_ids)
        self._in_flight: deque[StepPlan] = deque()
        self._num_arrivals = 0
        self._next_step_id = 0
        self._max_num_blocks = num_blocks
        self.num_blocks = num_blocks  # in use
        self.num_preemptions = 0
        self.num_swaps = 0  # of them

    # --- what goes on ------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """All others that have not ended."""
        return self._roster.num_live - len(self._roster.running)

    @property
    def num_loading(self) -> int:
        """Of those that wait."""
        return len(self._roster.loading)

    @property
    def num_in_flight_steps(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Something waits, runs, is to be told or copied, or is named by a step in flight."""
        return bool(
            self._roster.num_live
            or self._in_flight
            or self.has_answers
            or self._committer.copies_on_their_way
            or self._kv.has_copies_to_make
        )

    @property
    def has_answers(self) -> bool:
        """`take_answers` would give some."""
        return self._committer.has_answers

    @property
    def is_busy(self) -> bool:
        """Something is on its way that will change what `schedule` says."""
        return self._kv.is_busy

    @property
    def num_free_blocks(self) -> int:
        return self._kv.pool.num_free

    @property
    def num_held_blocks(self) -> int:
        """Blocks in the tables of sequences (cached blocks that nobody uses count as free)."""
        return self._kv.pool.num_held

    @property
    def num_prefix_queries_tokens(self) -> int:
        """Tokens of prompts looked up, once a request."""
        return self._admission.num_queries_tokens

    @property
    def num_prefix_hit_tokens(self) -> int:
        """Of these, found."""
        stats = self._kv.stats
        return stats.num_device_hit_tokens + stats.num_host_hit_tokens + stats.num_disk_hit_tokens

    @property
    def kv_stats(self) -> KVStats:
        return self._kv.stats

    # --- commands ----------------------------------------------------------------------------

    def check_admissible(self, request: Request) -> None:
        """Raise InvalidRequestError, ContextLengthError or CapacityError if it could never run."""
        check_admissible(
            request,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_model_len=self._max_model_len,
        )

    def add(self, request: Request) -> list[Sequence]:
        """Queue its `sampling.num_sequences` sequences. Raises as `check_admissible` does."""
        self.check_admissible(request)
        group = SequenceGroup(
            request, first_arrival=self._num_arrivals, eos_token_ids=self._eos_token_ids
        )
        self._num_arrivals += len(group.sequences)
        self._roster.add(group)
        return group.sequences.copy()

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence from outside, all beams with one; later tokens are dropped, and answers of
        beams that were not taken. Idempotent."""
        if sequence.is_beam:
            self._committer.drop_answers(sequence.group)
        if sequence.finish_reason is None:
            for one in sequence.group.sequences if sequence.is_beam else (sequence,):
                self._roster.end(one, reason)

    def advance_clock(self, now_s: float) -> None:
        """Any clock that only goes on: sessions end by it."""
        self._roster.now_s = now_s
        self._kv.expire_sessions(now_s)

    def resize(self, num_blocks: int) -> None:
        """Use the first `num_blocks` of the blocks it began with from now on. CapacityError if it
        has not as many, or if a request that has not ended would not fit any more."""
        roster = self._roster
        if not 1 <= num_blocks <= self._max_num_blocks:
            raise CapacityError(
                f"expected 1 to {self._max_num_blocks} blocks, as many as the device has, got "
                f"{num_blocks}; start with more KV memory to have more"
            )
        groups = {s.group: None for s in (*roster.running, *roster.waiting, *roster.loading)}
        for group in groups:
            num_needed = num_blocks_needed(group.request, self.block_size)
            if num_needed > num_blocks:
                raise CapacityError(
                    f"expected at least {num_needed} blocks of {self.block_size} tokens, which "
                    f"request {group.request.request_id} needs, got {num_blocks}; wait until it "
                    "has ended, or end it"
                )
        self._kv.resize(num_blocks)
        self.num_blocks = num_blocks
        self._admission.forget_refusal()

    # --- the store ---------------------------------------------------------------------------

    def take_store_ops(self) -> list[StoreOp]:
        """What the store is to do now."""
        return self._kv.take_store_ops()

    def on_store_result(self, result: StoreResult) -> None:
        self._kv.on_store_result(result)

    def insert_stored(self, blocks: Iterable[StoredBlock]) -> None:
        """What the store had when it was opened, parents first."""
        self._kv.insert_stored(blocks)

    # --- a step ------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can be done before the next commit, add or result of
        the store."""
        roster, kv = self._roster, self._kv
        if roster.loading:
            self._end_loads()
        plan = StepPlan(self._next_step_id, self._max_num_batched_tokens)
        all_served = self._schedule_running(plan)
        if all_served and not plan.preempted:
            self._admission.admit_waiting(plan, bool(self._in_flight))
        copies = kv.take_copies()
        if not (copies or plan.scheduled) and roster.running and self._is_stalled:
            copies = self._unstall(plan)
        plan.copies = copies
        if copies:
            self._committer.copies_on_their_way.update(copy.number for copy in copies)
        elif not plan.scheduled and not self._has_to_ask:
            return self.schedule() if kv.begin_reads() else None
        output = plan.build(roster.removed_rows)
        roster.removed_rows.clear()
        self._next_step_id += 1
        self._in_flight.append(plan)
        return output

    @property
    def _is_stalled(self) -> bool:
        """Nothing will come back by itself: those who run wait for others of their groups, and
        these, in the queue or loading, for the blocks of those who run."""
        return not (self._in_flight or self._kv.is_busy)

    def _unstall(self, plan: StepPlan) -> list[Copy]:
        """Somebody fits after all, with what is cached by now; or the last group steps back."""
        roster, admission, kv = self._roster, self._admission, self._kv
        for steps_back in (False, True):
            if steps_back:
                self._preempt(roster.running[-1].group, plan)
            admission.forget_refusal()
            if not roster.loading:  # who loads comes first
                admission.admit_waiting(plan, False)
            copies = kv.take_copies()
            if copies or plan.scheduled:
                break
        return copies

    @property
    def _has_to_ask(self) -> bool:
        """A step of nothing brings news of copies."""
        return bool(self._committer.copies_on_their_way) and not self._in_flight

    def _end_loads(self) -> None:
        for sequence in self._kv.take_loaded():
            self._roster.end_load(sequence)
            self._admission.forget_refusal()

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Give each running sequence tokens, in order. False if one sat out for want of blocks."""
        running = self._roster.running
        all_served = True
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            count = sequence.num_uncomputed_tokens
            if count > 1:
                # One token of the budget is kept for each row behind: decode never starves.
                count = min(count, plan.budget - (len(running) - index))
            elif count == 0:  # its last token is in flight, or it waits for other beams
                continue
            end = sequence.num_computed_tokens + count
            # Blocks go to the first in need: who comes after one that sat out gets none.
            if end > sequence.num_slots and not (all_served and self._grow(sequence, end, plan)):
                all_served = False
                continue
            plan.schedule_tokens(sequence, count)
        return all_served

    def _grow(self, sequence: Sequence, end: int, plan: StepPlan) -> bool:
        """Make its table, and its row on the device, ready for tokens up to `end`."""
        grown = self._kv.grow(sequence, end)
        while grown is None:
            if not self._make_room(sequence, end, plan):
                return False
            grown = self._kv.grow(sequence, end)
        appended, is_rewritten = grown
        if is_rewritten:
            self._roster.retable(sequence)
        sequence.num_slots = len(sequence.block_table) * self.block_size
        if sequence.is_row_known:
            plan.append_blocks(sequence.row, appended)
        else:
            plan.add_row(sequence)
        return True

    def _make_room(self, sequence: Sequence, end: int, plan: StepPlan) -> bool:
        """Preempt from the end until the blocks for tokens up to `end` are free. False: not yet.

        Nobody is preempted for blocks that come back with a step in flight or a copy, and only
        sequences behind this one are: preempting itself would give its blocks to nobody who asked.
        """
        kv, roster = self._kv, self._roster
        while (num_new := kv.num_new_blocks(sequence, end)) > kv.pool.num_free:
            last = roster.running[-1]
            ends_soon = last.num_uncomputed_tokens == 0 and roster.is_in_flight(last)
            num_returning = roster.num_releasing_blocks + kv.num_returning_blocks
            will_be_free = kv.pool.num_free + num_returning
            if will_be_free >= num_new or last is sequence or ends_soon:
                return False
            if last.group is not sequence.group:
                self._preempt(last.group, plan)
            elif sequence.is_beam:  # it can't go on without the others
                return False
            else:
                keep = self._how_to_keep([last])
                roster.preempt_one(last, keep)
                self._note_preempted([last], keep, plan)
        return True

    def _preempt(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Back to the queue; tokens in flight will still be committed, but for beams."""
        keep = self._how_to_keep(group.sequences)
        self._note_preempted(self._roster.preempt(group, keep), keep, plan)

    def _how_to_keep(self, sequences: list[Sequence]) -> Keep:
        if self._can_swap:
            num_tokens = sum(sequence.num_computed_tokens for sequence in sequences)
            num_blocks = sum(len(sequence.block_table) for sequence in sequences)
            if self._always_swaps or self._cost.is_swap_quicker(num_blocks, num_tokens):
                return Keep.SWAP
        return Keep.GIVE_UP

    def _note_preempted(self, preempted: list[Sequence], keep: Keep, plan: StepPlan) -> None:
        plan.preempted += preempted
        self.num_preemptions += len(preempted)
        if keep is Keep.SWAP:
            plan.swapped_out += preempted
            self.num_swaps += len(preempted)

    # --- its results -------------------------------------------------------------------------

    def commit(self, output: StepOutput) -> list[TokenEvent]:
        """Take in the results of the oldest step in flight and release what waited for it."""
        if not self._in_flight or self._in_flight[0].step_id != output.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none in flight"
            raise IntegrityError("I4", f"expected step {expected}, got step {output.step_id}")
        step = self._in_flight.popleft()
        self._cost.learn(
            self._max_num_batched_tokens - step.budget,
            len(step.copies),
            duration_s=output.duration_s,
            copies_s=output.copies_s,
        )
        return self._committer.commit(step, output)

    def take_answers(self, max_num: int) -> list[TokenEvent]:
        """Events of beams whose search has ended, at most so many: `commit` gives only failures of
        them. Each search's come in order, those of several searches by turns."""
        return self._committer.take_answers(max_num)

    # --- checks ------------------------------------------------------------------------------

    def check_at_rest(self) -> None:
        """With no work, and nothing on its way: raise IntegrityError unless all is free (I7)."""
        num_rows, (num_blocks, num_slots) = self._roster.num_used_rows, self._kv.num_held
        if num_rows or num_blocks or num_slots:
            raise IntegrityError(
                "I7",
                f"nobody is left, but {num_rows} rows, {num_blocks} blocks and {num_slots} slots "
                "are taken",
            )

    def check_integrity(self) -> None:
        """Raise IntegrityError naming the violated invariant. Takes time: for tests."""
        for step in self._in_flight:
            step.check_integrity(self._max_num_batched_tokens, self._max_num_seqs)
        named = [sequence for step in self._in_flight for sequence, _, _ in step.scheduled]
        self._kv.check_integrity(self._roster.check_integrity(named))
        if not self.has_work and not self.is_busy:
            self.check_at_rest()
