"""One response on a WebSocket: its answer, and the one that succeeds it.

Owns what a connection must know of a response to go on from it when it was steered, and how its
successor is made. Knows no lane. Invariant: the successor's prompt begins with the very tokens of
its predecessor's prompt and output, so that their KV is found in the cache; where there is no
output, or the chat template doesn't show where it ends, the conversation is written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from msgspec import structs
from starlette.websockets import WebSocket

from ..answer import Answer, Event, Policy
from ..answers import answers_of
from ..wire import encode
from ..ws_outlet import SocketWriter
from .events import Numbers
from .items import InputItem
from .object import FunctionCall, ReasoningItem
from .opening import Asked, OpenedResponse, ask, open_response
from .prompt import continue_prompt
from .request import ResponseRequest
from .steering import Steer
from .store import ResponseStore, Shelves

_TOKEN_BYTES = 36  # of an int in a list

_body_decoder = msgspec.json.Decoder(ResponseRequest)


def lane_tail(stream_id: str | None) -> bytes:
    """What stands in the place of an event's last brace in a lane; nothing in the unnamed one."""
    return b"" if stream_id is None else b',"stream_id":%b}' % encode(stream_id)


class SocketAnswer(Answer):
    """The answer of a `response.create`."""

    def __init__(self, websocket: WebSocket, opened: OpenedResponse, policy: Policy) -> None:
        super().__init__(
            opened.record.id,
            opened.writer,
            answers_of(websocket).budget,
            policy=policy,
            owner=opened.record.owner,
        )
        body = opened.asked.body
        self.record = opened.record
        has_many = body.use_beam_search or (body.best_of or 1) > 1
        self.can_be_steered = body.generates and not has_many  # it can end at any time, as it is
        self.ends_with_connection = body.on_disconnect is None  # where that is closed on purpose
        self.is_to_be_stored = body.store
        self._opened: OpenedResponse | None = opened  # until it has ended
        self._numbers = opened.writer.numbers
        self.stream_id: str | None = None  # of the lane that it is read in
        self.steers: list[Steer] = []  # for its successor
        self.is_claimed = False  # somebody makes a response of them
        # For its successor, once it has ended:
        self.token_ids: list[int] = []  # of prompt and output
        self._body = b""  # what it was asked, without the input; JSON is as large as it looks
        self.on_ended(self._keep)

    @property
    def accepts_steers(self) -> bool:
        """Until it has ended, or else until it has a successor."""
        return bool(self.steers) or not (
            self.is_cancelled or self.is_ended or self.record.has_ended
        )

    @property
    def required_calls(self) -> Sequence[FunctionCall]:
        """The calls that the client is to answer before it goes on."""
        calls = self.record.response.calls
        return [call for call in calls if call.status == "completed"]

    @property
    def steering_items(self) -> list[InputItem]:
        """What its successor is asked besides, in the order in which it came."""
        return [item for steer in self.steers for item in steer.items]

    @property
    def num_steer_bytes(self) -> int:
        return sum(len(steer.input) for steer in self.steers)

    def steer(self, steer: Steer) -> None:
        """Take this input. The response ends, unless it calls functions: what that asks for comes
        first."""
        self.steers.append(steer)
        opened = self._opened
        if opened is not None and not opened.writer.has_calls:
            opened.writer.is_steered = True
            self.cancel()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Meanwhile nobody else makes a response of its steering."""
        self.is_claimed = True
        try:
            yield
        finally:
            self.is_claimed = False

    @property
    def body(self) -> ResponseRequest:
        """What it was asked, without the input: for its successor."""
        return _body_decoder.decode(self._body)

    def _keep(self) -> None:
        """It has ended: keep what its successor needs, where it will have one, and nothing else."""
        opened, self._opened = self._opened, None
        if opened is not None and self.steers and self.streams:
            self._body = encode(structs.replace(opened.asked.body, input=None))
            (stream,) = self.streams
            (so_far,) = stream.so_far()
            if so_far.token_ids:
                self.token_ids = [*stream.prompt_token_ids, *so_far.token_ids]
        num_tokens_bytes = _TOKEN_BYTES * len(self.token_ids)
        num_bytes = len(self._body) + self.num_steer_bytes + num_tokens_bytes
        self.num_held_bytes = self.record.final_bytes + num_bytes

    def tell(self, make: Callable[[Numbers], Event], writer: SocketWriter) -> None:
        """Send an event of steering, numbered as the others of its response and kept with them."""
        if self._opened is not None:
            self._opened.writer.insert(make)
            return
        event, is_read = make(self._numbers), self.has_reader
        self.add(event)
        if not is_read:
            data, tail = event.data, lane_tail(self.stream_id)
            writer.write(data[:-1] + tail if tail else data)


async def open_successor(
    websocket: WebSocket, shelves: Shelves, store: ResponseStore, answer: SocketAnswer
) -> OpenedResponse:
    """The response that goes on from one that has ended, with what it was steered by. Raises what
    `ask` and `open_response` do."""
    body = structs.replace(answer.body, previous_response_id=answer.answer_id, request_id=None)
    items, turn = answer.steering_items, answer.record.turn
    asked = await ask(websocket, body, shelves, previous=turn, before=items)
    prompt = await _continued(answer, asked, num_new=len(items))
    return await open_response(websocket, asked, shelves, store, prompt=prompt)


async def _continued(answer: SocketAnswer, asked: Asked, *, num_new: int) -> list[int] | None:
    """The tokens to go on from; None to make them of the conversation."""
    if not answer.token_ids:
        return None
    messages = [*asked.instructions, *await asked.messages()]
    place = len(messages) - num_new
    if place and messages[place - 1]["role"] == "assistant":
        place -= 1
    else:  # nothing of its output was shown
        messages.insert(place, {})
    output = answer.record.response.output
    reasoning = asked.plan.reasoning
    is_open = reasoning is not None and bool(output) and isinstance(output[-1], ReasoningItem)
    prompt = await continue_prompt(
        asked.engine,
        answer.token_ids,
        messages,
        asked.template,
        answer=place,
        closing=reasoning.closing if reasoning is not None and is_open else "",
    )
    body, context = asked.body, asked.engine.info.max_model_len
    if prompt is not None and body.truncation == "auto":
        if len(prompt) > context - (body.max_output_tokens or 1):
            return None  # it is cut where a turn begins
    return prompt
