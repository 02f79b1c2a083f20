"""Lanes: threads in which matchers take their tokens, request by request, the cheapest first.

Owns the order in which requests have turns, how long a turn is, and the thread. It must not know
what is done for a token: it is told how long that took.

Invariants: a request's tokens stay in order. Requests that always have something to do get the same
time each, in turns; one that has been idle goes before those whose turns cost more. (It is fair
queueing: a turn begins where the request's last one ended, on a clock that stands at the latest
turn's begin, and not before that; the turn that would end first, if it takes as long as the last
one did, is the next.) After `close` no thread is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from . import threads
from .matcher_slot import TURN_S, Account, News, Slot, Work

POST_S = 0.001  # of CPU time: news are kept for so long, that there be fewer wake-ups


class Lane:
    """One thread, and the requests that it serves."""

    def __init__(
        self,
        name: str,
        do: Callable[[Slot, int | None, list[News]], float],
        post: Callable[[list[News]], None],
        slower: Lane | None = None,
    ) -> None:
        """`do` what a token means, add the news, and return the CPU time that it took; it doesn't
        raise. `slower`: where requests go on that are slow."""
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._do = do
        self._post = post
        self._slower = slower
        self._inbox: queue.SimpleQueue[Sequence[Work]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the thread's making
        self._thread: threads.EngineThread | None = None
        self._is_closed = False
        # The thread's:
        self._line: list[tuple[float, int, float, Account]] = []  # a heap
        self._numbers = itertools.count()  # who came first goes first
        self._now_s = 0.0  # the begin of the latest turn
        self._news: list[News] = []
        self._news_s = 0.0  # for how long they have waited

    def start(self) -> None:
        """From now on what is put is done. Any thread may do this. Idempotent."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                thread = threads.EngineThread(target=self._serve, name=self._name)
                thread.start()
                self._thread = thread

    def put(self, work: Sequence[Work]) -> None:
        """Any thread may do this."""
        self._inbox.put(work)

    def stop(self) -> None:
        """Ask the thread to end after the token it is at. Nothing is done any more."""
        self._is_closed = True
        self._inbox.put(())

    def close(self) -> None:
        """Stop, and join the thread. Any other may do this. Idempotent."""
        self.stop()
        with self._lock:  # from now on none is started
            thread = self._thread
        if thread is not None:
            thread.join()

    # --- on the thread -----------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_closed:
            if not self._line and not self._wait():
                return
            self._take_in()
            if self._line:
                _, _, begin_s, account = heappop(self._line)
                self._take_turn(account, begin_s)

    def _wait(self) -> bool:
        """Until something comes. False if nothing ever will."""
        try:
            self._line_up(self._inbox.get(timeout=threads.EXIT_CHECK_S))
        except queue.Empty:
            return not threads.is_abandoned(self._loop)
        return True

    def _take_in(self) -> None:
        """What has come meanwhile."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._line_up(self._inbox.get_nowait())

    def _line_up(self, work: Sequence[Work]) -> None:
        passed_on: list[Work] = []
        for one in work:
            account = one[0].account
            if account.is_slow and self._slower is not None:
                passed_on.append(one)
                continue
            if not account.work:
                self._stand_in_line(account)
            account.work.append(one)
        if passed_on and self._slower is not None:
            self._slower.put(passed_on)

    def _stand_in_line(self, account: Account) -> None:
        begin_s = max(self._now_s, account.ended_s)
        end_s = begin_s + account.cost_s
        heappush(self._line, (end_s, next(self._numbers), begin_s, account))

    def _take_turn(self, account: Account, begin_s: float) -> None:
        work, took_s = account.work, 0.0
        while work and took_s <= TURN_S and not self._is_closed:
            slot, token_id = work.popleft()
            took_s += self._do(slot, token_id, self._news)
        self._now_s = max(self._now_s, begin_s)
        account.cost_s, account.ended_s = took_s, begin_s + took_s
        self._news_s = self._news_s + took_s if self._news else 0.0
        if took_s > TURN_S and self._slower is not None:
            account.is_slow, account.work, account.ended_s = True, deque(), 0.0
            self._slower.put(work)  # before whatever comes later
        elif work:
            self._stand_in_line(account)
        if self._news and (not self._line or self._news_s > POST_S):
            self._post(self._news)
            self._news, self._news_s = [], 0.0
