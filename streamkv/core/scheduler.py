"""Scheduler: which tokens run in the next step, and what its results mean.

Owns every Sequence from `add` to its release: queues and rows (Roster), block tables (KVManager),
how a step is filled (Planner): what running ones get of it (Service), and who is admitted
(Admission); how far grammars let them run (Grammars), scores of prompts (Prompts), the steps in
flight, and what their results mean (Committer; of beams, Searches). Must not know devices, text,
clocks or randomness: the same commands give the same decisions. One thread calls it.

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
flight names, blocks and rows, stays taken until that step is committed. Such a token may not come,
when a grammar's mask isn't there in time: its row asks again, from then on only for tokens whose
masks are there. Tokens that a grammar leaves no choice for are appended without steps.

Invariants (`check_integrity` checks I1-I4, I6, I7 and I12; the tests check the rest by simulation):
  I1  a block is free or referenced; its count equals the number of tables, copies and loads that
      hold it
  I2  computed <= tokens, and a table has exactly the blocks its computed tokens need, or some more
      once it was run ahead in vain
  I3  a sequence is in one queue, or held back by its group, or its request is paused, as its status
      says; a row belongs to at most one; who waits or loads has neither row nor blocks
  I4  a step has at most max_num_batched_tokens tokens and max_num_seqs rows, each >= 1 token, and
      at most max_copies copies between tiers
  I5  whatever fits alone finishes: with work to do, a step is in flight, `schedule` gives one, the
      store has something to report, or a mask is awaited
  I6  a block in two tables holds the prefix of both; only one of them writes it, after a copy, or
      what is written is there already
  I7  once all sequences are gone, and copies and the store have ended, every block and row is free
  I8  a sequence has one terminal event (or one `finish` call) and none after it
  I9  tokens don't depend on batching, chunking, overlap, preemption, swapping, forks, caching,
      pauses, or the time that masks take
  I10 a host slot or record is read only after what it holds was acknowledged as written
  I11 a sequence whose mask came late costs one wait in its life; what was run ahead of it is never
      published or told; a forced token is appended while nothing of the sequence is pending
  I12 each token of a prompt but the first is scored once, if that is wanted, in order; a step
      scores at most MAX_SCORED
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..errors import CapacityError
from ..protocol import FinishReason, Request, StepOutput, StoredBlock, StoreOp, StoreResult
from .admissible import check_admissible, num_blocks_needed
from .admission import Admission
from .committer import Committer
from .cost_model import CostModel
from .events import NO_TOKEN, PromptEvent, TokenEvent
from .grammar import Grammars
from .groups import SequenceGroup
from .integrity import IntegrityError
from .kv.manager import KVManager
from .kv.types import KVStats
from .planner import Planner
from .prompts import Prompts
from .roster import Roster
from .searches import Searches
from .sequence import Sequence
from .service import Service
from .step_plan import SchedulerOutput, StepPlan

__all__ = ["NO_TOKEN", "PromptEvent", "Scheduler", "SchedulerOutput", "TokenEvent"]


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
        self._cost = CostModel(
            copy_block_s, token_s, min_num_tokens=max_num_batched_tokens // 2 + 1
        )
        # A step has a token for each running row, so that none ever starves.
        num_rows = min(max_num_seqs, max_num_batched_tokens)
        self._roster = Roster(self._kv, num_rows)
        self._prompts = Prompts()
        self._grammars = Grammars(self._roster)
        self._searches = Searches(self._kv, self._roster)
        self._service = Service(
            self._kv,
            self._roster,
            self._prompts,
            self._cost,
            can_swap=num_host_slots > 0 and preemption_mode != "recompute",
            always_swaps=preemption_mode == "swap",
        )
        admission = Admission(self._kv, self._roster, self._prompts, num_rows, min_lookahead)
        self._admission = admission
        self._committer = Committer(
            self._kv, self._roster, self._grammars, self._prompts, self._searches
        )
        self._planner = Planner(
            self._kv,
            self._roster,
            self._service,
            admission,
            self._prompts,
            self._grammars,
            self._committer,
        )
        self._in_flight: deque[StepPlan] = deque()
        self._num_arrivals = 0
        self._next_step_id = 0
        self._max_num_blocks = num_blocks
        self.num_blocks = num_blocks  # in use

    # --- what goes on ------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """All others that have not ended, but for those that are paused."""
        roster = self._roster
        return roster.num_live - roster.num_paused - len(roster.running)

    @property
    def num_paused(self) -> int:
        return self._roster.num_paused

    @property
    def num_loading(self) -> int:
        """Of those that wait."""
        return len(self._roster.loading)

    @property
    def num_preemptions(self) -> int:
        return self._service.num_preemptions

    @property
    def num_swaps(self) -> int:
        """Of these."""
        return self._service.num_swaps

    @property
    def num_in_flight_steps(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Something waits, runs, is to be told or copied, or is named by a step in flight. Who is
        paused is no work."""
        return bool(
            self._roster.num_live > self._roster.num_paused
            or self._in_flight
            or self.has_answers
            or self._committer.copies_on_their_way
            or self._kv.has_copies_to_make
        )

    @property
    def has_answers(self) -> bool:
        """`take_answers` would give some."""
        return self._searches.has_answers

    @property
    def is_busy(self) -> bool:
        """Something is on its way that will change what `schedule` says: a copy, a result of the
        store, a mask, or tokens for `take_forced`."""
        return self._kv.is_busy or self._grammars.is_busy

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
            self._searches.drop_answers(sequence.group)
        if sequence.finish_reason is None:
            for one in sequence.group.sequences if sequence.is_beam else (sequence,):
                self._roster.end(one, reason)

    def pause(self, sequence: Sequence) -> None:
        """Its whole request gives back rows and blocks, as a preempted one does (they stay cached),
        until it is resumed. Steps in flight are committed as usual, and no token is appended
        without one. Idempotent."""
        self._roster.pause(sequence.group)

    def resume(self, sequence: Sequence) -> None:
        """To its place in the queue. Idempotent."""
        self._roster.resume(sequence.group)

    def on_mask(self, sequence: Sequence, position: int) -> None:
        """Its grammar's mask for the token at that position is published. (The first one, for the
        token after the prompt, is published before `add`.) To be called for every other one."""
        self._grammars.on_mask(sequence, position)

    def force(self, sequence: Sequence, start: int, token_ids: tuple[int, ...]) -> None:
        """Its grammar leaves no choice for the tokens from position `start` on: these come, without
        steps, by `take_forced`. Nothing is done where log-probabilities are wanted: those come of
        steps."""
        self._grammars.force(sequence, start, token_ids)

    @property
    def has_forced(self) -> bool:
        """`take_forced` would do something."""
        return self._grammars.has_forced

    def take_forced(self, max_num: int) -> list[TokenEvent]:
        """Append forced tokens, at most so many, where what is in flight has given the first of
        them; and tell of them, as a `commit` does. Sequences with more take turns."""
        return self._grammars.take_forced(max_num)

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
        groups.update(roster.paused)
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
        plan = self._planner.plan(
            self._next_step_id,
            self._max_num_batched_tokens,
            is_step_in_flight=bool(self._in_flight),
        )
        if plan is None:
            return None
        output = plan.build(self._roster.removed_rows)
        self._roster.removed_rows.clear()
        self._next_step_id += 1
        self._in_flight.append(plan)
        return output

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
        return self._committer.commit(step, output, self._in_flight)

    def take_prompt_events(self) -> list[PromptEvent]:
        """What commits have computed of prompts since the last call, of requests that want to be
        told, or prompt_logprobs: the first choice's, in order."""
        return self._prompts.take_events()

    def take_answers(self, max_num: int) -> list[TokenEvent]:
        """Events of beams whose search has ended, at most so many: `commit` gives only failures of
        them. Each search's come in order, those of several searches by turns."""
        return self._searches.take_answers(max_num)

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
