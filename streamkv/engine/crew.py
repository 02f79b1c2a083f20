"""Crews: each is one thread that does what comes, one thing after another.

Owns the thread and the line of what waits for it. It must not know what is done. Invariants: there
is no thread while nothing is to be done; after `close` none is left, and whatever was put has an
end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import EngineDeadError, OverloadedError
from .threads import EngineThread

T = TypeVar("T")


class Crew:
    """Any thread may call its methods, `close` none of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # of what follows
        self._line: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._thread: EngineThread | None = None  # the latest
        self._is_serving = False  # it takes what is in the line
        self._closed = False

    def put(self, work: Callable[[], T]) -> Future[T]:
        """What comes of it. It isn't begun if the future is cancelled before its turn."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise _closed()
            if not self._is_serving:
                self._start()
            self._line.append((future, work))
        return future

    def close(self) -> None:
        """Wait for what is done just now; what waits fails with EngineDeadError. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, thread = list(self._line), self._thread
            self._line.clear()
        for future, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(_closed())
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        thread = EngineThread(target=self._serve, name=self._name)
        try:
            thread.start()  # it waits for the lock
        except RuntimeError as exc:  # the system has no more
            raise OverloadedError(f"{exc}; try again", retry_after_s=5) from None
        self._thread, self._is_serving = thread, True

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._line:
                    self._is_serving = False
                    return
                future, work = self._line.popleft()
            if future.set_running_or_notify_cancel():
                _do(work, future)
            del future, work  # what they hold isn't kept until the next comes


def _do(work: Callable[[], T], future: Future[T]) -> None:
    try:
        result = work()
    except BaseException as exc:  # whatever it is: somebody waits
        future.set_exception(exc)
    else:
        future.set_result(result)


def _closed() -> EngineDeadError:
    return EngineDeadError("the engine is closed: start a new one")
