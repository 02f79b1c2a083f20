"""Committer: what a step's results mean for its sequences.

Owns which copies are on their way, and which rows of a step have no token to give. Must not know
what the next step will have. Invariant (I8): a sequence has one terminal event, or was ended from
outside, and there is none after it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol import FinishReason, StepOutput, unpack_ints
from .events import NO_TOKEN, TokenEvent, append_token
from .grammar import Grammars
from .integrity import IntegrityError
from .kv.manager import KVManager
from .prompts import Prompts
from .roster import Roster
from .searches import Searches
from .sequence import Sequence, SequenceStatus
from .step_plan import StepPlan

_INT32_BYTES = 4
_NONE: frozenset[int] = frozenset()


class Committer:
    """Takes in the results of steps, in their order."""

    __slots__ = ("_grammars", "_kv", "_prompts", "_roster", "_searches", "copies_on_their_way")

    def __init__(
        self,
        kv: KVManager,
        roster: Roster,
        grammars: Grammars,
        prompts: Prompts,
        searches: Searches,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._grammars = grammars
        self._prompts = prompts
        self._searches = searches
        self.copies_on_their_way: set[int] = set()  # their numbers

    def commit(
        self, step: StepPlan, output: StepOutput, later_steps: Iterable[StepPlan]
    ) -> list[TokenEvent]:
        """`later_steps` are in flight as well."""
        roster = self._roster
        roster.last_committed_step_id = step.step_id
        tokenless, failed = self._find_tokenless(step, output, later_steps)
        events = self._acknowledge(step, output) if self.copies_on_their_way else []
        if output.error:
            events += self._lose_all([sequence for sequence, _, _ in step.scheduled])
        else:
            if step.prompts:
                events += self._lose_all(self._prompts.take_scores(step, output))
            events += self._take_tokens(step, output, tokenless, failed)
        if roster.leading:
            self._let_followers_go(step)
        if roster.num_releasing_blocks:
            roster.release_committed([sequence for sequence, _, _ in step.scheduled])
        return events

    # --- rows without a token ----------------------------------------------------------------

    def _find_tokenless(
        self, step: StepPlan, output: StepOutput, later_steps: Iterable[StepPlan]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The places that give no token: void, deferred or failed ones; and of these, the failed.

        All that the step failed for is marked before the first of them gives back its blocks (with
        one beam, all do).
        """
        if output.error:
            for sequence, _, _ in step.scheduled:
                sequence.is_lost = True
            return _NONE, _NONE
        num_asking = self._check_lengths(step, output)
        if not (output.failed or output.deferred or step.void):
            return _NONE, _NONE
        asking = [s for (s, _, _), asks in zip(step.scheduled, step.asks, strict=True) if asks]
        void = frozenset(place for place, one in enumerate(asking) if one in step.void)
        failed = _places(output.failed, num_asking, "failed") - void
        deferred = _places(output.deferred, num_asking, "deferred") - void
        for place in failed:
            asking[place].is_lost = True
        for place in sorted(deferred):
            if asking[place].mask_slot < 0:
                raise IntegrityError("I11", f"{asking[place]} has no grammar, and is deferred")
            self._grammars.defer(asking[place], later_steps)
        return void | deferred | failed, failed

    def _check_lengths(self, step: StepPlan, output: StepOutput) -> int:
        """Returns how many rows asked for a token."""
        num_asking = sum(step.asks)
        num_sampled, num_logprobs = len(output.sampled) // _INT32_BYTES, len(output.logprobs)
        if num_sampled != num_asking or num_logprobs not in (0, num_asking):
            raise IntegrityError(
                "I4",
                f"expected {num_asking} tokens for step {step.step_id}, got {num_sampled} "
                f"with {num_logprobs} logprobs",
            )
        if len(output.scored) != step.num_scored:
            raise IntegrityError(
                "I12",
                f"expected {step.num_scored} scores for step {step.step_id}, got "
                f"{len(output.scored)}",
            )
        return num_asking

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
        self,
        step: StepPlan,
        output: StepOutput,
        tokenless: frozenset[int],
        failed: frozenset[int],
    ) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        sampled = unpack_ints(output.sampled)
        block_size, roster, void = self._kv.block_size, self._roster, step.void
        logprobs = output.logprobs
        place = -1
        for (sequence, start, count), asks in zip(step.scheduled, step.asks, strict=True):
            end = start + count
            if end // block_size > start // block_size and sequence not in void:
                self._publish(sequence, end)
            if not asks:
                continue
            place += 1
            if sequence.finish_reason is not None:
                continue
            if place in tokenless:
                if place in failed:
                    events += self._lose(sequence)
                continue
            row = logprobs[place] if logprobs else None
            if sequence.is_beam:
                self._searches.take_candidates(sequence, sampled[place], row)
            else:
                sequence.num_pending_tokens -= 1
                events.append(append_token(roster, sequence, sampled[place], row))
        return events

    def _publish(self, sequence: Sequence, num_computed_tokens: int, *, tail: bool = False) -> None:
        """Share what a step has computed, unless an earlier step failed to compute its prefix."""
        if not sequence.is_lost and sequence.block_table:
            # Of a token that was dropped in flight, nobody knows the content.
            num_known = min(num_computed_tokens, len(sequence.token_ids))
            self._kv.publish(sequence, num_known, tail=tail)

    def _let_followers_go(self, step: StepPlan) -> None:
        """Whose leader has computed the prompt."""
        roster = self._roster
        for sequence, start, count in step.scheduled:
            group = sequence.group
            is_leading = sequence is group.leader and sequence.status is SequenceStatus.RUNNING
            if is_leading and start + count >= sequence.num_prompt_tokens:
                self._publish(sequence, start + count, tail=True)
                roster.let_followers_go(group)

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


def _places(packed: bytes, num_asking: int, what: str) -> frozenset[int]:
    """Of rows among those that asked."""
    places = frozenset(unpack_ints(packed))
    if not places <= frozenset(range(num_asking)):
        raise IntegrityError(
            "I4", f"expected places below {num_asking} as {what}, got {sorted(places)}"
        )
    return places
