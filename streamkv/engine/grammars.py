"""Grammars of an engine's requests: compiled in threads of their own, a few at a time.

Owns those threads, the compiler, and how many requests may wait for it. It must not know how a
grammar is followed. Invariant: a request that is not admitted in the end, for whatever reason, has
no slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from ..errors import EngineDeadError, GenerationError, OverloadedError, StreamkvError
from ..protocol import SamplingParams
from ..text.tokenizer import Tokenizer
from .matchers import Matchers, Slot
from .threads import EngineThread

if TYPE_CHECKING:
    from ..text.grammar import Grammar, GrammarCompiler

logger = logging.getLogger(__name__)

NUM_AT_ONCE = 2
MAX_WAITING = 64  # requests; each that is hard to compile takes seconds
MAX_BYTES = 1 << 30  # of the matchers of all requests that have not ended

T = TypeVar("T")


class Grammars:
    """Of one engine that is ready. Methods are the event loop's, but for `close`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, matchers: Matchers) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._matchers = matchers
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()  # of the compiler's making
        self._places = asyncio.Semaphore(NUM_AT_ONCE)
        self.is_used = False
        self._num_waiting = 0
        self._threads: set[EngineThread] = set()
        self._closed = False

    def warm_up(self) -> None:
        """Make the compiler, which takes tenths of a second with the interpreter held."""
        if self._compiler is None and not self._closed:
            self._start(self._the_compiler)

    async def check(self, sampling: SamplingParams) -> None:
        """InvalidRequestError with the reason, unless its grammar can be followed."""
        await self._run(lambda: self._compile(sampling), lambda grammar: None)

    async def open(self, sampling: SamplingParams, num_prompt_tokens: int) -> tuple[Slot, ...]:
        """A slot for each of its sequences. Errors are those of `check`, and OverloadedError."""
        return await self._run(
            lambda: self._open(sampling, num_prompt_tokens), self._matchers.give_back
        )

    def close(self) -> None:
        """End what is being compiled, and join the threads. Any thread may do this. Idempotent."""
        self._closed = True
        with self._lock:  # from now on none is made
            compiler = self._compiler
        if compiler is not None:
            compiler.close()
        for thread in list(self._threads):
            thread.join()

    async def _run(self, work: Callable[[], T], undo: Callable[[T], None]) -> T:
        """Do it in a thread. If nobody waits for the result any more, it is undone."""
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{self._num_waiting} requests wait for their grammars to be compiled, at most "
                f"{MAX_WAITING} may; try again",
                retry_after_s=5,
            )
        self._num_waiting += 1
        try:
            async with self._places:
                future = self._start(work)
                try:
                    return await asyncio.wrap_future(future)
                except asyncio.CancelledError:
                    future.add_done_callback(lambda done: _undo(done, undo))
                    raise
        finally:
            self._num_waiting -= 1

    def _start(self, work: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise EngineDeadError("the engine is closed: start a new one")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who waits may go, the work is done to its end

        def do() -> None:
            try:
                future.set_result(work())
            except StreamkvError as exc:
                future.set_exception(exc)
            except BaseException as exc:  # whatever it is: somebody waits
                logger.exception("compiling a grammar failed")
                future.set_exception(GenerationError(f"compiling the grammar failed: {exc}"))
            finally:
                self._threads.discard(thread)

        thread = EngineThread(target=do, name="streamkv-grammar")
        self.is_used = True
        self._threads.add(thread)
        thread.start()
        return future

    # --- on the threads ----------------------------------------------------------------------

    def _compile(self, sampling: SamplingParams) -> Grammar:
        assert sampling.structured_outputs is not None
        return self._the_compiler().compile(sampling.structured_outputs)

    def _the_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine is closed: start a new one")
            if self._compiler is None:
                from ..text.grammar import GrammarCompiler

                self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size)
        return self._compiler

    def _open(self, sampling: SamplingParams, num_prompt_tokens: int) -> tuple[Slot, ...]:
        grammar = self._compile(sampling)
        num = sampling.num_sequences
        if (num_bytes := self._matchers.num_bytes + num * grammar.num_bytes) > MAX_BYTES:
            raise OverloadedError(
                f"the grammars of all requests would take {num_bytes >> 20} MB, at most "
                f"{MAX_BYTES >> 20} may be taken; try again",
                retry_after_s=5,
            )
        matchers = [grammar.matcher(ignore_end=sampling.ignore_eos) for _ in range(num)]
        can_skip = sampling.logprobs is None and sampling.n == num  # these come of sampling only
        return self._matchers.add(
            matchers, num_prompt_tokens, can_skip=can_skip, num_bytes=grammar.num_bytes
        )


def _undo(done: Future[T], undo: Callable[[T], None]) -> None:
    with contextlib.suppress(BaseException):
        undo(done.result())
