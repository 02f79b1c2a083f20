"""Searches: what steps give to beams, and the answers of searches that have ended.

Owns which candidates have come, through the groups, and events that nobody has taken yet. Must not
know steps. Invariant (I8): the events of a search come once it has ended, each once.

They come all at the end, hundreds of thousands of a wide and long one: they are made while they are
taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest

from ..protocol import FinishReason, RowLogprobs
from .beam import Hypothesis
from .events import NO_TOKEN, TokenEvent
from .groups import SequenceGroup
from .integrity import IntegrityError
from .kv.manager import KVManager
from .kv.types import Keep
from .roster import Roster
from .sequence import NO_ROW, Sequence, SequenceStatus


class Searches:
    """Of all groups with beams."""

    __slots__ = ("_answers", "_kv", "_roster")

    def __init__(self, kv: KVManager, roster: Roster) -> None:
        self._kv = kv
        self._roster = roster
        # Of searches that have ended: events that nobody has taken yet.
        self._answers: dict[SequenceGroup, Iterator[TokenEvent]] = {}

    def take_candidates(
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
            self._end(group)
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
            heir.max_num_tokens = heir.halt_at = len(heir.token_ids) + 1
            heir.num_slots = 0  # the block it writes next may be shared
        for beam in former:
            if beam in group.spare:
                roster.rest(beam)
        roster.settle_leading(group)

    def _end(self, group: SequenceGroup) -> None:
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
                sequence.stop_reason = group.stop_reason(answer.last.token_id)
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
