"""The events of one response: what both faces of the Responses API stream.

Owns the event Structs and their order; knows no socket and no HTTP. Names and fields are those
of the official `openai` package (`openai/types/responses/response_stream_event.py` and
`responses_server_event.py`), and each event validates with its models.

Invariant: a response's events carry the sequence numbers 0, 1, 2 ... without a gap, and exactly
one of them, the last, is terminal:

    created, in_progress, output_item.added, content_part.added, output_text.delta*,
    output_text.done, content_part.done, output_item.done, completed | incomplete | failed

A cancelled response ends with `response.incomplete`, and its `status` is `cancelled`: the
official events have none of that name, the official status has. A response that failed or was
cancelled before its first token has no item.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from msgspec import UNSET, Raw, Struct, UnsetType, structs

from ..engine.outputs import TokenDelta, Usage
from ..engine.stream import TokenStream
from ..errors import StreamkvError
from ..protocol import FinishReason
from .json_list import JsonList
from .response_object import (
    IncompleteDetails,
    ItemStatus,
    LogprobBody,
    OutputMessage,
    OutputText,
    Response,
    ResponseError,
    ResponseUsage,
    new_id,
)


class Event(Struct, frozen=True, tag_field="type"):
    """`stream_id` is written only where the request named a lane of a WebSocket."""

    sequence_number: int
    stream_id: str | UnsetType = UNSET

    @property
    def event_type(self) -> str:
        """`response.created` and so on; on the wire it is the field `type`."""
        return str(self.__struct_config__.tag)


class ResponseEvent(Event, frozen=True, kw_only=True):
    response: Response


class ResponseCreated(ResponseEvent, frozen=True, tag="response.created"): ...


class ResponseInProgress(ResponseEvent, frozen=True, tag="response.in_progress"): ...


class ResponseCompleted(ResponseEvent, frozen=True, tag="response.completed"): ...


class ResponseIncomplete(ResponseEvent, frozen=True, tag="response.incomplete"): ...


class ResponseFailed(ResponseEvent, frozen=True, tag="response.failed"): ...


class OutputItemEvent(Event, frozen=True, kw_only=True):
    output_index: int = 0
    item: OutputMessage


class OutputItemAdded(OutputItemEvent, frozen=True, tag="response.output_item.added"): ...


class OutputItemDone(OutputItemEvent, frozen=True, tag="response.output_item.done"): ...


class PartEvent(Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int = 0
    content_index: int = 0


class ContentPartAdded(PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText


class ContentPartDone(PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText


class OutputTextDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: Sequence[LogprobBody] = ()


class OutputTextDone(PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: Raw = Raw(b"[]")  # LogprobBody's


class ResponseBuilder:
    """Turns the deltas of one request into the events of one response.

    Owner: the task that streams the response. `response` is the state after the events made so
    far, and the whole result once `response.status` is no longer `in_progress`.
    """

    def __init__(self, response: Response, *, stream_id: str | None = None) -> None:
        self.response = response
        self._stream_id: str | UnsetType = UNSET if stream_id is None else stream_id
        self._num_events = 0
        self._item: OutputMessage | None = None
        self._texts: list[str] = []
        self._logprobs = JsonList()

    def begin(self) -> list[Event]:
        """The events that come before the first token."""
        return [self._response_event(ResponseCreated), self._response_event(ResponseInProgress)]

    def push(self, delta: TokenDelta, usage: Usage) -> list[Event]:
        """The events of one delta; where it carries a finish reason, the closing ones too."""
        reason = delta.finish_reason
        events: list[Event] = []
        has_content = bool(delta.text or delta.logprobs)
        if self._item is None and (has_content or reason is not FinishReason.ABORT):
            events += self._open_item()
        if self._item is not None and has_content:
            events.append(self._text_delta(self._item, delta))
        if reason is not None:
            events += self._finish(reason, usage)
        return events

    def fail(self, error: StreamkvError, usage: Usage) -> list[Event]:
        """The closing events of a response whose generation broke."""
        events = self._close_item("incomplete")
        self.response = structs.replace(
            self.response,
            status="failed",
            error=ResponseError(message=error.message),
            usage=ResponseUsage.build(usage),
        )
        return [*events, self._response_event(ResponseFailed)]

    def _finish(self, reason: FinishReason, usage: Usage) -> list[Event]:
        events = self._close_item("completed" if reason is FinishReason.STOP else "incomplete")
        response = structs.replace(self.response, usage=ResponseUsage.build(usage))
        last: type[ResponseEvent] = ResponseIncomplete
        match reason:
            case FinishReason.STOP:
                last = ResponseCompleted
                now_s = int(time.time())
                response = structs.replace(response, status="completed", completed_at=now_s)
            case FinishReason.LENGTH:
                details = IncompleteDetails("max_output_tokens")
                response = structs.replace(
                    response, status="incomplete", incomplete_details=details
                )
            case _:  # ABORT: what breaks is raised, and goes to `fail`
                response = structs.replace(response, status="cancelled")
        self.response = response
        return [*events, self._response_event(last)]

    def _open_item(self) -> list[Event]:
        self._item = item = OutputMessage(id=new_id("msg"))
        added = OutputItemAdded(*self._stamp(), item=item)
        return [added, ContentPartAdded(*self._stamp(), item_id=item.id, part=OutputText())]

    def _text_delta(self, item: OutputMessage, delta: TokenDelta) -> Event:
        logprobs = [LogprobBody.build(logprob) for logprob in delta.logprobs]
        self._texts.append(delta.text)
        self._logprobs.extend(logprobs)
        return OutputTextDelta(*self._stamp(), item_id=item.id, delta=delta.text, logprobs=logprobs)

    def _close_item(self, status: ItemStatus) -> list[Event]:
        if self._item is None:
            return []
        item_id = self._item.id
        part = OutputText(text="".join(self._texts), logprobs=self._logprobs.raw())
        item = structs.replace(self._item, status=status, content=(part,))
        self.response = structs.replace(self.response, output=(item,))
        return [
            OutputTextDone(*self._stamp(), item_id=item_id, text=part.text, logprobs=part.logprobs),
            ContentPartDone(*self._stamp(), item_id=item_id, part=part),
            OutputItemDone(*self._stamp(), item=item),
        ]

    def _response_event(self, event_type: type[ResponseEvent]) -> ResponseEvent:
        return event_type(*self._stamp(), response=self.response)

    def _stamp(self) -> tuple[int, str | UnsetType]:
        """The fields that open every event: its sequence number and its lane."""
        number = self._num_events
        self._num_events += 1
        return number, self._stream_id


async def response_events(
    stream: TokenStream, builder: ResponseBuilder
) -> AsyncIterator[list[Event]]:
    """The events of an admitted request, first to last, in the groups in which they arise.

    What breaks while tokens are generated becomes `response.failed`. The caller owns the
    stream's context; nothing needs cleaning up here.
    """
    yield builder.begin()
    try:
        async for delta in stream:
            if events := builder.push(delta, stream.usage):
                yield events
    except StreamkvError as error:
        yield builder.fail(error, stream.usage)
