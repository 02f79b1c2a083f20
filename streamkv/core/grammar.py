"""Grammars: how far sequences may run whose next tokens a grammar decides.

Owns who is gated, and forced tokens that are still to be appended. Must not know what a grammar
is, nor who makes its masks. Invariants (I11): a sequence whose mask came late costs the others one
wait, and no more: from then on a token is asked for only once its mask is there. What a step was to
compute after a token that did not come is void: nothing of it is published or told. Forced tokens
are appended while nothing of the sequence is pending, so each token has one source; until all are
there it asks for none. One that is paused gets none before it is resumed. They are appended as
they are taken, a part at a time: thousands may be forced at once, and somebody has work with each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from .events import TokenEvent, append_token
from .integrity import IntegrityError
from .roster import Roster
from .sequence import Sequence, SequenceStatus
from .step_plan import StepPlan


class Forced:
    """The grammar leaves no choice: these tokens come, the first of them at position `start`."""

    __slots__ = ("_num_there", "_start", "_token_ids")

    def __init__(self, start: int, token_ids: tuple[int, ...]) -> None:
        self._start = start
        self._token_ids = token_ids
        self._num_there = 0  # of them, known to be in the sequence

    def take(self, sequence_token_ids: array[int], max_num: int) -> tuple[int, ...]:
        """The next to append, at most so many; none if all are there, or something else came
        instead of them."""
        came = sequence_token_ids[self._start + self._num_there :]
        expected = self._token_ids[self._num_there : self._num_there + len(came)]
        if any(one != other for one, other in zip(came, expected, strict=False)):
            return ()
        first = self._num_there + len(came)
        taken = self._token_ids[first : first + max_num]
        self._num_there = first
        return taken

    def is_all(self, sequence_token_ids: array[int]) -> bool:
        """They are all there."""
        return len(sequence_token_ids) >= self._start + len(self._token_ids)


class Grammars:
    """Of all sequences that have one."""

    __slots__ = ("_roster", "_to_append")

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._to_append: dict[Sequence, Forced] = {}  # once nothing is pending

    @property
    def is_busy(self) -> bool:
        """Somebody who runs waits for a mask, or tokens are to be appended: something will come of
        itself."""
        if any(one.awaits_mask for one in self._roster.running):
            return True
        paused = self._roster.paused
        return any(one.group not in paused for one in self._to_append)

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
        if sequence in self._to_append:
            sequence.halt_at = sequence.num_tokens
        elif sequence.is_gated:
            halt_at = max(sequence.mask_position + 1, sequence.num_tokens)
            sequence.halt_at = min(halt_at, sequence.max_num_tokens)
        else:
            sequence.halt_at = sequence.max_num_tokens

    # --- forced tokens -----------------------------------------------------------------------

    def force(self, sequence: Sequence, start: int, token_ids: tuple[int, ...]) -> None:
        """To be appended. What is in flight gives the first of them itself."""
        num_tokens = len(sequence.token_ids)
        if start > num_tokens:
            raise IntegrityError(
                "I11", f"expected forced tokens from position {num_tokens} on, got {start}"
            )
        wants_logprobs = sequence.sampling.num_logprobs >= 0 or sequence.wants_scores
        if wants_logprobs or sequence.finish_reason is not None:
            return  # without a step there would be none
        self._to_append[sequence] = Forced(start, token_ids)
        self._settle(sequence)

    @property
    def has_forced(self) -> bool:
        """`take_forced` would do something."""
        return any(map(self._can_append, self._to_append))

    def take_forced(self, max_num: int) -> list[TokenEvent]:
        """Append at most so many, of sequences that go on and of which nothing is pending. One with
        more of them goes behind the others."""
        events: list[TokenEvent] = []
        for sequence in list(filter(self._can_append, self._to_append)):
            if len(events) >= max_num:
                break
            forced = self._to_append.pop(sequence)
            if sequence.finish_reason is None:
                events += self._append(sequence, forced, max_num - len(events))
        return events

    def _can_append(self, sequence: Sequence) -> bool:
        return not sequence.num_pending_tokens and sequence.group not in self._roster.paused

    def _append(self, sequence: Sequence, forced: Forced, max_num: int) -> list[TokenEvent]:
        """Some of them; the others later."""
        if not sequence.num_output_tokens:
            sequence.token_ids = sequence.token_ids[:]  # others of its group may share the prompt
        events: list[TokenEvent] = []
        for token_id in forced.take(sequence.token_ids, max_num):
            sequence.num_forced_tokens += 1
            events.append(append_token(self._roster, sequence, token_id, None))
            if sequence.finish_reason is not None:
                return events
        if events:
            if sequence.status is SequenceStatus.RUNNING:
                self._roster.retable(sequence)  # the device doesn't know them
            if not forced.is_all(sequence.token_ids):
                self._to_append[sequence] = forced
        self._settle(sequence)
        return events
