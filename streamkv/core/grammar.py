"""Grammars: how far sequences may run whose next tokens a grammar decides.

Owns who is gated, and forced tokens that are still to be appended. Must not know what a grammar
is, nor who makes its masks. Invariants (I11): a sequence whose mask came late costs the others one
wait, and no more: from then on a token is asked for only once its mask is there. What a step was to
compute after a token that did not come is void: nothing of it is published or told. Forced tokens
are appended while nothing of the sequence is pending, so each token has one source.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from .events import TokenEvent, append_token
from .integrity import IntegrityError
from .roster import Roster
from .sequence import Sequence, SequenceStatus
from .step_plan import StepPlan


class Forced(NamedTuple):
    """The grammar leaves no choice: these tokens come, the first of them at position `start`."""

    start: int
    token_ids: Tokens[int]


class Grammars:
    """Of all sequences that have one."""

    __slots__ = ("_roster", "to_append")

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.to_append: dict[Sequence, Forced] = {}  # once nothing is pending

    @property
    def awaits_mask(self) -> bool:
        """Somebody who runs does, so that something will come of itself."""
        return any(sequence.awaits_mask for sequence in self._roster.running)

    # --- masks -------------------------------------------------------------------------------

    def on_mask(self, sequence: Sequence, position: int) -> None:
        """The token at that position can be chosen."""
        sequence.mask_position = max(sequence.mask_position, position)
        self._settle(sequence)

    def defer(self, sequence: Sequence, later_steps: Iterable[StepPlan]) -> None:
        """A step has given no token, as its mask was not there. The last token is computed again:
        its logits are needed."""
        if sequence.finish_reason is not None:
            return
        for step in later_steps:
            step.void.add(sequence)
        sequence.num_pending_tokens = 0
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        sequence.is_gated = True
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """How far it may run now."""
        if sequence in self.to_append:
            sequence.halt_at = sequence.num_tokens
        elif sequence.is_gated:
            halt_at = max(sequence.mask_position + 1, sequence.num_tokens)
            sequence.halt_at = min(halt_at, sequence.max_num_tokens)
        else:
            sequence.halt_at = sequence.max_num_tokens

    # --- forced tokens -----------------------------------------------------------------------

    def force(self, sequence: Sequence, start: int, token_ids: Tokens[int]) -> list[TokenEvent]:
        """Append them, now or after a commit. What is in flight gives the first of them itself."""
        num_tokens = len(sequence.token_ids)
        if start > num_tokens:
            raise IntegrityError(
                "I11", f"expected forced tokens from position {num_tokens} on, got {start}"
            )
        wants_logprobs = sequence.sampling.num_logprobs >= 0 or sequence.wants_scores
        if wants_logprobs or sequence.finish_reason is not None:
            return []  # without a step there would be none
        forced = Forced(start, token_ids)
        if not sequence.num_pending_tokens:
            return self._append(sequence, forced)
        self.to_append[sequence] = forced
        self._settle(sequence)
        return []

    def append_ready(self) -> list[TokenEvent]:
        """For sequences of which nothing is pending any more."""
        events: list[TokenEvent] = []
        for sequence in list(self.to_append):
            if sequence.finish_reason is not None:
                del self.to_append[sequence]
            elif not sequence.num_pending_tokens:
                events += self._append(sequence, self.to_append.pop(sequence))
        return events

    def _append(self, sequence: Sequence, forced: Forced) -> list[TokenEvent]:
        is_admitted = sequence.num_preemptions > 0 or sequence.status is SequenceStatus.RUNNING
        if not is_admitted:
            sequence.token_ids = sequence.token_ids[:]  # others of its group share it
        events: list[TokenEvent] = []
        for token_id in _rest(sequence.token_ids, forced):
            events.append(append_token(self._roster, sequence, token_id, None))
            if sequence.finish_reason is not None:
                return events
        if events and sequence.status is SequenceStatus.RUNNING:
            self._roster.retable(sequence)  # the device doesn't know them
        self._settle(sequence)
        return events


def _rest(token_ids: array[int], forced: Forced) -> Tokens[int]:
    """What is not yet there; nothing if something else came instead."""
    known = token_ids[forced.start :]
    if any(one != other for one, other in zip(known, forced.token_ids, strict=False)):
        return ()
    return forced.token_ids[len(known) :]
