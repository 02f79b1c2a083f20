"""Matchers: follow the answers that a grammar binds, in threads, and fill the masks of their rows.

Owns the numbers of the slots of the MaskBoard, and who is told what. It must not know the
scheduler, text or where tokens come from. The event loop adds answers, pushes their tokens and
gives back their slots; a thread consumes, publishes, and posts what the loop must know: which
tokens are forced, which answers have ended or failed, and masks of answers that are waited for. It
posts once for the tokens of many, and nothing where there is nothing to say.

Invariants: a mask is written only after the token before it came. Whatever a grammar does ends its
own answer, with the reason, and nobody waits for its masks any more. A request whose answers
together took long goes on in a second thread (`matcher_lane.py`), so that the others don't wait for
it, and each with a grammar that often takes long for a token begins there; an answer that goes on
taking long is ended, but never for a single token: a thread's time also goes to what isn't the
grammar's, as when a collection of garbage falls on it. The memory of a matcher is free once its
slot is given back, whoever still has that. After `close` no thread is left, and no matcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..protocol import NO_MORE_MASKS, MaskBoard
from .matcher_lane import Lane
from .matcher_slot import Account, News, Slot

if TYPE_CHECKING:
    from ..text.grammar import Grammar, Matcher

SLOW_SHARE = 0.25  # of a grammar's tokens: then it is taken for slow


class Matchers:
    """Of one engine. Methods are the event loop's, but where they say otherwise."""

    def __init__(
        self,
        board: MaskBoard,
        on_news: Callable[[Sequence[News]], None],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`on_news` is called on the running event loop."""
        self._board = board
        self._on_news = on_news
        self._clock = clock  # of a thread's CPU time
        self._loop = asyncio.get_running_loop()
        self._slow = Lane("streamkv-matchers-slow", self._do, self._post)
        self._quick = Lane("streamkv-matchers", self._do, self._post, self._slow)
        self._lock = threading.Lock()  # of the next
        self._slots: set[Slot] = set()  # that are not given back
        self._on_room: Callable[[], None] | None = None

    @property
    def num_bytes(self) -> int:
        """That all matchers take, about."""
        with self._lock:
            return sum(slot.num_bytes for slot in self._slots)

    def call_once_there_is_room(self, callback: Callable[[], None]) -> None:
        """Once, on the event loop, when a slot has been given back. The last who asks is called."""
        with self._lock:
            self._on_room = callback

    def add(
        self, matchers: Sequence[Matcher], position: int, *, can_skip: bool, num_bytes: int = 0
    ) -> tuple[Slot, ...]:
        """A slot for each choice of a request, with the mask of the token at that position.
        `can_skip`: tokens may be appended without being sampled; `num_bytes`: that each matcher
        takes. Any thread may do this."""
        self._quick.start()
        self._slow.start()
        account = Account(is_slow=any(_is_slow(matcher.grammar) for matcher in matchers))
        slots: list[Slot] = []
        board = self._board
        numbers: list[int] = []
        try:
            for matcher in matchers:
                numbers.append(board.add())
                place = numbers[-1], board.words(numbers[-1])
                slot = Slot(
                    *(*place, matcher, position, account), can_skip=can_skip, num_bytes=num_bytes
                )
                slots.append(slot)
                self._publish(slot)
        except BaseException:
            for number in numbers:
                board.remove(number)
            raise
        with self._lock:
            self._slots.update(slots)
        return tuple(slots)

    def push(self, tokens: Sequence[tuple[Slot, int]]) -> None:
        """These came, in order."""
        self._quick.put(tokens)

    def end(self, slots: Sequence[Slot]) -> None:
        """These answers have ended. A step that was sent ahead may wait for more masks of each: it
        is not to wait. Any thread may do this. Idempotent."""
        for slot in slots:
            slot.is_over = True
            self._board.publish(slot.number, NO_MORE_MASKS)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """No row has them any more. Any thread may do this. Idempotent."""
        self._quick.put([(slot, None) for slot in slots])

    def gate(self, slot: Slot) -> int:
        """Post each of its masks from now on. Returns the position of the last."""
        slot.is_gated = True  # first, so that none is missed in between
        return slot.published

    def stop(self) -> None:
        """Ask the threads to end after the token they are at. Nothing is done any more."""
        self._quick.stop()
        self._slow.stop()

    def close(self) -> None:
        """Stop, and join the threads. Any thread may do this. Idempotent."""
        self._quick.close()
        self._slow.close()
        with self._lock:
            while self._slots:
                self._slots.pop().release()

    # --- on the threads ----------------------------------------------------------------------

    def _do(self, slot: Slot, token_id: int | None, news: list[News]) -> float:
        """Take a token, or None: the slot is given back. Returns the CPU time that it took."""
        began_s = self._clock()
        try:
            if token_id is None:
                self._remove(slot)
            elif not slot.is_over:
                self._advance(slot, token_id, news)
                slot.charge(self._clock() - began_s)
        except BaseException as exc:  # whatever it is, even a panic, the others go on
            news.append(News(slot, failure=str(exc) or type(exc).__name__))
            self.end([slot])
        return self._clock() - began_s

    def _post(self, news: list[News]) -> None:
        self._call_soon(functools.partial(self._on_news, news))

    def _call_soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback)

    def _advance(self, slot: Slot, token_id: int, news: list[News]) -> None:
        slot.matcher.consume(token_id)
        position = slot.published + 1
        if slot.matcher.has_ended:
            news.append(News(slot, position, has_ended=True))
            self.end([slot])
            return
        slot.published = position
        self._publish(slot)
        forced = slot.take_forced()
        if forced or slot.is_gated:
            news.append(News(slot, position, forced))

    def _remove(self, slot: Slot) -> None:
        with self._lock:
            if slot not in self._slots:
                return
            self._slots.remove(slot)
            slot.release()
            on_room, self._on_room = self._on_room, None
        self._board.remove(slot.number)
        if on_room is not None:
            self._call_soon(on_room)

    def _publish(self, slot: Slot) -> None:
        matcher, words = slot.matcher, slot.words
        if matcher.forced:
            _write_one(words, matcher.forced[0])
        else:
            words[:] = memoryview(matcher.mask).cast("i")[: len(words)]
        self._board.publish(slot.number, slot.published)


def _is_slow(grammar: Grammar | None) -> bool:
    return grammar is not None and grammar.slow_share > SLOW_SHARE


def _write_one(words: memoryview, token_id: int) -> None:
    """The mask of one token."""
    words[:] = memoryview(bytes(words.nbytes)).cast("i")
    bit = token_id % 32
    words[token_id // 32] = 1 << bit if bit < 31 else -1 << 31
