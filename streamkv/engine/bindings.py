"""Bindings: the answers that grammars bind, between the scheduler and the matchers.

Owns which sequence has which slot, news of the matchers until the loop's next turn, and slots that
steps in flight may still read. It must not know readers. Event-loop thread only.

Invariant: a slot is given back once, when its request has ended and no step in flight names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..core.scheduler import Scheduler, TokenEvent
from ..core.sequence import Sequence
from ..protocol import MaskBoard
from .entry import Entry
from .matcher_slot import News, Slot
from .matchers import Matchers


class Bindings:
    """Of one engine loop."""

    def __init__(self, scheduler: Scheduler, masks: MaskBoard, wake: Callable[[], None]) -> None:
        """`wake` is called when there is news to take."""
        self.matchers = Matchers(masks, self._on_news)
        self._scheduler = scheduler
        self._wake = wake
        self._slots: dict[Sequence, Slot] = {}  # of sequences that the scheduler has
        self._news: list[News] = []
        self._leaving: list[Entry] = []

    def begin(self, entry: Entry) -> None:
        """The scheduler has its sequences now, and is told of tokens with which they must begin."""
        for slot, sequence in zip(entry.slots, entry.sequences, strict=True):
            slot.sequence = sequence
            self._slots[sequence] = slot
            if forced := slot.take_forced():
                self._scheduler.force(sequence, slot.published, forced)

    def take_news(self, end: Callable[[Sequence, str], None]) -> None:
        """Tell the scheduler what the matchers say. `end` is called with the sequences that end,
        and why if something went wrong."""
        news, self._news = self._news, []
        for slot, position, forced, has_ended, failure in news:
            sequence = slot.sequence
            if sequence is None or sequence not in self._slots or sequence.finish_reason:
                continue  # it has ended otherwise
            if has_ended or failure:
                end(sequence, failure)
                continue
            self._scheduler.on_mask(sequence, position)
            if forced:
                self._scheduler.force(sequence, position, forced)

    def tell(self, events: Iterable[TokenEvent]) -> None:
        """Of each token, before the device is fed: it will wait for the mask that follows."""
        slots = self._slots
        if not slots:
            return
        tokens: list[tuple[Slot, int]] = []
        for event in events:
            slot = slots.get(event.sequence)
            if slot is None:
                continue
            if event.finish_reason is None:
                tokens.append((slot, event.token_id))
            else:
                self.end(event.sequence)
        if tokens:
            self.matchers.push(tokens)

    def end(self, *sequences: Sequence) -> None:
        """They have ended, however that came. Idempotent."""
        slots = [slot for one in sequences if (slot := self._slots.pop(one, None)) is not None]
        if slots:
            self.matchers.end(slots)

    def note_gated(self) -> None:
        """Sequences whose masks came late are to be told of each from now on."""
        for sequence, slot in self._slots.items():
            if sequence.is_gated and not slot.is_gated:
                self._scheduler.on_mask(sequence, self.matchers.gate(slot))

    def leave(self, entry: Entry) -> None:
        """It has ended."""
        if entry.slots:
            self.end(*entry.sequences)
            self._leaving.append(entry)

    def give_back(self, committed_step_id: int) -> None:
        """Slots of requests that have ended, and that no later step names."""
        if not self._leaving:
            return
        is_idle = self._scheduler.num_in_flight_steps == 0
        staying: list[Entry] = []
        for entry in self._leaving:
            last_step_id = max((one.last_step_id for one in entry.sequences), default=-1)
            if is_idle or last_step_id <= committed_step_id:
                self.matchers.give_back(entry.slots)
            else:
                staying.append(entry)
        self._leaving = staying

    def _on_news(self, news: Iterable[News]) -> None:
        self._news += news
        self._wake()
