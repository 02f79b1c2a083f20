"""Entry: a request that has not ended, as the engine's loop keeps it.

Knows nothing; identity is equality.
"""

from __future__ import annotations

from ..core.sequence import Sequence
from ..protocol import Request
from .mailbox import Mailbox
from .matcher_slot import Slot


class Entry:
    """The request, its sequences, and where its tokens go."""

    __slots__ = ("is_paused", "mailbox", "request", "sequences", "slots")

    def __init__(self, request: Request, mailbox: Mailbox, slots: tuple[Slot, ...] = ()) -> None:
        self.request = request
        self.mailbox = mailbox
        self.slots = slots  # of its sequences, if a grammar binds them
        self.sequences: list[Sequence] = []  # empty until it leaves the queue
        self.is_paused = False
