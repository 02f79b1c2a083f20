"""Service: what each running sequence gets of a step, and who steps back for want of blocks.

Owns the order of service, the choice of who is preempted, and how its blocks are kept. Must not
know who waits for admission. Invariant: blocks go to the first in need; a sequence takes them only
from those behind it.
"""

from __future__ import annotations

from .cost_model import CostModel
from .groups import SequenceGroup
from .kv.manager import KVManager
from .kv.types import Keep
from .prompts import Prompts
from .roster import Roster
from .sequence import Sequence
from .step_plan import StepPlan


class Service:
    """Of a scheduler, which makes the plans."""

    __slots__ = (
        "_always_swaps",
        "_can_swap",
        "_cost",
        "_kv",
        "_prompts",
        "_roster",
        "num_preemptions",
        "num_swaps",
    )

    def __init__(
        self,
        kv: KVManager,
        roster: Roster,
        prompts: Prompts,
        cost: CostModel,
        *,
        can_swap: bool,
        always_swaps: bool,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._prompts = prompts
        self._cost = cost
        self._can_swap = can_swap
        self._always_swaps = always_swaps
        self.num_preemptions = 0
        self.num_swaps = 0  # of them

    def serve_running(self, plan: StepPlan) -> bool:
        """Give each running sequence tokens, in order. False if one sat out for want of blocks."""
        running, watched = self._roster.running, self._prompts.watched
        all_served = True
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            count = sequence.num_uncomputed_tokens
            if count > 1:
                # One token of the budget is kept for each row behind: decode never starves.
                count = min(count, plan.budget - (len(running) - index))
                if watched and sequence in watched:
                    count = self._prompts.cut(sequence, count)
            if count == 0:  # its last token is in flight, or something must come first
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
        sequence.num_slots = len(sequence.block_table) * self._kv.block_size
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
            ends_soon = last.num_tokens == last.max_num_tokens and roster.is_in_flight(last)
            num_returning = roster.num_releasing_blocks + kv.num_returning_blocks
            will_be_free = kv.pool.num_free + num_returning
            if will_be_free >= num_new or last is sequence or ends_soon:
                return False
            if last.group is not sequence.group:
                self.preempt(last.group, plan)
            elif sequence.is_beam:  # it can't go on without the others
                return False
            else:
                keep = self._how_to_keep([last])
                roster.preempt_one(last, keep)
                self._note_preempted([last], keep, plan)
        return True

    def preempt(self, group: SequenceGroup, plan: StepPlan) -> None:
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
