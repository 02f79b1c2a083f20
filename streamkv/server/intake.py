"""What the streams of an answer bring, in the order in which they had something.

Owns which prompts have something, which are not at their end, and the pieces of a delta too long to
be read at once. Knows nothing of what becomes of the deltas. Invariants: the deltas of a prompt
stay in order, and its pieces come before anything else; when all has ended nothing is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..engine.stream import TokenDelta, TokenStream
from .deltas import cut, has_one_delta, is_long


class Intake:
    """Of one answer. Empty until it begins, and after it is cleared."""

    def __init__(self) -> None:
        self.is_plain = False  # one prompt, and a turn of the engine brings one delta at most
        self.pieces: deque[TokenDelta] = deque()  # of the first prompt, taken already
        self._streams: Sequence[TokenStream] = ()
        self._ready: dict[int, None] = {}  # prompts whose streams have something, in order
        self._unfinished: set[int] = set()  # prompts whose last delta was not taken yet
        self._running: list[int] = []  # prompts not known to have all their tokens

    def begin(self, streams: Sequence[TokenStream]) -> None:
        self._streams = streams
        self.is_plain = len(streams) == 1 and has_one_delta(streams[0])
        self._running.extend(range(len(streams)))
        self._unfinished.update(self._running)

    def clear(self) -> None:
        """Nothing is taken any more."""
        self._streams = ()
        for waiting in (self.pieces, self._ready, self._unfinished, self._running):
            waiting.clear()

    @property
    def first(self) -> int | None:
        """The prompt whose turn it is."""
        return next(iter(self._ready), None)

    @property
    def is_done(self) -> bool:
        """Whether all has been taken."""
        return not self._unfinished

    def add(self, prompt: int) -> bool:
        """Its stream has something, or no more; False if that is known."""
        if prompt not in self._unfinished:
            return False
        self._ready[prompt] = None
        return True

    def add_all(self) -> bool:
        """All have something, or no more; False if that is known."""
        self._ready.update(dict.fromkeys(sorted(self._unfinished)))
        return bool(self._ready)

    def take(self, prompt: int) -> TokenDelta | None:
        """What the first prompt has next, or a piece of it; None: nothing, for now or for ever."""
        if self.pieces:
            return self.pieces.popleft()
        delta = self._streams[prompt].take()
        return self.cut(delta) if delta is not None and is_long(delta) else delta

    def cut(self, delta: TokenDelta) -> TokenDelta:
        """The first piece of it; the others wait."""
        self.pieces.extend(cut(delta))
        return self.pieces.popleft()

    def pass_over(self, prompt: int) -> TokenStream:
        """The first prompt has nothing: another one's turn. Returns its stream."""
        del self._ready[prompt]
        stream = self._streams[prompt]
        if stream.done:
            self._unfinished.discard(prompt)
        return stream

    def first_ended(self) -> int | None:
        """The prompt whose turn it is, if it is at its end."""
        prompt = self.first
        if prompt is None or self.pieces or not self._streams[prompt].done:
            return None
        return prompt

    def all_have_come(self) -> bool:
        """Whether every stream has all its tokens, taken or not."""
        running = self._running
        while running and self._streams[running[-1]].finish_s is not None:
            running.pop()
        return not running
