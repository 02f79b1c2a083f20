"""StepPlan: one step while it is put together, and what is remembered of it until its commit.

Owns the lists that become a StepInput. Must not know why anything was decided. Invariant: what it
appends for a row lies beyond that row's table as the device has it.
"""

from __future__ import annotations

from typing import NamedTuple

from ..protocol import MAX_SCORED, Ask, RowAdded, StepInput, pack_ints
from .integrity import IntegrityError
from .kv.types import Copy
from .sequence import Sequence

_NONE, _SAMPLE, _SCORE = int(Ask.NONE), int(Ask.SAMPLE), int(Ask.SCORE)  # these pack faster


class PromptChunk(NamedTuple):
    """To be told once the step is committed."""

    sequence: Sequence
    num_computed_tokens: int  # of the prompt, by then
    num_scored: int


class SchedulerOutput(NamedTuple):
    """A step, and what was decided for it."""

    step: StepInput
    scheduled: list[tuple[Sequence, int, int]]  # (sequence, start, count) in batch order
    admitted: list[Sequence]  # took a row: new ones and those that resume
    preempted: list[Sequence]
    swapped_in: list[Sequence]  # of those admitted: their blocks were kept for them
    swapped_out: list[Sequence]  # of those preempted: their blocks are kept
    copies: list[Copy]


class StepPlan:
    """Tokens, rows, blocks and copies of one step."""

    __slots__ = (
        "_added",
        "_appended",
        "_rows",
        "admitted",
        "asks",
        "budget",
        "copies",
        "num_scored",
        "preempted",
        "prompts",
        "scheduled",
        "step_id",
        "swapped_in",
        "swapped_out",
        "void",
    )

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget  # tokens left
        self.scheduled: list[tuple[Sequence, int, int]] = []
        self.asks: list[bool] = []  # for a sample, per scheduled sequence
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.swapped_in: list[Sequence] = []
        self.swapped_out: list[Sequence] = []
        self.copies: list[Copy] = []
        self.prompts: list[PromptChunk] = []  # in the order of `scheduled`
        self.num_scored = 0  # tokens of prompts
        # A token before theirs didn't come, so that what this step gives for them means nothing.
        self.void: set[Sequence] = set()
        self._rows: list[int] = []  # (row, start, count, Ask) each, flat
        self._appended: list[int] = []  # (row, block_id) each, flat
        self._added: list[RowAdded] = []

    def append_blocks(self, row: int, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._appended += (row, block_id)

    def add_row(self, sequence: Sequence) -> None:
        """The device gets to know the sequence's row; its table is complete for this step."""
        sequence.is_row_known = True
        self._added.append(
            RowAdded(
                row=sequence.row,
                num_prompt_tokens=sequence.num_prompt_tokens,
                token_ids=sequence.token_ids.tobytes(),
                block_ids=pack_ints(sequence.block_table),
                sampling=sequence.sampling.of_choice(sequence.choice, sequence.mask_slot),
            )
        )

    def schedule_tokens(self, sequence: Sequence, count: int) -> None:
        """Compute its next `count` tokens; it asks for a sample once it has caught up."""
        start = sequence.num_computed_tokens
        end = start + count
        asks = end == len(sequence.token_ids) + sequence.num_pending_tokens
        if asks:
            sequence.num_pending_tokens += 1
        sequence.num_computed_tokens = end
        sequence.last_step_id = self.step_id
        self.budget -= count
        self.scheduled.append((sequence, start, count))
        self.asks.append(asks)
        self._rows += (sequence.row, start, count, _SAMPLE if asks else _NONE)

    def ask_for_scores(self, index: int, num_scored: int) -> None:
        """Of so many tokens, from the scheduled sequence with this index."""
        self.num_scored += num_scored
        self._rows[4 * index + 3] |= _SCORE

    def build(self, removed_rows: list[int]) -> SchedulerOutput:
        step = StepInput(
            step_id=self.step_id,
            removed=pack_ints(removed_rows),
            added=tuple(self._added),
            appended=pack_ints(self._appended),
            scheduled=pack_ints(self._rows),
            copies=pack_ints(number for copy in self.copies for number in copy),
        )
        return SchedulerOutput(
            step,
            self.scheduled,
            self.admitted,
            self.preempted,
            self.swapped_in,
            self.swapped_out,
            self.copies,
        )

    def check_integrity(self, max_num_tokens: int, max_num_rows: int) -> None:
        """I4, I12: the step isn't too big, and no row has nothing to do in it."""
        if self.num_scored > MAX_SCORED:
            raise IntegrityError("I12", f"step {self.step_id} scores {self.num_scored} tokens")
        counts = [count for _, _, count in self.scheduled]
        if (
            len(counts) > max_num_rows
            or any(count < 1 for count in counts)
            or sum(counts) > max_num_tokens
            or len({sequence.order for sequence, _, _ in self.scheduled}) != len(counts)
        ):
            raise IntegrityError("I4", f"step {self.step_id} has {self.scheduled}")
