"""Slots: one answer's matcher, its place on the mask board, and what is told of it.

Owns how much time an answer may take, how slow its grammar is, and what the slots of a request
share. Knows no lane and no board. Invariant: an answer that goes on taking long is told to end, but
never for a single token.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from ..core.sequence import Sequence as Choice
    from ..text.grammar import Matcher

TURN_S = 0.003  # of CPU time; who takes more in the quick lane goes on in the slow one
ALLOWED_TOKEN_S = 0.02  # of CPU time for each token of an answer,
ALLOWED_S = 0.3  # and besides: more in a row ends it
MAX_CHARGED_S = 0.1  # for one token, so that it takes several
NUM_LATEST = 16  # tokens of a grammar, that count most for how slow it is

Work: TypeAlias = "tuple[Slot, int | None]"  # a token, or None: the slot is given back


class Account:
    """What the slots of one request share. The thread's of the lane that it is in."""

    __slots__ = ("cost_s", "ended_s", "is_slow", "work")

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow  # not to be served in the quick lane
        self.cost_s = 0.0  # of its last turn
        self.ended_s = 0.0  # on the lane's clock, that turn
        self.work: deque[Work] = deque()


class Slot:
    """One answer's matcher, and its place on the board. The thread's, but for what is the loop's:
    `number`, `sequence`, `is_gated`, and what it may read (`published`) or set (`is_over`)."""

    __slots__ = (
        "_excess_s",
        "_grammar",
        "_told",
        "account",
        "can_skip",
        "is_gated",
        "is_over",
        "matcher",
        "num_bytes",
        "number",
        "published",
        "sequence",
        "words",
    )

    def __init__(
        self,
        number: int,
        words: memoryview,
        matcher: Matcher,
        position: int,
        account: Account,
        *,
        can_skip: bool,
        num_bytes: int,
    ) -> None:
        self.number = number
        self.words = words
        self.matcher = matcher
        self._grammar = matcher.grammar
        self.account = account  # its request's
        self.num_bytes = num_bytes  # that the matcher takes, about
        self.sequence: Choice | None = None  # once the scheduler knows it
        self.can_skip = can_skip  # tokens may be appended without being sampled
        self.is_gated = False  # its masks are waited for
        self.published = position  # the position of its mask
        self.is_over = False  # it has failed, or its answer has ended
        self._excess_s = 0.0  # that its last tokens took more than they may
        self._told: list[int] | None = None  # the forced tokens that were told last

    def take_forced(self) -> tuple[int, ...]:
        """The tokens from `published` on that the grammar forces, if they weren't told yet."""
        forced = self.matcher.forced
        if not forced or forced is self._told or not self.can_skip:
            return ()
        self._told = forced
        return tuple(forced)

    def charge(self, took_s: float) -> None:
        """A token took so long. TimeoutError if too many have."""
        grammar = self._grammar
        if grammar is not None:
            grammar.slow_share += ((took_s > TURN_S) - grammar.slow_share) / NUM_LATEST
        charged_s = min(took_s, MAX_CHARGED_S)
        self._excess_s = max(0.0, self._excess_s + charged_s - ALLOWED_TOKEN_S)
        if self._excess_s > ALLOWED_S:
            raise TimeoutError(f"it takes too long, {took_s:.2f} s for the last token")

    def release(self) -> None:
        """Nobody asks for its masks any more."""
        del self.matcher, self.words, self._grammar


class News(NamedTuple):
    """What the event loop must know of an answer."""

    slot: Slot
    position: int = 0  # of the next token
    forced: tuple[int, ...] = ()  # the tokens from there on
    has_ended: bool = False  # nothing may follow
    failure: str = ""  # why there is no mask
