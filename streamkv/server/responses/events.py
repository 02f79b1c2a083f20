"""The events of one response: their names, fields and bytes.

Owns the event Structs, and the numbers of one response's events; knows no order, no socket and no
HTTP. Names and fields are those of the official `openai` package
(`openai/types/responses/response_stream_event.py` and `responses_server_event.py`), and each event
validates with its models. The lane of a WebSocket, `stream_id`, is put in where it is sent.

Invariant: a response's events carry the sequence numbers 0, 1, 2 ... without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Raw, Struct

from ..answer import Event
from ..logprobs import ContentLogprob
from ..wire import encode
from .object import OutputItem, OutputText, ReasoningText, Response


class Numbered(Struct, frozen=True, tag_field="type"):
    sequence_number: int


class ResponseEvent(Numbered, frozen=True, kw_only=True):
    response: Response


class ResponseCreated(ResponseEvent, frozen=True, tag="response.created"): ...


class ResponseQueued(ResponseEvent, frozen=True, tag="response.queued"): ...


class ResponseInProgress(ResponseEvent, frozen=True, tag="response.in_progress"): ...


class ResponseCompleted(ResponseEvent, frozen=True, tag="response.completed"): ...


class ResponseIncomplete(ResponseEvent, frozen=True, tag="response.incomplete"): ...


class ResponseFailed(ResponseEvent, frozen=True, tag="response.failed"): ...


class OutputItemEvent(Numbered, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(OutputItemEvent, frozen=True, tag="response.output_item.added"): ...


class OutputItemDone(OutputItemEvent, frozen=True, tag="response.output_item.done"): ...


class OfItem(Numbered, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class OfPart(OfItem, frozen=True, kw_only=True):
    content_index: int = 0


class ContentPartAdded(OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDone(OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: Raw  # ContentLogprob's


class ReasoningTextDone(OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDone(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class Numbers:
    """Gives a response's events their numbers."""

    def __init__(self) -> None:
        self.next = 0

    def event(self, kind: type[Numbered], **fields: Any) -> Event:
        """The next event."""
        event = kind(self.next, **fields)
        self.next += 1
        return Event(str(kind.__struct_config__.tag), encode(event))


class DeltaEvents:
    """One item's delta events, of which there is one a token: only what changes is encoded."""

    def __init__(self, numbers: Numbers, name: str, place: Struct, tail: bytes = b"") -> None:
        """`place`: the fields that say where, which all of them have; `tail`: what comes last."""
        self.texts: list[str] = []  # of the deltas so far
        self._numbers = numbers
        self._name = name
        self._head = b'{"type":"%b","sequence_number":' % name.encode()
        self._middle = b"," + encode(place)[1:-1] + b',"delta":'
        self._tail = tail + b"}"

    def event(self, text: str) -> Event:
        self.texts.append(text)
        numbers = self._numbers
        number = numbers.next
        numbers.next = number + 1
        return Event(
            self._name,
            b"".join((self._head, b"%d" % number, self._middle, encode(text), self._tail)),
        )

    def with_logprobs(self, text: str, logprobs: Sequence[ContentLogprob]) -> Event:
        """One whose tail says the tokens' log-probabilities."""
        tail, self._tail = self._tail, b',"logprobs":%b}' % encode(logprobs)
        try:
            return self.event(text)
        finally:
            self._tail = tail
