"""The answers of this server by their ids: those that run, and for a while those that have ended.

Owns who may find which, and how long and how many of them stay. It must not know what an answer
says. Invariants: an id names one answer at a time; of what has ended no more is kept than the
window, the number and the bytes allow, the oldest goes first; an answer is found only by the API
key that asked for it: anybody else is told what one is told of an id that never was.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import OrderedDict
from typing import Literal, NamedTuple

import msgspec
from starlette.requests import HTTPConnection

from ..config import ServerConfig
from ..engine.outputs import SoFar
from ..errors import InvalidRequestError, NotFoundError
from .answer import Answer, AnswerWriter, Policy
from .auth import presented_key
from .event_log import LogBudget, not_kept
from .generation import Generation
from .ids import PREFIXES, name_of

LOGS_IN_MEMORY = 16  # that fill it
MAX_ENDED = 4096
MAX_ENDED_BYTES = 64 << 20  # of results, besides the logs
LOGS_PER_LOOK = 16  # that are found to be read, before who needs room goes on without
_OVERHEAD_BYTES = 1024
_TOKEN_BYTES = 100  # of what the engine remembers of a stream

Status = Literal["running", "paused", "cancelled", "failed", "finished"]


class ChoiceResult(msgspec.Struct, frozen=True):
    """What a choice has so far."""

    index: int
    text: str
    finish_reason: str | None


class UsageResult(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request so far."""

    id: str
    object: str = "request"
    status: Status
    choices: list[ChoiceResult]
    usage: UsageResult


class Key(NamedTuple):
    """Under which an answer is found."""

    owner: bytes  # a digest of the API key; empty where none is asked for
    answer_id: str


class Ended(NamedTuple):
    """What is kept of an answer."""

    result: RequestResult
    answer: Answer | None  # where it is resumable
    num_bytes: int
    expires_s: float


class Answers:
    """The registry of one application. Event-loop thread only."""

    def __init__(self, config: ServerConfig) -> None:
        self.window_s = config.resume_window
        self.budget = LogBudget(
            config.resume_memory_bytes // LOGS_IN_MEMORY, config.resume_memory_bytes, self.make_room
        )
        self._has_owners = bool(config.api_key)
        self._running: dict[Key, Generation] = {}
        self._ended: OrderedDict[Key, Ended] = OrderedDict()
        self._logs: OrderedDict[Key, Answer] = OrderedDict()  # of these
        self.num_resumed = 0  # streams that somebody has gone on reading
        self._num_ended_bytes = 0
        self._timer: asyncio.TimerHandle | None = None  # of the oldest

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_kept(self) -> int:
        """Answers that have ended and can be asked for."""
        return len(self._ended)

    # --- running -----------------------------------------------------------------------------

    def new(
        self, connection: HTTPConnection, answer_id: str, writer: AnswerWriter, policy: Policy
    ) -> Answer:
        """An answer, not yet started, that can be found. InvalidRequestError if its id is taken."""
        owner = self.owner_of(connection)
        answer = Answer(answer_id, writer, self.budget, policy=policy, owner=owner)
        self.add(answer)
        return answer

    def add(self, generation: Generation) -> None:
        """Let it be found until it ends, and what came of it afterwards."""
        key = Key(generation.owner, generation.answer_id)
        if key in self._running:
            raise InvalidRequestError(
                f"request_id: expected one that is not in use, got {name_of(key.answer_id)!r}",
                param="request_id",
            )
        self._drop(key)
        self._running[key] = generation
        generation.on_ended(lambda: self._keep(key, generation))

    def is_free(self, connection: HTTPConnection, answer_id: str) -> bool:
        """Whether no answer that runs has this id."""
        return Key(self.owner_of(connection), answer_id) not in self._running

    def owner_of(self, connection: HTTPConnection) -> bytes:
        """A digest of the key that was shown; nothing where no keys are asked for."""
        key = presented_key(connection.scope) if self._has_owners else None
        return hashlib.sha256(key.encode()).digest() if key else b""

    # --- finding -----------------------------------------------------------------------------

    def find(
        self, connection: HTTPConnection, answer_id: str, *, exact: bool = False
    ) -> Generation | Ended:
        """By the id that clients see, or else, unless it is to be `exact`, the `request_id` they
        sent: what runs, or else what ended last. NotFoundError; InvalidRequestError if several that
        run were sent the same."""
        self._expire()
        owner = self.owner_of(connection)
        found = self._get(Key(owner, answer_id))
        if found is not None:
            return found
        prefixes = () if exact else PREFIXES
        known = [self._get(Key(owner, prefix + answer_id)) for prefix in prefixes]
        running = [one for one in known if isinstance(one, Generation)]
        if len(running) > 1:
            raise InvalidRequestError(
                f"request_id: {answer_id[:100]!r} is that of several requests; ask for one of them "
                f"by its id: {', '.join(one.answer_id for one in running)}",
                param="request_id",
            )
        if running:
            return running[0]
        ended = [one for one in known if isinstance(one, Ended)]
        if ended:
            return max(ended, key=lambda one: one.expires_s)
        raise NotFoundError(
            f"no request {answer_id[:100]!r} here: it never was, or it is gone; an answer is kept "
            f"for {self.window_s:g} s after its end",
            code="request_not_found",
        )

    def _get(self, key: Key) -> Generation | Ended | None:
        running = self._running.get(key)
        if running is None:
            return self._ended.get(key)
        return None if running.is_forgotten else running

    def forget(self, owner: bytes, answer_id: str) -> None:
        """Nobody finds it any more. One that runs goes on until it ends."""
        key = Key(owner, answer_id)
        running = self._running.get(key)
        if running is not None:
            running.forget()
        self._drop(key)

    def find_answer(
        self, connection: HTTPConnection, answer_id: str, *, exact: bool = False
    ) -> Answer:
        """One whose events are to be read on. What an endpoint knows to be its own it asks for by
        the `exact` id: what others call theirs may be the same. Raises what `find` does."""
        found = self.find(connection, answer_id, exact=exact)
        answer = found.answer if isinstance(found, Ended) else found
        if not isinstance(answer, Answer) or answer.log is None:
            raise not_kept(answer_id)
        return answer

    # --- ended -------------------------------------------------------------------------------

    async def close(self) -> None:
        """End what has not ended, and forget all of it. The engine is closed already."""
        running = list(self._running.values())
        for generation in running:
            generation.end()
        await asyncio.gather(*(generation.wait_left() for generation in running))
        while self._ended:
            self._drop(next(iter(self._ended)))

    def make_room(self) -> None:
        """All logs together take too much: of those that have ended the oldest go, but for those
        that somebody reads, who would hold what they take as long as before."""
        num_looks = LOGS_PER_LOOK
        while self._logs and num_looks and self.budget.is_exceeded:
            key, answer = next(iter(self._logs.items()))
            if answer.has_reader:
                self._logs.move_to_end(key)  # the next time the others are looked at first
                num_looks -= 1
            else:
                self._drop(key)

    def _keep(self, key: Key, generation: Generation) -> None:
        """It has just ended."""
        del self._running[key]
        if generation.is_forgotten or not generation.is_admitted or not self.window_s:
            return generation.forget()
        result = result_of(generation)
        num_bytes = _OVERHEAD_BYTES + generation.num_held_bytes
        num_bytes += sum(sys.getsizeof(one.text) for one in result.choices)
        answer = None
        if isinstance(generation, Answer) and generation.policy.resumable:
            answer = self._logs[key] = generation
            num_bytes += _TOKEN_BYTES * result.usage.total_tokens
        expires_s = asyncio.get_running_loop().time() + self.window_s
        self._ended[key] = Ended(result, answer, num_bytes, expires_s)
        self._num_ended_bytes += num_bytes
        self._expire()

    def _expire(self) -> None:
        """Drop what has been kept for long enough, and what is too much."""
        loop = asyncio.get_running_loop()
        while self._ended:
            key, oldest = next(iter(self._ended.items()))
            is_too_much = len(self._ended) > MAX_ENDED or self._num_ended_bytes > MAX_ENDED_BYTES
            if oldest.expires_s > loop.time() and not is_too_much:
                if self._timer is None:
                    self._timer = loop.call_at(oldest.expires_s, self._on_timer)
                return
            self._drop(key)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire()

    def _drop(self, key: Key) -> None:
        ended = self._ended.pop(key, None)
        if ended is None:
            return
        self._num_ended_bytes -= ended.num_bytes
        self._logs.pop(key, None)
        if ended.answer is not None:
            ended.answer.forget()
        if not self._ended and self._timer is not None:
            self._timer.cancel()
            self._timer = None


def result_of(generation: Generation) -> RequestResult:
    """What came of it so far."""
    choices, num_prompt, num_generated = [], 0, 0
    for prompt, stream in enumerate(generation.streams):
        # While it isn't known yet which are the best of many, each has nothing yet.
        for one in stream.so_far() or map(_nothing, range(stream.sampling.n)):
            index = prompt * stream.sampling.n + one.choice
            choices.append(ChoiceResult(index, one.text, one.finish_reason))
        num_prompt += stream.usage.num_prompt_tokens
        num_generated += stream.usage.num_generated_tokens
    return RequestResult(
        id=generation.answer_id,
        status=_status(generation),
        choices=choices,
        usage=UsageResult(num_prompt, num_generated, num_prompt + num_generated),
    )


def _nothing(choice: int) -> SoFar:
    return SoFar(choice, "", (), None, None)


def _status(generation: Generation) -> Status:
    if generation.error is not None:
        return "failed"
    if generation.is_cancelled:
        return "cancelled"
    if generation.is_ended:
        return "finished"
    return "paused" if generation.is_paused else "running"


def answers_of(connection: HTTPConnection) -> Answers:
    answers: Answers = connection.app.state.answers
    return answers
