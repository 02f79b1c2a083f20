"""An AsyncEngine with a thread and an event loop of its own, for programs that have neither.

Owns that thread and loop, and their end: by `close`, or when the interpreter ends. It must not
know prompts or what is done with answers. Its methods may be called in any thread but its own.

Invariant: once `close` has returned, the engine is closed, the loop and the thread are gone, and
nothing that was handed to `call` runs any more. A process that was forked from the one that made
it has no such thread: there `call` is an error, and `close` does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import EngineDeadError, StreamkvError
from .async_engine import AsyncEngine
from .threads import program_has_threads

T = TypeVar("T")


class BackgroundEngine:
    """Loads a model when it is made, and keeps it until it is closed."""

    def __init__(self, build: Callable[[], AsyncEngine]) -> None:
        """Waits until the engine that `build` makes is ready. Raises what kept it from that."""
        self._pid = os.getpid()
        self._loop = new_event_loop()
        self._main: asyncio.Task[Any] | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._ready: Future[AsyncEngine] = Future()
        # A daemon: what keeps the interpreter from ending is the program's own threads.
        self._thread = threading.Thread(
            target=self._run, args=(build,), name="streamkv-llm", daemon=True
        )
        try:
            self._thread.start()
            self.engine = self._ready.result()
        except StreamkvError as error:  # it says all: where the thread was is no matter
            self.close()
            raise error.with_traceback(None) from None
        except BaseException:  # Ctrl-C too
            self.close()
            raise
        _close_before_exit(self)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the engine's loop. EngineDeadError once it is closed, and in a fork."""
        reason = "the LLM was loaded in another process: load it after the fork"
        if not self._is_forked:  # there the lock may be one that nobody opens
            with self._lock:
                if not self._closing:
                    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            reason = "the LLM is closed: make a new one"
        coroutine.close()
        raise EngineDeadError(reason)

    def close(self, timeout_s: float | None = None) -> None:
        """End what runs, free the engine's memory, and wait for that. Idempotent."""
        if self._is_forked:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                with contextlib.suppress(RuntimeError):  # it could not load: the loop is closed
                    self._loop.call_soon_threadsafe(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    # --- on the thread -----------------------------------------------------------------------

    def _run(self, build: Callable[[], AsyncEngine]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(build))
        except BaseException as exc:
            if not self._ready.done():
                self._ready.set_exception(exc)
            elif not isinstance(exc, asyncio.CancelledError):
                raise

    async def _serve(self, build: Callable[[], AsyncEngine]) -> None:
        self._main = asyncio.current_task()
        if self._closing:
            raise asyncio.CancelledError
        async with build() as engine:
            self._ready.set_result(engine)
            await asyncio.Event().wait()  # until it is cancelled

    def _stop(self) -> None:
        if self._main is not None:
            self._main.cancel()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _close_before_exit(background: BackgroundEngine) -> None:
    """Have the interpreter close it before it waits for threads, among them the device's.

    What `atexit` knows runs after that wait. Without this the device thread would see by itself
    that the program has ended, but seconds later.
    """
    register = getattr(threading, "_register_atexit", None)  # as concurrent.futures does
    if register is not None:
        register(functools.partial(_close_if_unused, weakref.ref(background)))


def _close_if_unused(reference: weakref.ref[BackgroundEngine]) -> None:
    background = reference()
    if background is not None and not program_has_threads():
        background.close()
