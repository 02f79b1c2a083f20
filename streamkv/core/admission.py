"""Admission: which of those that wait may start in a step.

Owns the rule that nobody overtakes the head of the queue, and what a start takes: rows and blocks,
for the sequence and for those of its group that wait for it. Must not know how running sequences
share a step. Invariant: who is admitted fits with all its tokens, at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable

from .kv.manager import KVManager
from .kv.prefix_node import PrefixMatch
from .kv.types import Keep
from .prompts import Prompts
from .roster import Roster
from .sequence import NO_ROW, Sequence
from .step_plan import StepPlan

MAX_LOOKAHEAD = 1024  # tokens
RECHECK_STEPS = 8  # after which the head that did not fit is looked up again
CALM_STEPS = 256  # without a preemption, after which less is kept free


class Headroom:
    """Blocks that are kept free for those that run, when others ask to be admitted: else they are
    admitted only to be preempted.

    Each running sequence may go on for `lookahead` tokens. That grows where it was too little, and
    shrinks again in calm times: nobody knows when answers end. 0 stays 0: nothing is kept free.
    """

    __slots__ = ("_block_size", "_min_lookahead", "_num_calm_steps", "lookahead")

    def __init__(self, block_size: int, min_lookahead: int) -> None:
        self._block_size = block_size
        self._min_lookahead = min_lookahead
        self._num_calm_steps = 0
        self.lookahead = min_lookahead

    def note_step(self, *, has_preempted: bool) -> None:
        self._num_calm_steps += 1
        if has_preempted:
            self._num_calm_steps = 0
            self.lookahead = min(2 * self.lookahead, MAX_LOOKAHEAD)
        elif self._num_calm_steps >= CALM_STEPS:
            self._num_calm_steps = 0
            self.lookahead = max(self.lookahead // 2, self._min_lookahead)

    def num_blocks(self, sequences: Iterable[Sequence]) -> int:
        """That these will ask for, beyond what their tokens need now."""
        block_size, lookahead = self._block_size, self.lookahead
        num = 0
        for one in sequences:
            num_tokens = one.num_tokens
            end = min(num_tokens + lookahead, one.max_num_tokens - 1)  # the last isn't computed
            if end > num_tokens:
                num += -(-end // block_size) - -(-num_tokens // block_size)
        return num


class Admission:
    """Loads what a prefix has outside of the device first, once for each admission."""

    __slots__ = (
        "_kv",
        "_max_num_seqs",
        "_num_refusals",
        "_prompts",
        "_refused",
        "_roster",
        "headroom",
        "num_queries_tokens",
    )

    def __init__(
        self,
        kv: KVManager,
        roster: Roster,
        prompts: Prompts,
        max_num_seqs: int,
        min_lookahead: int,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._prompts = prompts
        self._max_num_seqs = max_num_seqs
        self.headroom = Headroom(kv.block_size, min_lookahead)
        self._refused: tuple[Sequence | None, int] = (None, 0)  # head that didn't fit, free blocks
        self._num_refusals = 0  # of it, without looking
        self.num_queries_tokens = 0  # looked up at first admissions, once for each group

    def forget_refusal(self) -> None:
        """What is free, or cached, has changed in a way that the number of free blocks hides."""
        self._refused = (None, 0)
        self._num_refusals = 0

    def admit_waiting(self, plan: StepPlan, is_step_in_flight: bool) -> None:
        """Admit from the front while budget, rows and blocks last; nobody overtakes the head."""
        roster, kv = self._roster, self._kv
        waiting = roster.waiting
        while waiting and plan.budget and roster.num_free_rows:
            sequence = waiting[0]
            if sequence.row != NO_ROW:  # preempted, and a step that names it is in flight
                return
            num_held_back, group = roster.num_held_back, sequence.group
            num_rows = 1 + (group.num_held_back if sequence is group.leader else 0)
            num_free_rows = roster.num_free_rows - num_held_back - len(roster.loading)
            if num_free_rows < min(num_rows, self._max_num_seqs):
                return
            is_alone = not (roster.running or roster.loading or is_step_in_flight)
            num_free = kv.pool.num_free - num_held_back - roster.num_loading_blocks
            match = self._find_room(sequence, num_free, is_alone)
            if match is None:
                return
            if match.is_on_device:
                self._admit(sequence, match, plan)
                continue
            num_needed = kv.num_free_blocks_needed(sequence, match)
            if kv.load(sequence, match):
                roster.begin_load(sequence, num_needed + self._num_blocks_of_others(sequence))
            else:
                self._admit(sequence, match, plan)

    def _find_room(self, sequence: Sequence, num_free: int, is_alone: bool) -> PrefixMatch | None:
        """The cached prefix with which all its tokens, and its group, fit into the free blocks."""
        kv = self._kv
        refused, num_free_then = self._refused
        if sequence is refused and num_free <= num_free_then and not is_alone:
            self._num_refusals += 1
            if self._num_refusals < RECHECK_STEPS:  # what it shares may be cached meanwhile
                return None
        self._num_refusals = 0
        # Alone, it needs no more than itself: the others of its group can wait.
        num_others = 0 if is_alone else self._num_blocks_of_others(sequence)
        if not is_alone and self.headroom.lookahead:
            num_others += self.headroom.num_blocks(
                [*self._roster.running, *self._roster.loading, sequence]
            )
        match = kv.match(sequence)
        if kv.num_free_blocks_needed(sequence, match) + num_others <= num_free:
            return match
        self._refused = (sequence, num_free)
        return None

    def _num_blocks_of_others(self, sequence: Sequence) -> int:
        """Blocks for those that wait for this one to have computed the prompt."""
        group = sequence.group
        if sequence is not group.leader:
            return 0
        num_shared = (sequence.num_prompt_tokens - 1) // self._kv.block_size
        num_of_aside = sum(self._kv.num_blocks_for(s.num_tokens) - num_shared for s in group.aside)
        return num_of_aside + len(group.spare)

    def _admit(self, sequence: Sequence, match: PrefixMatch, plan: StepPlan) -> None:
        """Give it a row and its first tokens. There may be none for now: others have the step's
        scores, or all is cached and its grammar's mask isn't there yet."""
        kv, roster, group = self._kv, self._roster, sequence.group
        # The others of a group, and who comes back, find what the request has computed itself.
        is_first = sequence.num_preemptions == 0 and sequence is group.leader
        kv.share(sequence, match, is_counted=is_first)
        num_hit_tokens = sequence.num_computed_tokens
        if sequence.num_preemptions == 0:
            # As many as without forced tokens, before which all of the prompt may be found.
            sequence.num_cached_tokens = min(num_hit_tokens, sequence.num_prompt_tokens - 1)
            sequence.token_ids = sequence.token_ids[:]  # its own from now on
            if is_first and kv.is_shared:
                self.num_queries_tokens += len(sequence.token_ids)
        elif sequence.keep is Keep.SWAP:
            plan.swapped_in.append(sequence)
        sequence.keep = Keep.CACHE
        roster.admit(sequence)
        plan.admitted.append(sequence)
        count = min(sequence.num_uncomputed_tokens, plan.budget)
        if sequence.wants_prompt_events:
            self._prompts.watch(sequence)
            count = self._prompts.cut(sequence, count)
        if count:
            grown = kv.grow(sequence, num_hit_tokens + count)
            assert grown is not None, "room for all its tokens was found"
            sequence.num_slots = len(sequence.block_table) * kv.block_size
            plan.add_row(sequence)
            plan.schedule_tokens(sequence, count)
        if group in roster.leading and num_hit_tokens >= sequence.num_prompt_tokens - 1:
            roster.let_followers_go(group)
