"""Committer: what a step's results mean for its sequences.

Owns which copies are on their way, and the events that come of tokens, failures and beams. Must
not know what the next step will have. Invariant (I8): a sequence has one terminal event, or was
ended from outside, and there is none after it.

Those of beams come all at the end of their search, hundreds of thousands of a wide and long one:
they are made while they are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import NamedTuple

from ..protocol import FinishReason, RowLogprobs, StepOutput, unpack_ints
from .beam import Hypothesis
from .groups import SequenceGroup
from .integrity import IntegrityError
from .kv.manager import KVManager
from .kv.types import Keep
from .roster import Roster
from .sequence import NO_ROW, Sequence, SequenceStatus
from .step_plan import StepPlan

NO_TOKEN = -1  # token_id of a terminal event that carries no token
_INT32_BYTES = 4
_NONE: frozenset[int] = frozenset()


class TokenEvent(NamedTuple):
    """One committed token, the end of a sequence, or both."""

    sequence: Sequence
    token_id: int  # NO_TOKEN if it failed; with STOP: a search had no answer for this choice
    logprobs: RowLogprobs | None
    finish_reason: FinishReason | None  # set in the last event of a sequence, in no other


class Committer:
    """Takes in the results of steps, in their order."""

    __slots__ = ("_answers", "_eos_token_ids", "_kv", "_roster", "copies_on_their_way")

    def __init__(self, kv: KVManager, roster: Roster, eos_token_ids: frozenset[int]) -> None:
        self._kv = kv
        self._roster = roster
        self._eos_token_ids = eos_token_ids
        self.copies_on_their_way: set[int] = set()  # their numbers
        # Of searches that have ended: events that nobody has taken yet.
        self._answers: dict[SequenceGroup, Iterator[TokenEvent]] = {}

    def commit(self, step: StepPlan, output: StepOutput) -> list[TokenEvent]:
        roster = self._roster
        roster.last_committed_step_id = step.step_id
        failed = self._find_lost(step, output)
        events = self._acknowledge(step, output) if self.copies_on_their_way else []
        if output.error:
            events += self._lose_all([sequence for sequence, _, _ in step.scheduled])
        else:
            events += self._take_tokens(step, output, failed)
        if roster.leading:
            self._let_followers_go(step)
        if roster.num_releasing_blocks:
            roster.release_committed([sequence for sequence, _, _ in step.scheduled])
        return events

    def _find_lost(self, step: StepPlan, output: StepOutput) -> frozenset[int]:
        """Mark all that the step failed for, before the first of them gives back its blocks (with
        one beam, all do). Returns the places of rows without finite logits."""
        if output.error:
            for sequence, _, _ in step.scheduled:
                sequence.is_lost = True
            return _NONE
        num_asking = sum(step.asks)
        num_sampled, num_logprobs = len(output.sampled) // _INT32_BYTES, len(output.logprobs)
        if num_sampled != num_asking or num_logprobs not in (0, num_asking):
            raise IntegrityError(
                "I4",
                f"expected {num_asking} tokens for step {step.step_id}, got {num_sampled} "
                f"with {num_logprobs} logprobs",
            )
        if not output.failed:
            return _NONE
        failed = frozenset(unpack_ints(output.failed))
        if not failed <= frozenset(range(num_asking)):
            raise IntegrityError(
                "I4", f"expected places below {num_asking} as failed, got {sorted(failed)}"
            )
        asking = [s for (s, _, _), asks in zip(step.scheduled, step.asks, strict=True) if asks]
        for place in failed:
            asking[place].is_lost = True
        return failed

    # --- copies ------------------------------------------------------------------------------

    def _acknowledge(self, step: StepPlan, output: StepOutput) -> list[TokenEvent]:
        """Copies that ended. Who holds a block that should have been copied and wasn't is lost."""
        lost = self._kv.acknowledge(step.copies, output)
        ended = [*unpack_ints(output.copies_done), *unpack_ints(output.copies_failed)]
        self.copies_on_their_way.difference_update(ended)
        if output.error:
            self.copies_on_their_way.difference_update(copy.number for copy in step.copies)
        return self._lose_all(lost)

    # --- tokens ------------------------------------------------------------------------------

    def _take_tokens(
        self, step: StepPlan, output: StepOutput, failed: frozenset[int]
    ) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        sampled = unpack_ints(output.sampled)
        block_size = self._kv.block_size
        take_token, logprobs = self._take_token, output.logprobs
        place = -1
        for (sequence, start, count), asks in zip(step.scheduled, step.asks, strict=True):
            end = start + count
            if end // block_size > start // block_size:
                self._publish(sequence, end)
            if not asks:
                continue
            place += 1
            if sequence.finish_reason is not None:
                continue
            if place in failed:
                events += self._lose(sequence)
                continue
            row = logprobs[place] if logprobs else None
            if sequence.is_beam:
                self._take_candidates(sequence, sampled[place], row)
            else:
                events.append(take_token(sequence, sampled[place], row))
        return events

    def _publish(self, sequence: Sequence, num_computed_tokens: int, *, tail: bool = False) -> None:
        """Share what a step has computed, unless an earlier step failed to compute its prefix."""
        if not sequence.is_lost and sequence.block_table:
            # Of a token that was dropped in flight, nobody knows the content.
            num_known = min(num_computed_tokens, len(sequence.token_ids))
            self._kv.publish(sequence, num_known, tail=tail)

    def _take_token(
        self, sequence: Sequence, token_id: int, logprobs: RowLogprobs | None
    ) -> TokenEvent:
        sequence.token_ids.append(token_id)
        sequence.num_pending_tokens -= 1
        reason = None
        if token_id in sequence.end_token_ids:
            reason = FinishReason.STOP
            sequence.stop_reason = self._stop_reason(sequence, token_id)
        elif len(sequence.token_ids) >= sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._roster.end(sequence, reason)
        return TokenEvent(sequence, token_id, logprobs, reason)

    def _stop_reason(self, sequence: Sequence, token_id: int) -> int | None:
        """The token, if it was one of the request's that ended it."""
        is_eos = token_id in self._eos_token_ids and not sequence.request.sampling.ignore_eos
        return None if is_eos else token_id

    def _let_followers_go(self, step: StepPlan) -> None:
        """Whose leader has computed the prompt."""
        roster = self._roster
        for sequence, start, count in step.scheduled:
            group = sequence.group
            is_leading = sequence is group.leader and sequence.status is SequenceStatus.RUNNING
            if is_leading and start + count >= sequence.num_prompt_tokens:
                self._publish(sequence, start + count, tail=True)
                roster.let_followers_go(group)

    # --- beams -------------------------------------------------------------------------------

    def _take_candidates(
        self, sequence: Sequence, token_id: int, logprobs: RowLogprobs | None
    ) -> None:
        """What could continue a beam. Once all of the group have theirs, they go on."""
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted meanwhile: it will ask again
        if logprobs is None:
            raise IntegrityError("I4", f"expected candidates for {sequence}, got none")
        sequence.num_pending_tokens = 0
        group = sequence.group
        if not group.take_candidates(sequence, token_id, logprobs):
            return
        kv, roster, former = self._kv, self._roster, group.beams
        heirs = group.advance()
        if not heirs:
            self._end_search(group)
            return
        for heir, parent, _, is_sampled in heirs:
            if heir is not parent:
                if heir.row == NO_ROW:
                    roster.take_row(heir)
                else:
                    kv.release(heir, keep=Keep.CACHE)
                kv.fork(parent, heir)
                heir.token_ids = parent.token_ids[:]
            if heir is not parent or not is_sampled:
                roster.retable(heir)
        for heir, _, token_id, _ in heirs:
            heir.token_ids.append(token_id)
            heir.max_num_tokens = len(heir.token_ids) + 1
            heir.num_slots = 0  # the block it writes next may be shared
        for beam in former:
            if beam in group.spare:
                roster.rest(beam)
        roster.settle_leading(group)

    def _end_search(self, group: SequenceGroup) -> None:
        """Its answers are the first sequences' from now on: `take_answers` gives their events."""
        hypotheses = group.hypotheses()
        for sequence, answer in zip_longest(group.sequences, hypotheses):
            self._roster.end(sequence, answer.finish_reason if answer else FinishReason.STOP)
        self._answers[group] = self._events(group, hypotheses)

    def _events(self, group: SequenceGroup, hypotheses: list[Hypothesis]) -> Iterator[TokenEvent]:
        """Of its choices, best first. Those for which there is no answer end without a token."""
        choices = group.sequences[: group.request.sampling.n]
        for sequence, answer in zip_longest(choices, hypotheses):
            token_ids = sequence.token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
            if answer is None:
                yield TokenEvent(sequence, NO_TOKEN, None, FinishReason.STOP)
                continue
            reason = answer.finish_reason
            if reason is FinishReason.STOP:
                sequence.stop_reason = self._stop_reason(sequence, answer.last.token_id)
            for link in answer.links():
                token_id = link.token_id
                token_ids.append(token_id)
                ends = reason if link is answer.last else None
                yield TokenEvent(sequence, token_id, link.logprobs, ends)

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def take_answers(self, max_num: int) -> list[TokenEvent]:
        """The next events, at most so many, of one search: those with more take turns."""
        if not self._answers:
            return []
        group = next(iter(self._answers))
        answers = self._answers.pop(group)
        events = list(islice(answers, max_num))
        if len(events) == max_num:
            self._answers[group] = answers
        return events

    def drop_answers(self, group: SequenceGroup) -> None:
        """Nobody wants what has not been taken. Idempotent."""
        self._answers.pop(group, None)

    # --- failures ----------------------------------------------------------------------------

    def _lose_all(self, sequences: list[Sequence]) -> list[TokenEvent]:
        """A step failed for them: what their later steps compute means nothing."""
        for sequence in sequences:
            sequence.is_lost = True
        return [event for sequence in sequences for event in self._lose(sequence)]

    def _lose(self, sequence: Sequence) -> list[TokenEvent]:
        """Beams end together."""
        if sequence.finish_reason is not None:
            return []
        group = sequence.group
        ended = group.sequences if sequence.is_beam else [sequence]
        for one in ended:
            self._roster.end(one, FinishReason.ERROR)
        reported = ended[: group.request.sampling.n] if sequence.is_beam else ended
        return [TokenEvent(one, NO_TOKEN, None, FinishReason.ERROR) for one in reported]
