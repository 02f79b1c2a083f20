"""Writes one response: the engine's deltas become its events.

Owns the order of the events and the response's state; knows no transport and no store. An
`AnswerWriter` (see `answer`) of one prompt. Invariant: exactly one event, the last, is terminal,
and what it tells is `response`, which `on_end` has been given before.

    created, in_progress (background: queued, in_progress), the output's items one after the
    other (see `output`), completed | incomplete | failed

A cancelled response ends with `response.incomplete`, and its `status` is `cancelled`: the official
events have none of that name, the official status has. One that was steered is incomplete. A
response that failed, was cancelled or was steered before its first token has no item.

The white space between an answer's reasoning, calls and text belongs to none of them: it is left
out unless text follows.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from ...engine.outputs import TokenDelta, TokenLogprob, Usage
from ...engine.stream import TokenStream
from ...errors import GenerationError
from ...protocol import FinishReason
from ...text.answer_parts import ContentPart, Part, ReasoningPart
from ..answer import Event
from ..answer_format import AnswerReader
from ..wire import error_body
from .events import (
    Numbers,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from .object import (
    CALL,
    ENDED,
    MESSAGE,
    REASONING,
    FunctionCall,
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    Response,
    ResponseError,
    ResponseStatus,
    ResponseUsage,
    item_id_of,
)
from .output import CallWriting, ItemWriting, MessageWriting, ReasoningWriting


def _nothing(response: Response) -> None: ...


class ResponseWriter:
    """One response, from its creation to its end. Owner: the answer that it belongs to."""

    def __init__(
        self,
        response: Response,
        *,
        reader: AnswerReader | None = None,
        generates: bool = True,
    ) -> None:
        """`reader`: None where all text is the message's. `generates`: without it what is generated
        is nobody's output: only the prompt was to be computed."""
        self.response = response
        self.numbers = Numbers()
        self.is_steered = False  # why it will end, if it is cancelled
        self._reader = reader
        self._generates = generates
        self.on_end: Callable[[Response], None] = _nothing
        self._stream: TokenStream | None = None
        self._items: list[OutputItem] = []  # those that are closed
        self._item: ItemWriting | None = None  # the one that is open
        self._plain: Callable[[str], Event] | None = None  # its delta, where all text is its own
        self._held = ""  # white space that belongs to no item yet
        self._logprobs: list[TokenLogprob] = []  # of text that the reader holds back
        self._inserted: list[Callable[[Numbers], Event]] = []

    # --- for whoever owns it -----------------------------------------------------------------

    @property
    def has_calls(self) -> bool:
        """Whether it has begun to call a function."""
        if isinstance(self._item, CallWriting):
            return True
        return any(isinstance(item, FunctionCall) for item in self._items)

    def response_so_far(self) -> Response:
        """The response with what it has of its output."""
        response = self.response
        if response.status in ENDED:
            return response
        stream = self._stream
        if response.status == "queued" and stream is not None and stream.first_token_s is not None:
            response = structs.replace(response, status="in_progress")  # that nobody reads yet
        items = list(self._items)
        if self._item is not None:
            items.append(self._item.item("in_progress"))
        return structs.replace(response, output=tuple(items))

    def insert(self, make: Callable[[Numbers], Event]) -> None:
        """An event to come before the next ones."""
        self._inserted.append(make)
        self._plain = None

    # --- AnswerWriter ------------------------------------------------------------------------

    def begin(self, streams: Sequence[TokenStream]) -> Sequence[Event]:
        (self._stream,) = streams
        events = [self._event(ResponseCreated)]
        if self.response.status == "queued":
            return [*events, self._event(ResponseQueued)]
        return [*events, self._event(ResponseInProgress)]

    def push(self, prompt: int, delta: TokenDelta) -> Sequence[Event]:
        write = self._plain
        if write is None or delta.finish_reason is not None or delta.logprobs:
            return self._push(delta)
        text = delta.text
        return (write(text),) if text else ()

    def end(self) -> Sequence[Event]:
        if self.response.status in ENDED:
            return ()  # the last delta's events were the last
        return self.fail(GenerationError("nothing was found that could be the answer"))

    def fail(self, error: BaseException) -> Sequence[Event]:
        events = [*self._take_inserted(), *self._close("incomplete")]
        self._finish("failed", error=ResponseError(message=error_body(error).error.message))
        return [*events, self._event(ResponseFailed)]

    # --- deltas ------------------------------------------------------------------------------

    def _push(self, delta: TokenDelta) -> list[Event]:
        events = self._take_inserted()
        if self.response.status == "queued":
            self.response = structs.replace(self.response, status="in_progress")
            events.append(self._event(ResponseInProgress))
        if self._generates:
            events += self._write(delta)
        if delta.finish_reason is not None:
            events += self._end(delta.finish_reason)
        return events

    def _take_inserted(self) -> list[Event]:
        events = [make(self.numbers) for make in self._inserted]
        self._inserted.clear()
        if self._reader is None and isinstance(self._item, MessageWriting):
            self._plain = self._item.delta
        return events

    def _write(self, delta: TokenDelta) -> list[Event]:
        if self._reader is None:
            if delta.text or delta.logprobs:
                return self._content(delta.text, delta.logprobs)
            return []
        self._logprobs += delta.logprobs
        events = self._parts(self._reader.push(delta.text, delta.token_ids))
        if delta.finish_reason is not None:
            events += self._parts(self._reader.finish())
        return events

    def _parts(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, ContentPart):
                text = self._held + part.text
                if text.isspace() and not isinstance(self._item, MessageWriting):
                    self._held = text
                    continue
                self._held = ""
                events += self._content(text, self._take_logprobs(part.text))
                continue
            self._held = ""
            self._logprobs.clear()
            if isinstance(part, ReasoningPart):
                if not isinstance(self._item, ReasoningWriting):
                    events += self._open(ReasoningWriting(*self._place(REASONING)))
            elif part.id:
                call = CallWriting(*self._place(CALL), call_id=part.id, name=part.name)
                events += self._open(call)
            text = part.text if isinstance(part, ReasoningPart) else part.arguments
            if text and self._item is not None:
                events.append(self._item.delta(text))
        return events

    def _take_logprobs(self, text: str) -> list[TokenLogprob]:
        """Those of the tokens that the text came from; of marks before it there are none."""
        if not self._logprobs:
            return []
        pieces = [logprob.bytes for logprob in self._logprobs]
        joined, wanted = b"".join(pieces), text.encode()
        start = len(joined) - len(wanted) if joined.endswith(wanted) else joined.find(wanted)
        ends = list(itertools.accumulate(map(len, pieces)))
        first, last = 0, len(pieces)  # all of them, for bytes that are no text
        if start >= 0:
            first = bisect.bisect_right(ends, start)
            last = bisect.bisect_left(ends, start + len(wanted)) + 1
        taken, self._logprobs = self._logprobs[first:last], self._logprobs[last:]
        return taken

    def _content(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Event]:
        events: list[Event] = []
        item = self._item
        if not isinstance(item, MessageWriting):
            item = MessageWriting(*self._place(MESSAGE))
            events += self._open(item)
            self._plain = item.delta if self._reader is None else None
        if logprobs:
            events.append(item.delta_with(text, logprobs))
        elif text:
            events.append(item.delta(text))
        return events

    def _place(self, kind: str) -> tuple[Numbers, int, str]:
        index = len(self._items) + (self._item is not None)
        return self.numbers, index, item_id_of(kind, self.response.id, index)

    def _open(self, item: ItemWriting) -> list[Event]:
        """Begin an item; the one before it is complete."""
        events = self._close("completed")
        self._item = item
        return events + item.open()

    def _close(self, status: ItemStatus) -> list[Event]:
        item, self._item, self._plain = self._item, None, None
        if item is None:
            return []
        closed = item.close(status)
        self._items.append(closed.item)
        return closed.events

    # --- the end -----------------------------------------------------------------------------

    def _end(self, reason: FinishReason) -> list[Event]:
        events: list[Event] = []
        is_cut = reason is not FinishReason.STOP
        if self._generates and self._lacks_message(reason):
            events += self._content(self._held, ())
        events += self._close("incomplete" if is_cut else "completed")
        if not is_cut or not (self._generates or reason is FinishReason.ABORT):
            self._finish("completed")
            return [*events, self._event(ResponseCompleted)]
        if reason is FinishReason.LENGTH:
            self._finish("incomplete", IncompleteDetails("max_output_tokens"))
        elif self.is_steered:
            self._finish("incomplete", IncompleteDetails("steered"))
        else:  # ABORT: what breaks goes to `fail`
            self._finish("cancelled")
        return [*events, self._event(ResponseIncomplete)]

    def _lacks_message(self, reason: FinishReason) -> bool:
        """Whether what has ended would be no answer without an empty message."""
        if reason is FinishReason.ABORT or isinstance(self._item, MessageWriting):
            return False
        if isinstance(self._item, CallWriting):
            return False
        return self._item is None or reason is FinishReason.STOP

    def _finish(
        self,
        status: ResponseStatus,
        details: IncompleteDetails | None = None,
        error: ResponseError | None = None,
    ) -> None:
        usage = Usage(0, 0, 0) if self._stream is None else self._stream.usage
        if not self._generates:
            usage = structs.replace(usage, num_generated_tokens=0)
        num_reasoning = 0 if self._reader is None else self._reader.reasoning_tokens
        self.response = structs.replace(
            self.response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=details,
            error=error,
            output=tuple(self._items),
            usage=ResponseUsage.build(usage, num_reasoning_tokens=num_reasoning),
        )
        self._stream = self._reader = None
        self.on_end(self.response)

    def _event(self, kind: type[ResponseEvent]) -> Event:
        return self.numbers.event(kind, response=self.response)
