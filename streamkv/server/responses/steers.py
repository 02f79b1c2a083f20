"""What the responses of one connection are steered by, until it is in a successor or goes back.

Owns which response may be steered, and what waits for which. Knows no lane and no engine.
Invariant:
each input that was accepted is in the `steers` of one answer until that has a successor, or until
it is returned; what waits is bounded, in number and in bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...errors import GoneError, InvalidRequestError, NotFoundError
from ..answer import Answer
from ..wire import error_body
from ..ws_outlet import SocketWriter
from .answer import SocketAnswer
from .events import Numbers
from .steering import (
    MAX_PENDING_STEERS,
    SteerCommand,
    SteerError,
    accepted_event,
    failed_event,
    new_steer,
    pending_event,
)
from .store import Shelves

MAX_WAITING = 64  # responses whose steering waits for the outputs of their calls


class Steers:
    """Owner: the connection's lanes."""

    def __init__(
        self,
        writer: SocketWriter,
        shelves: Shelves,
        max_bytes: int,
        find: Callable[[str], Answer],
    ) -> None:
        """`find`: any answer that is kept; NotFoundError, GoneError."""
        self._writer = writer
        self._find = find
        self._shelves = shelves
        self._max_bytes = max_bytes
        self._waiting: dict[str, SocketAnswer] = {}

    # --- what comes in -----------------------------------------------------------------------

    def take(self, command: SteerCommand, running: Sequence[Answer]) -> None:
        """An event answers it in any case. `running`: the answers that the connection reads now."""
        wanted = command.previous_response_id
        answer = next((one for one in running if one.answer_id == wanted), None)
        try:
            target = self._check(answer, wanted)
            self._check_room(target, command, running)
        except SteerError as error:
            self._refuse(answer, command, error)
            return
        steer = new_steer(command)
        target.tell(functools.partial(accepted_event, steer), self._writer)
        target.steer(steer)

    def _check(self, answer: Answer | None, wanted: str) -> SocketAnswer:
        """The response of that id, if it takes input. SteerError."""
        if answer is not None and not (isinstance(answer, SocketAnswer) and answer.can_be_steered):
            raise SteerError(
                "steering_not_supported",
                f"previous_response_id: {wanted!r:.300} can't be steered: it is not made token by "
                "token, or did not begin on a WebSocket",
            )
        if isinstance(answer, SocketAnswer) and answer.accepts_steers:
            return answer
        record = self._shelves.find(wanted)
        if record is None or (answer is None and not record.has_ended):
            raise SteerError(
                "response_not_found",
                f"previous_response_id: no response {wanted!r:.300} runs on this connection",
            )
        if record.has_ended and record.response.status == "completed":
            raise SteerError(
                "response_already_completed",
                f"previous_response_id: {wanted!r:.300} has completed; send response.create",
            )
        raise SteerError(
            "response_not_active",
            f"previous_response_id: {wanted!r:.300} has ended; send response.create",
        )

    def _check_room(
        self, answer: SocketAnswer, command: SteerCommand, running: Sequence[Answer]
    ) -> None:
        holders = [one for one in running if isinstance(one, SocketAnswer)]
        num_bytes = sum(one.num_steer_bytes for one in (*holders, *self._waiting.values()))
        if (
            len(answer.steers) >= MAX_PENDING_STEERS
            or num_bytes + len(command.input) > self._max_bytes
        ):
            raise self._too_many()

    def refuse_one_too_many(self, command: SteerCommand) -> None:
        """Of those that wait for a response to run."""
        self._refuse(None, command, self._too_many())

    def _too_many(self) -> SteerError:
        return SteerError(
            "too_many_pending_steers",
            f"expected at most {MAX_PENDING_STEERS} inputs that wait for a response, and "
            f"{self._max_bytes} bytes of them on a connection; wait for the successor's "
            "response.created",
        )

    def _refuse(self, answer: Answer | None, command: SteerCommand, error: SteerError) -> None:
        """Give an input back that was not accepted, as an event of its response where that is this
        connection's to write: it reads it, or it has ended and nobody does."""
        answer = answer or self._kept(command.previous_response_id)
        if isinstance(answer, SocketAnswer):
            answer.tell(functools.partial(failed_event, command, error), self._writer)
        else:
            self._writer.write(failed_event(command, error, Numbers()).data)

    def _kept(self, response_id: str) -> Answer | None:
        try:
            answer = self._find(response_id)
        except (GoneError, NotFoundError):
            return None
        return answer if answer.is_ended and not answer.has_reader else None

    # --- what comes of it --------------------------------------------------------------------

    def are_due(self, answer: SocketAnswer) -> bool:
        """Whether a response that has ended has a successor now. If not, its inputs wait for what
        it asks for, or go back."""
        response = answer.record.response
        if response.status in ("failed", "cancelled"):
            self.give_up(answer, InvalidRequestError(f"the response was {response.status}"))
            return False
        calls = answer.required_calls
        if calls:
            self._wait(answer)
            for steer in answer.steers:
                if not steer.is_pending:
                    steer.is_pending = True
                    answer.tell(functools.partial(pending_event, steer, calls), self._writer)
        return not calls

    def give_up(self, answer: SocketAnswer, error: BaseException) -> None:
        """There will be no successor: the inputs go back."""
        failure = SteerError("successor_creation_failed", error_body(error).error.message)
        for steer in answer.steers:
            answer.tell(functools.partial(failed_event, steer, failure), self._writer)
        answer.steers.clear()

    def waiting_for(self, response_id: str | None, stream_id: str | None) -> SocketAnswer | None:
        """The response whose inputs wait for a request that goes on from it in its lane."""
        answer = self._waiting.get(response_id or "")
        if answer is None or answer.is_claimed or answer.stream_id != stream_id:
            return None
        return answer

    def settle(self, answer: SocketAnswer, num: int) -> None:
        """The first of its inputs, so many, are in a response that has been created."""
        del answer.steers[:num]
        if not answer.steers:
            self._waiting.pop(answer.answer_id, None)

    def _wait(self, answer: SocketAnswer) -> None:
        self._waiting[answer.answer_id] = answer
        while len(self._waiting) > MAX_WAITING or self._num_waiting_bytes > self._max_bytes:
            oldest = self._waiting.pop(next(iter(self._waiting)))
            limit = f"expected at most {MAX_WAITING} responses whose steering waits for outputs"
            self.give_up(oldest, InvalidRequestError(limit))

    @property
    def _num_waiting_bytes(self) -> int:
        return sum(one.num_held_bytes for one in self._waiting.values())
