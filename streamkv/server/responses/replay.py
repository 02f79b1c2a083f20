"""The events of a response that has ended, made of what is known of it.

Owns how they follow from the response, for those whose own events are not kept any more. Invariant:
they tell the same response, in the order of `writer`; the text of each part is one delta.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from ..answer import Event
from .events import (
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    DeltaEvents,
    Numbers,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDone,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from .object import FunctionCall, OutputItem, OutputMessage, Response
from .output import ItemPlace, PartPlace

_LAST = {"completed": ResponseCompleted, "failed": ResponseFailed}


def replay(response: Response) -> list[Event]:
    """The events."""
    numbers = Numbers()
    begun = structs.replace(
        response,
        status="queued" if response.background else "in_progress",
        completed_at=None,
        error=None,
        incomplete_details=None,
        output=(),
        usage=None,
    )
    events = [numbers.event(ResponseCreated, response=begun)]
    if response.background:
        events.append(numbers.event(ResponseQueued, response=begun))
        begun = structs.replace(begun, status="in_progress")
    events.append(numbers.event(ResponseInProgress, response=begun))
    for index, item in enumerate(response.output):
        events += _item(numbers, index, item)
    last = _LAST.get(response.status, ResponseIncomplete)
    return [*events, numbers.event(last, response=response)]


def _item(numbers: Numbers, index: int, item: OutputItem) -> list[Event]:
    place: dict[str, Any] = {"item_id": item.id, "output_index": index}
    begun: OutputItem
    if isinstance(item, FunctionCall):
        begun = structs.replace(item, arguments="", status="in_progress")
        events = [numbers.event(OutputItemAdded, output_index=index, item=begun)]
        if item.arguments:
            name = "response.function_call_arguments.delta"
            deltas = DeltaEvents(numbers, name, ItemPlace(**place))
            events.append(deltas.event(item.arguments))
        done = {"name": item.name, "arguments": item.arguments}
        events.append(numbers.event(ArgumentsDone, **place, **done))
    else:
        begun = structs.replace(item, content=(), status="in_progress")
        events = [numbers.event(OutputItemAdded, output_index=index, item=begun)]
        events += _part(numbers, place, item)
    return [*events, numbers.event(OutputItemDone, output_index=index, item=item)]


def _part(numbers: Numbers, place: dict[str, Any], item: Any) -> list[Event]:
    """Of a message or reasoning, which have one."""
    (part,) = item.content
    empty = type(part)()
    events = [numbers.event(ContentPartAdded, part=empty, **place)]
    if isinstance(item, OutputMessage):
        tail = b',"logprobs":[]'  # all of them are told at the end
        deltas = DeltaEvents(numbers, "response.output_text.delta", PartPlace(**place), tail)
    else:
        deltas = DeltaEvents(numbers, "response.reasoning_text.delta", PartPlace(**place))
    if part.text:
        events.append(deltas.event(part.text))
    if isinstance(item, OutputMessage):
        done = numbers.event(OutputTextDone, text=part.text, logprobs=part.logprobs, **place)
    else:
        done = numbers.event(ReasoningTextDone, text=part.text, **place)
    return [*events, done, numbers.event(ContentPartDone, part=part, **place)]
