"""The items of one response while they are written: a message, reasoning, a call of a function.

Owns the events between an item's beginning and its end, in OpenAI's order; knows no response and no
engine. Invariant: an item that was opened is closed once, and what its closing events tell is what
its deltas, joined, have told.

    output_item.added
      message:    content_part.added, output_text.delta*, output_text.done, content_part.done
      reasoning:  content_part.added, reasoning_text.delta*, reasoning_text.done, content_part.done
      call:       function_call_arguments.delta*, function_call_arguments.done
    output_item.done
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct, structs

from ...engine.outputs import TokenLogprob
from ..answer import Event
from ..json_list import JsonList
from ..logprobs import content_logprobs
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
)
from .object import (
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)


class ItemPlace(Struct, frozen=True):
    """Where a delta belongs."""

    item_id: str
    output_index: int


class PartPlace(ItemPlace, frozen=True):
    content_index: int = 0


class Closed(NamedTuple):
    item: OutputItem
    events: list[Event]


class MessageWriting:
    """A message of the assistant."""

    def __init__(self, numbers: Numbers, index: int, item_id: str) -> None:
        self.index = index
        self._numbers = numbers
        self._item = OutputMessage(id=item_id)
        self._logprobs = JsonList()
        self._deltas = DeltaEvents(
            numbers, "response.output_text.delta", PartPlace(item_id, index), b',"logprobs":[]'
        )
        self.delta = self._deltas.event

    def open(self) -> list[Event]:
        return _open(self._numbers, self.index, self._item, OutputText())

    def delta_with(self, text: str, logprobs: Sequence[TokenLogprob]) -> Event:
        entries = content_logprobs(logprobs)
        self._logprobs.extend(entries)
        return self._deltas.with_logprobs(text, entries)

    def item(self, status: ItemStatus) -> OutputMessage:
        """The item so far."""
        part = OutputText(text="".join(self._deltas.texts), logprobs=self._logprobs.raw())
        return structs.replace(self._item, status=status, content=(part,))

    def close(self, status: ItemStatus) -> Closed:
        item = self.item(status)
        (part,) = item.content
        place = {"item_id": item.id, "output_index": self.index}
        done = self._numbers.event(OutputTextDone, text=part.text, logprobs=part.logprobs, **place)
        return Closed(item, [done, *_close(self._numbers, self.index, item, part)])


class ReasoningWriting:
    """What the model thinks before it answers."""

    def __init__(self, numbers: Numbers, index: int, item_id: str) -> None:
        self.index = index
        self._numbers = numbers
        self._item = ReasoningItem(id=item_id)
        self._deltas = DeltaEvents(
            numbers, "response.reasoning_text.delta", PartPlace(item_id, index)
        )
        self.delta = self._deltas.event

    def open(self) -> list[Event]:
        return _open(self._numbers, self.index, self._item, ReasoningText())

    def item(self, status: ItemStatus) -> ReasoningItem:
        part = ReasoningText(text="".join(self._deltas.texts))
        return structs.replace(self._item, status=status, content=(part,))

    def close(self, status: ItemStatus) -> Closed:
        item = self.item(status)
        (part,) = item.content
        place = {"item_id": item.id, "output_index": self.index}
        done = self._numbers.event(ReasoningTextDone, text=part.text, **place)
        return Closed(item, [done, *_close(self._numbers, self.index, item, part)])


class CallWriting:
    """A call of a function, which is the client's to make."""

    def __init__(
        self, numbers: Numbers, index: int, item_id: str, *, call_id: str, name: str
    ) -> None:
        self.index = index
        self._numbers = numbers
        self._item = FunctionCall(id=item_id, call_id=call_id, name=name)
        self._deltas = DeltaEvents(
            numbers, "response.function_call_arguments.delta", ItemPlace(item_id, index)
        )
        self.delta = self._deltas.event

    def open(self) -> list[Event]:
        return [self._numbers.event(OutputItemAdded, output_index=self.index, item=self._item)]

    def item(self, status: ItemStatus) -> FunctionCall:
        return structs.replace(self._item, status=status, arguments="".join(self._deltas.texts))

    def close(self, status: ItemStatus) -> Closed:
        item = self.item(status)
        place = {"item_id": item.id, "output_index": self.index}
        event = self._numbers.event
        events = [
            event(ArgumentsDone, name=item.name, arguments=item.arguments, **place),
            event(OutputItemDone, output_index=self.index, item=item),
        ]
        return Closed(item, events)


ItemWriting = MessageWriting | ReasoningWriting | CallWriting


def _close(
    numbers: Numbers, index: int, item: OutputItem, part: OutputText | ReasoningText
) -> list[Event]:
    return [
        numbers.event(ContentPartDone, item_id=item.id, output_index=index, part=part),
        numbers.event(OutputItemDone, output_index=index, item=item),
    ]


def _open(
    numbers: Numbers, index: int, item: OutputItem, part: OutputText | ReasoningText
) -> list[Event]:
    return [
        numbers.event(OutputItemAdded, output_index=index, item=item),
        numbers.event(ContentPartAdded, item_id=item.id, output_index=index, part=part),
    ]
