"""What an answer is made by, written to and governed by.

Owns the protocols of a writer, which makes events, and of an outlet, which takes them, and the
policy for a reader that is gone. Knows no implementation of them, but of the writer that is spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from ..engine.stream import TokenDelta, TokenStream
from ..errors import GoneError, StreamkvError
from .event_log import Event


class OnDisconnect(StrEnum):
    """What becomes of a request whose reader is gone."""

    ABORT = "abort"
    CONTINUE = "continue"  # it goes on until it has ended, or the window has passed
    PAUSE = "pause"  # it gives its place on the device back until the reader returns


class Policy(NamedTuple):
    """How an answer deals with the loss of its reader."""

    resumable: bool = False  # its events are kept
    on_disconnect: OnDisconnect = OnDisconnect.ABORT
    window_s: float = 0.0  # so long it lives without a reader


PLAIN = Policy()


class AnswerWriter(Protocol):
    """Makes one answer's events. Synchronous; knows no transport."""

    def begin(self, streams: Sequence[TokenStream]) -> Sequence[Event]:
        """All prompts are admitted. What goes wrong before the first event is no event but an
        error of the request."""

    def push(self, prompt: int, delta: TokenDelta) -> Sequence[Event]:
        """The events of one delta, which isn't long."""

    def end(self) -> Sequence[Event]:
        """The last events, after the last delta of all prompts."""

    def fail(self, error: BaseException) -> Sequence[Event]:
        """The last events of an answer that broke."""


class _Spent:
    """In the place of a writer that has no more to make, with all that it held."""

    def begin(self, streams: Sequence[TokenStream]) -> Sequence[Event]:
        return ()

    def push(self, prompt: int, delta: TokenDelta) -> Sequence[Event]:
        return ()

    def end(self) -> Sequence[Event]:
        return ()

    def fail(self, error: BaseException) -> Sequence[Event]:
        return ()


SPENT = _Spent()


def taken_over(answer_id: str) -> GoneError:
    """Why a reader gets nothing more, when another one reads the answer now."""
    return GoneError(
        f"{answer_id}: another reader has taken over, and there is one at a time; resume it to "
        "take it back",
        code="taken_over",
    )


class Outlet(Protocol):
    """Where an answer's events go: a connection, or a lane of one."""

    @property
    def is_open(self) -> bool:
        """Whether it may be written to now."""

    def write(self, number: int, event: Event) -> None:
        """Send one event. Only called while `is_open`."""

    def ended(self, error: StreamkvError | None = None) -> None:
        """No event will follow: the answer has ended, or, if there is an error, that is why its
        rest does not come here. It is this reader's alone, and no event of the answer."""
