"""The last events of an answer, for a reader who lost its connection.

Owns the events and their bytes, of one answer and of all together. It must not know what events
say, nor who reads them. Invariant: an answer's log takes at most `max_bytes`, all of them together
at most the budget's; what goes first is what is oldest. The one exception is what the present
reader has not been given yet (see `append`), which is never more than the events of one piece of a
delta.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec import Struct

from ..errors import GoneError, NotFoundError

EVENT_OVERHEAD_BYTES = 64  # of the Python objects around an event's data


class Event(Struct, frozen=True, gc=False):
    """One event of an answer. `name` is empty for those that have none; `data` has no newline."""

    name: str
    data: bytes


def not_kept(answer_id: str) -> NotFoundError:
    """The error where an answer has no log."""
    return NotFoundError(
        f'{answer_id}: its events are not kept; ask with stream_options {{"resumable": true}}',
        code="not_resumable",
    )


class LogBudget:
    """What all logs together may take."""

    def __init__(
        self, max_bytes: int, max_total_bytes: int, make_room: Callable[[], None] = lambda: None
    ) -> None:
        """`make_room` is called while they take too much, before a log drops events of its own."""
        self.max_bytes = max_bytes  # of one log
        self.max_total_bytes = max_total_bytes
        self.make_room = make_room
        self.num_bytes = 0

    @property
    def is_exceeded(self) -> bool:
        return self.num_bytes > self.max_total_bytes


class EventLog:
    """The events first .. first + len - 1 of one answer."""

    def __init__(self, budget: LogBudget) -> None:
        self.first = 0  # the number of the oldest event that is kept
        self.num_bytes = 0
        self._budget = budget
        # Apart, so that nothing of them is the garbage collector's to look at.
        self._names: deque[str] = deque()
        self._data: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._data)

    def append(self, event: Event, *, keep_from: int) -> None:
        """Keep the next event, and drop what is too much of those before number `keep_from`."""
        name, data = event.name, event.data
        budget, num_bytes = self._budget, len(data) + EVENT_OVERHEAD_BYTES
        self._names.append(name)
        self._data.append(data)
        self.num_bytes += num_bytes
        budget.num_bytes += num_bytes
        if self.num_bytes > budget.max_bytes or budget.num_bytes > budget.max_total_bytes:
            self._trim(keep_from)

    def check_has(self, number: int, answer_id: str) -> None:
        """GoneError unless that event, and those after it, are here or still to come."""
        if number < self.first:
            raise GoneError(
                f"{answer_id}: events up to {self.first - 1} were dropped, and event {number} with "
                "them; send the request again",
                code="events_dropped",
            )

    def __getitem__(self, number: int) -> Event:
        place = number - self.first
        return Event(self._names[place], self._data[place])

    def clear(self) -> None:
        """Give all bytes back; the log is not used any more."""
        while self._data:
            self._drop_first()

    def _trim(self, keep_from: int) -> None:
        budget = self._budget
        if budget.is_exceeded:
            budget.make_room()
        while self.first < keep_from and (self.num_bytes > budget.max_bytes or budget.is_exceeded):
            self._drop_first()

    def _drop_first(self) -> None:
        self._names.popleft()
        num_bytes = len(self._data.popleft()) + EVENT_OVERHEAD_BYTES
        self.num_bytes -= num_bytes
        self._budget.num_bytes -= num_bytes
        self.first += 1
