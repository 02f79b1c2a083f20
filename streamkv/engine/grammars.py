"""Grammars of an engine's requests: compiled in threads of their own, opened for each answer.

Owns the compiler, what is being compiled, for whom, and how much memory grammars may take. It must
not know how a grammar is followed. Invariants: a request that is not admitted in the end, for
whatever reason, has no slots. Who wants a grammar that is kept waits for none that isn't; equal
ones are compiled once, whoever asked first. What is being compiled counts until that has ended,
also if nobody waits for it any more; what nobody waits for when its turn comes isn't begun. Who
waits for room gets it in order, and what it waits for is not for those who come later; there is one
line for each kind of room. Once the engine has ended nobody waits.

Most grammars are compiled in hundredths of a second, some in seconds: those that were found to be
go on in a second thread, and keep only their like waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from ..errors import (
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
    OverloadedError,
    StreamkvError,
)
from ..protocol import SamplingParams
from ..structured import StructuredOutputs
from ..text.tokenizer import Tokenizer
from .crew import Crew
from .matcher_slot import Slot
from .matchers import Matchers

if TYPE_CHECKING:
    from ..text.grammar import Grammar, GrammarCompiler

logger = logging.getLogger(__name__)

MAX_COMPILING = 64  # grammars; each that is hard to compile takes seconds
MAX_BYTES = 1 << 30  # of the grammars and matchers of all requests that have not ended
MAX_REQUEST_BYTES = MAX_BYTES // 2  # of one's matchers: so that there will be room for it
RETRY_AFTER_S = 5
ROOM_CHECK_S = 1.0  # by who waits for room: that Python drops a grammar is told by nobody
IDLE_S = 60.0  # without anything to compile: then the processes end

T = TypeVar("T")


class GrammarCompilations:
    """Of one engine that is ready. Methods are the event loop's, but for `close`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        matchers: Matchers,
        check_ready: Callable[[], None],
    ) -> None:
        """`check_ready` raises once the engine has ended."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._matchers = matchers
        self._check_ready = check_ready
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()  # of the compiler's making
        self._closed = False
        self._compiling: dict[StructuredOutputs, _Compilation] = {}
        self._places = asyncio.Semaphore(MAX_COMPILING)
        self._num_opening_bytes = 0
        self._num_awaited_bytes = 0
        self._line = asyncio.Lock()  # who waits for memory does so one by one
        self._room = asyncio.Event()  # there may be more of it
        self._rest_timer: asyncio.TimerHandle | None = None
        self._quick = Crew("streamkv-grammar")
        self._thorough = Crew("streamkv-grammar-slow")
        self._openers = Crew("streamkv-grammar-open")
        self.has_begun = False  # something: there may be threads and processes to end

    def warm_up(self) -> None:
        """Make the compiler, which takes tenths of a second with the interpreter held."""
        if self._compiler is None and not self._closed:
            self.has_begun = True
            self._quick.put(lambda: _told(self._the_compiler))

    async def check(self, sampling: SamplingParams) -> None:
        """InvalidRequestError with the reason, unless its grammar can be followed."""
        _num_bytes(sampling, await self._grammar(sampling, waits=True))

    async def open(
        self, sampling: SamplingParams, num_prompt_tokens: int, *, waits: bool = False
    ) -> tuple[Slot, ...]:
        """A slot for each of its sequences. Errors are those of `check`, and OverloadedError where
        there is no room, unless it `waits` for it."""
        grammar = await self._grammar(sampling, waits=waits)
        num_bytes = _num_bytes(sampling, grammar)
        if (too_many := self._too_many_bytes(num_bytes + self._num_awaited_bytes)) is None:
            self._num_opening_bytes += num_bytes
        elif waits:
            del grammar  # it takes room itself
            grammar = await self._grammar_with_room(sampling, num_bytes)
        else:
            raise OverloadedError(f"{too_many}; try again", retry_after_s=RETRY_AFTER_S)
        try:
            return await self._opened(
                lambda: _told(lambda: self._add(grammar, sampling, num_prompt_tokens))
            )
        finally:
            self._num_opening_bytes -= num_bytes
            self._room.set()

    def stop(self) -> None:
        """Nothing is begun any more, and whoever waits is told. Event-loop thread only.
        Idempotent."""
        self._closed = True
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        for compilation in self._compiling.values():
            compilation.end(None)
        self._room.set()

    def close(self) -> None:
        """End what is being compiled, and join the threads. Any thread may do this. Idempotent."""
        self._closed = True
        with self._lock:  # from now on none is made
            compiler = self._compiler
        if compiler is not None:
            compiler.close()
        for crew in (self._quick, self._thorough, self._openers):
            crew.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine is closed: start a new one")

    # --- room --------------------------------------------------------------------------------

    def _too_many_bytes(self, num_bytes: int) -> str | None:
        """Why there is no memory for so much more now."""
        assert self._compiler is not None, "it has made a grammar"
        num_bytes += self._compiler.num_bytes + self._matchers.num_bytes + self._num_opening_bytes
        if num_bytes <= MAX_BYTES:
            return None
        return (
            f"the grammars of all requests would take {num_bytes >> 20} MB, at most "
            f"{MAX_BYTES >> 20} may be taken"
        )

    async def _grammar_with_room(self, sampling: SamplingParams, num_bytes: int) -> Grammar:
        """Once there is memory for so much, which is then taken. Those who wait keep no grammar but
        the first one's: otherwise these might take all there is."""
        self._num_awaited_bytes += num_bytes
        try:
            async with self._line:
                grammar = await self._grammar(sampling, waits=True)
                while True:
                    self._room.clear()
                    self._matchers.call_once_there_is_room(self._room.set)
                    if self._too_many_bytes(num_bytes) is None:
                        self._num_opening_bytes += num_bytes
                        return grammar
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ROOM_CHECK_S):
                            await self._room.wait()
                    self._check_ready()
        finally:
            self._num_awaited_bytes -= num_bytes

    async def _opened(self, add: Callable[[], tuple[Slot, ...]]) -> tuple[Slot, ...]:
        """If nobody waits for the slots any more, they are given back."""
        future = self._openers.put(add)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: _undo(done, self._matchers.give_back))
            raise

    # --- compiling ---------------------------------------------------------------------------

    async def _grammar(self, sampling: SamplingParams, *, waits: bool) -> Grammar:
        structured = sampling.structured_outputs
        assert structured is not None
        while True:
            self._check_ready()
            if self._compiler is not None and (grammar := self._compiler.find(structured)):
                return grammar
            compilation = self._compiling.get(structured)
            if compilation is None:
                num = len(self._compiling)
                if num >= MAX_COMPILING and not waits:
                    raise OverloadedError(
                        f"{num} grammars are being compiled, at most {MAX_COMPILING} may be; "
                        "try again",
                        retry_after_s=RETRY_AFTER_S,
                    )
                compilation = self._begin(structured)
            result = await compilation.result()
            if isinstance(result, StreamkvError):
                raise _own(result)
            if result is not None:
                return result

    def _begin(self, structured: StructuredOutputs) -> _Compilation:
        self.has_begun = True
        compilation = self._compiling[structured] = _Compilation(structured)
        compilation.task = asyncio.create_task(self._compile(compilation))
        return compilation

    async def _compile(self, compilation: _Compilation) -> None:
        result: Grammar | StreamkvError | None = None
        try:
            async with self._places:
                result = await self._compiled(compilation)
        except StreamkvError as error:
            result = error
        finally:
            del self._compiling[compilation.structured]
            compilation.end(result)
            self._room.set()
            self._rest_later()

    async def _compiled(self, compilation: _Compilation) -> Grammar | None:
        """None if nobody waited any more when its turn came."""
        quick = self._quick.put(lambda: _told(lambda: self._compile_quickly(compilation)))
        grammar = await asyncio.wrap_future(quick)
        if grammar is not None or not compilation.is_wanted:
            return grammar
        thorough = self._thorough.put(lambda: _told(lambda: self._compile_slowly(compilation)))
        return await asyncio.wrap_future(thorough)

    def _rest_later(self) -> None:
        """Unless something is compiled before."""
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        if not self._closed:
            self._rest_timer = asyncio.get_running_loop().call_later(IDLE_S, self._rest)

    def _rest(self) -> None:
        if self._compiler is not None and not self._compiling:
            with contextlib.suppress(OverloadedError):  # no thread is to be had
                self._thorough.put(self._compiler.rest)

    # --- on the threads ----------------------------------------------------------------------

    def _compile_quickly(self, compilation: _Compilation) -> Grammar | None:
        if not compilation.is_wanted:
            return None
        return self._the_compiler().compile_if_easy(compilation.structured)

    def _compile_slowly(self, compilation: _Compilation) -> Grammar | None:
        if not compilation.is_wanted:
            return None
        return self._the_compiler().compile(compilation.structured)

    def _the_compiler(self) -> GrammarCompiler:
        with self._lock:
            self._check_open()
            if self._compiler is None:
                from ..text.grammar import GrammarCompiler

                self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size)
        return self._compiler

    def _add(
        self, grammar: Grammar, sampling: SamplingParams, num_prompt_tokens: int
    ) -> tuple[Slot, ...]:
        num = sampling.num_sequences
        matchers = [grammar.matcher(ignore_end=sampling.ignore_eos) for _ in range(num)]
        can_skip = sampling.logprobs is None and sampling.n == num  # these come of sampling only
        return self._matchers.add(
            matchers, num_prompt_tokens, can_skip=can_skip, num_bytes=grammar.matcher_bytes
        )


class _Compilation:
    """Of one grammar, for all who want it."""

    __slots__ = ("_num_waiting", "_result", "structured", "task")

    def __init__(self, structured: StructuredOutputs) -> None:
        self.structured = structured
        self.task: asyncio.Task[None]  # not ended by who leaves
        self._result: asyncio.Future[Grammar | StreamkvError | None] = asyncio.Future()
        self._num_waiting = 0

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it. Any thread may ask."""
        return self._num_waiting > 0

    async def result(self) -> Grammar | StreamkvError | None:
        """None if there is none, and it is to be asked for again."""
        self._num_waiting += 1
        try:
            return await asyncio.shield(self._result)
        finally:
            self._num_waiting -= 1

    def end(self, result: Grammar | StreamkvError | None) -> None:
        """Idempotent."""
        if not self._result.done():
            self._result.set_result(result)


def _num_bytes(sampling: SamplingParams, grammar: Grammar) -> int:
    """That the matchers of all its sequences take. InvalidRequestError if that's too many."""
    num_bytes = sampling.num_sequences * grammar.matcher_bytes
    if num_bytes > MAX_REQUEST_BYTES:
        raise InvalidRequestError(
            f"structured_outputs: expected at most {MAX_REQUEST_BYTES >> 20} MB for its "
            f"{sampling.num_sequences} choices, got {num_bytes >> 20} MB; ask for fewer at a time",
            param="structured_outputs",
        )
    return num_bytes


def _told(work: Callable[[], T]) -> T:
    """What comes of it. Whatever goes wrong, a panic too, is an error of ours."""
    try:
        return work()
    except StreamkvError:
        raise
    except BaseException as exc:
        logger.exception("compiling a grammar failed")
        raise GenerationError(f"compiling the grammar failed: {exc}") from exc


def _own(error: StreamkvError) -> StreamkvError:
    """The same error for one of those who wait: each may write in it, and is shown its own way."""
    own = type(error).__new__(type(error), *error.args)
    own.__dict__.update(error.__dict__)
    return own


def _undo(done: Future[T], undo: Callable[[T], None]) -> None:
    with contextlib.suppress(BaseException):
        undo(done.result())
