"""Matchers: follow the answers that a grammar binds, in a thread, and fill the masks of their rows.

Owns the threads, the slots of the MaskBoard and who is told what. It must not know the scheduler,
text or where tokens come from. The event loop adds answers, pushes their tokens and gives back
their slots; the thread consumes, publishes, and posts what the loop must know: which tokens are
forced, which answers have ended or failed, and masks of answers that are waited for. It posts once
for all tokens of a turn, and nothing where there is nothing to say.

Invariants: a mask is written only after the token before it came. Whatever a grammar does ends its
own answer, with the reason. A matcher that once took long goes on in a second thread, so that the
others don't wait for it; one that takes long for every token is ended. After `close` no thread is
left.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..protocol import MaskBoard
from . import threads

if TYPE_CHECKING:
    from ..core.sequence import Sequence as Choice
    from ..text.grammar import Matcher

SLOW_S = 0.003  # of one token: the others wait so long at most, but for the first time
ALLOWED_S = 1.0  # of CPU time for an answer, and besides
ALLOWED_TOKEN_S = 0.02  # for each of its tokens

# In place of a token:
_END = -1
_GIVE_BACK = -2


class Slot:
    """One answer's matcher, and its place on the board. The thread's, but for what is the loop's:
    `number`, `sequence`, `is_gated`, and `published`, which it may read."""

    __slots__ = (
        "_told",
        "can_skip",
        "cpu_s",
        "is_gated",
        "is_over",
        "is_slow",
        "matcher",
        "num_bytes",
        "num_tokens",
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
        *,
        can_skip: bool,
        num_bytes: int,
    ) -> None:
        self.number = number
        self.words = words
        self.matcher = matcher
        self.num_bytes = num_bytes  # that the matcher takes, about
        self.sequence: Choice | None = None  # once the scheduler knows it
        self.can_skip = can_skip  # tokens may be appended without being sampled
        self.is_gated = False  # its masks are waited for
        self.published = position  # the position of its mask
        self.is_over = False  # it has failed, or its answer has ended
        self.is_slow = False
        self.cpu_s = 0.0
        self.num_tokens = 0
        self._told: list[int] | None = None  # the forced tokens that were told last

    def take_forced(self) -> tuple[int, ...]:
        """The tokens from `published` on that the grammar forces, if they weren't told yet."""
        forced = self.matcher.forced
        if not forced or forced is self._told or not self.can_skip:
            return ()
        self._told = forced
        return tuple(forced)


class News(NamedTuple):
    """What the event loop must know of an answer."""

    slot: Slot
    position: int = 0  # of the next token
    forced: Sequence[int] = ()  # the tokens from there on
    has_ended: bool = False  # nothing may follow
    failure: str = ""  # why there is no mask


class Matchers:
    """Of one engine. Methods are the event loop's, but where they say otherwise."""

    def __init__(self, board: MaskBoard, on_news: Callable[[Sequence[News]], None]) -> None:
        """`on_news` is called on the running event loop."""
        self._board = board
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._quick = _Lane(self, "streamkv-matchers")
        self._slow = _Lane(self, "streamkv-matchers-slow")
        self._lock = threading.Lock()  # of the next
        self._slots: set[Slot] = set()  # that are not given back

    @property
    def num_bytes(self) -> int:
        """That all matchers take, about."""
        with self._lock:
            return sum(slot.num_bytes for slot in self._slots)

    def add(
        self, matchers: Sequence[Matcher], position: int, *, can_skip: bool, num_bytes: int = 0
    ) -> tuple[Slot, ...]:
        """A slot for each, with the mask of the token at that position. `can_skip`: tokens may be
        appended without being sampled; `num_bytes`: that each takes. Any thread may do this."""
        slots: list[Slot] = []
        board = self._board
        numbers: list[int] = []
        try:
            for matcher in matchers:
                numbers.append(board.add())
                words = board.words(numbers[-1])
                slot = Slot(
                    *(numbers[-1], words, matcher, position), can_skip=can_skip, num_bytes=num_bytes
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
        """These answers have ended, with the tokens that were pushed. A step that was sent ahead
        may wait for one mask more of each: it is not to wait, whatever the mask says."""
        self._quick.put([(slot, _END) for slot in slots])

    def give_back(self, slots: Sequence[Slot]) -> None:
        """No row has them any more. Any thread may do this."""
        self._quick.put([(slot, _GIVE_BACK) for slot in slots])

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

    # --- on the threads ----------------------------------------------------------------------

    def _take(self, lane: _Lane, tokens: Sequence[tuple[Slot, int]]) -> None:
        news: list[News] = []
        for slot, token_id in tokens:
            if lane.is_closed:
                return
            if slot.is_slow and lane is self._quick:
                self._slow.put([(slot, token_id)])
                continue
            try:
                self._take_one(slot, token_id, news)
            except BaseException as exc:  # whatever it is, even a panic, the others go on
                slot.is_over = True
                news.append(News(slot, failure=str(exc) or type(exc).__name__))
        if news:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._on_news, news)

    def _take_one(self, slot: Slot, token_id: int, news: list[News]) -> None:
        if token_id == _GIVE_BACK:
            self._remove(slot)
        elif token_id == _END:
            slot.is_over = True
            self._board.publish(slot.number, slot.published + 1)
        elif not slot.is_over:
            self._advance(slot, token_id, news)

    def _advance(self, slot: Slot, token_id: int, news: list[News]) -> None:
        began_s = time.thread_time()
        slot.matcher.consume(token_id)
        took_s = time.thread_time() - began_s
        slot.is_slow = slot.is_slow or took_s > SLOW_S
        slot.cpu_s += took_s
        slot.num_tokens += 1
        if slot.cpu_s > ALLOWED_S + ALLOWED_TOKEN_S * slot.num_tokens:
            raise TimeoutError(f"it takes {slot.cpu_s / slot.num_tokens:.2f} s a token")
        position = slot.published + 1
        if slot.matcher.has_ended:
            news.append(News(slot, position, has_ended=True))
            return
        slot.published = position
        self._publish(slot)
        forced = slot.take_forced()
        if forced or slot.is_gated:
            news.append(News(slot, position, forced))

    def _remove(self, slot: Slot) -> None:
        with self._lock:
            self._slots.remove(slot)
        self._board.remove(slot.number)

    def _publish(self, slot: Slot) -> None:
        matcher, words = slot.matcher, slot.words
        if matcher.forced:
            _write_one(words, matcher.forced[0])
        else:
            words[:] = memoryview(matcher.mask).cast("i")[: len(words)]
        self._board.publish(slot.number, slot.published)


class _Lane:
    """A thread, once it is needed, and what it has to do."""

    def __init__(self, matchers: Matchers, name: str) -> None:
        self._matchers = matchers
        self._loop = matchers._loop
        self._name = name
        self._queue: queue.SimpleQueue[Sequence[tuple[Slot, int]] | None] = queue.SimpleQueue()
        self._thread: threads.EngineThread | None = None
        self.is_closed = False

    def put(self, tokens: Sequence[tuple[Slot, int]]) -> None:
        if self.is_closed:
            return
        self._queue.put(tokens)
        if self._thread is None:
            self._thread = threads.EngineThread(target=self._serve, name=self._name)
            self._thread.start()

    def stop(self) -> None:
        self.is_closed = True
        self._queue.put(None)

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while not self.is_closed:
            try:
                tokens = self._queue.get(timeout=threads.EXIT_CHECK_S)
            except queue.Empty:
                if threads.is_abandoned(self._loop):
                    return
                continue
            if tokens is not None:
                self._matchers._take(self, tokens)


def _write_one(words: memoryview, token_id: int) -> None:
    """The mask of one token."""
    words[:] = memoryview(bytes(words.nbytes)).cast("i")
    bit = token_id % 32
    words[token_id // 32] = 1 << bit if bit < 31 else -1 << 31
