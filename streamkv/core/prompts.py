"""Prompts: which tokens of prompts a step scores, and what is told of prompts meanwhile.

Owns the step's scores, shared out evenly, and the events. Must not know blocks or queues. Invariant
(I12): each token of a prompt but the first is scored once, in order, whatever happens on the way;
a step scores at most MAX_SCORED.
"""

from __future__ import annotations

from ..protocol import MAX_SCORED, StepOutput
from .events import PromptEvent
from .sequence import Sequence, SequenceStatus
from .step_plan import PromptChunk, StepPlan


class Prompts:
    """Of sequences that want to be told."""

    __slots__ = ("_events", "_num_left", "_share", "watched")

    def __init__(self) -> None:
        self.watched: dict[Sequence, None] = {}  # they run, and their prompt isn't computed yet
        self._events: list[PromptEvent] = []
        self._num_left = 0  # scores that the step being built still has
        self._share = 0  # of them, for one sequence

    def begin_step(self, waiting: list[Sequence]) -> None:
        """A place is kept for the first that waits."""
        self._num_left = MAX_SCORED
        num = 0
        if self.watched:
            num = sum(one.num_scored_tokens < one.num_prompt_tokens for one in self.watched)
        if waiting and waiting[0].num_scored_tokens < waiting[0].num_prompt_tokens:
            num += 1
        self._share = max(MAX_SCORED // num, 1) if num else MAX_SCORED

    def watch(self, sequence: Sequence) -> None:
        """It was admitted."""
        if sequence.wants_prompt_events and sequence.num_told_tokens < sequence.num_prompt_tokens:
            self.watched[sequence] = None

    def cut(self, sequence: Sequence, count: int) -> int:
        """How many of `count` tokens it may compute now. 0: others have all the scores."""
        num_unscored = sequence.num_prompt_tokens - sequence.num_scored_tokens
        if not num_unscored:
            return count
        # Tokens before the last that has a score are computed once more, without.
        num_again = sequence.num_scored_tokens - 1 - sequence.num_computed_tokens
        if num_again > 0:
            return min(count, num_again)
        num_scores = min(self._share, self._num_left)
        if num_scores < num_unscored:
            count = min(count, num_scores)
        self._num_left -= min(count, num_unscored)
        return count

    def note(self, plan: StepPlan) -> None:
        """The step is complete: ask for the scores, and remember what to tell of it."""
        watched = self.watched
        for index, (sequence, start, count) in enumerate(plan.scheduled):
            if sequence not in watched:
                continue
            num_prompt_tokens = sequence.num_prompt_tokens
            num_computed = min(start + count, num_prompt_tokens)
            num_scored = 0
            if start + 1 == sequence.num_scored_tokens < num_prompt_tokens:
                num_scored = min(start + count + 1, num_prompt_tokens) - (start + 1)
                sequence.num_scored_tokens += num_scored
                plan.ask_for_scores(index, num_scored)
            if num_computed > sequence.num_told_tokens:
                sequence.num_told_tokens = num_computed
                plan.prompts.append(PromptChunk(sequence, num_computed, num_scored))
        for sequence in list(watched):
            is_done = sequence.num_told_tokens == sequence.num_prompt_tokens
            if is_done or sequence.status is not SequenceStatus.RUNNING:
                del watched[sequence]

    def take_scores(self, step: StepPlan, output: StepOutput) -> list[Sequence]:
        """Make the events of a step. Returns sequences whose logits were not finite."""
        failed: list[Sequence] = []
        place = 0
        for sequence, num_computed, num_scored in step.prompts:
            scored = output.scored[place : place + num_scored]
            place += num_scored
            if sequence.is_lost or sequence.finish_reason is not None:
                continue
            if any(row.rank == 0 for row in scored):
                failed.append(sequence)
            else:
                self._events.append(PromptEvent(sequence, num_computed, scored))
        return failed

    def take_events(self) -> list[PromptEvent]:
        events, self._events = self._events, []
        return events
