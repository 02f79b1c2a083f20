"""FakeGrammars: the engine's part in grammars, for the harness: matchers, their masks and forcing.

A matcher takes a token when it is committed, then makes its mask: at once, or when it is told to.
"""

from __future__ import annotations

from fakes import FakeMaskBoard, FakeMatcher

from streamkv.core.scheduler import Scheduler
from streamkv.core.sequence import NO_ROW, Sequence


class FakeGrammars:
    """`forces`: "never", "always" or "sometimes": then only some of the tokens, too."""

    def __init__(
        self, scheduler: Scheduler, board: FakeMaskBoard, *, are_late: bool, forces: str
    ) -> None:
        self.scheduler = scheduler
        self.board = board
        self.are_late = are_late
        self.forces = forces
        self.seeds: dict[Sequence, int] = {}
        self.due: dict[Sequence, None] = {}  # whose masks are to be made
        self._matchers: dict[int, FakeMatcher] = {}  # by slot
        self._holders: list[Sequence] = []  # of slots
        self._num_chances = 0  # to force

    def open(self, seed: int, num: int, position: int) -> tuple[int, ...]:
        """Slots for so many choices, with their first masks."""
        slots = tuple(self.board.add() for _ in range(num))
        for choice, slot in enumerate(slots):
            matcher = self._matchers[slot] = FakeMatcher(seed + choice, self.board.vocab_size)
            matcher.publish(self.board, slot, position)
        return slots

    def bind(self, sequences: list[Sequence], seed: int) -> None:
        """They were added."""
        self._holders += sequences
        self.seeds.update({sequence: seed + sequence.choice for sequence in sequences})
        for sequence in sequences:
            self._force(sequence)

    def consume(self, sequence: Sequence, token_id: int) -> None:
        """A token is committed."""
        if sequence.mask_slot < 0:
            return
        self._matchers[sequence.mask_slot].consume(token_id)
        self.due[sequence] = None
        # Sometimes it knows which tokens must come before it has made a mask.
        if self.forces == "sometimes" and self.are_late:
            self._force(sequence)

    def make_masks(self, num: int | None = None) -> None:
        """Of those that are longest due, at most so many."""
        for sequence in list(self.due)[:num]:
            del self.due[sequence]
            if sequence.finish_reason is not None:
                continue
            matcher = self._matchers[sequence.mask_slot]
            position = sequence.num_prompt_tokens + matcher.num_consumed
            matcher.publish(self.board, sequence.mask_slot, position)
            self.scheduler.on_mask(sequence, position)
            self._force(sequence)

    def _force(self, sequence: Sequence) -> None:
        matcher = self._matchers[sequence.mask_slot]
        forced = matcher.forced.copy()
        if self.forces == "never" or not forced:
            return
        self._num_chances += 1
        if self.forces == "sometimes":
            forced = forced[: self._num_chances % 3]
        start = sequence.num_prompt_tokens + matcher.num_consumed
        self.scheduler.force(sequence, start, forced)

    def remove_slots(self) -> None:
        """Of sequences that have ended and left their rows."""
        for sequence in self._holders.copy():
            if sequence.finish_reason is not None and sequence.row == NO_ROW:
                self._holders.remove(sequence)
                del self._matchers[sequence.mask_slot]
                self.board.remove(sequence.mask_slot)
        assert self.board.violations == [], self.board.violations
