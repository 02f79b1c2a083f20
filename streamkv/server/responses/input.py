"""The input of one request: its items checked, and those found that it names by their ids.

Owns the way from `input` to a Turn of the conversation. Knows no model and no transport. Invariant:
what takes long for input of a client's size is done in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypeAlias, TypeVar

from ...errors import InvalidRequestError
from ..bounds import few
from .items import InputItem, Item, check_item
from .object import owner_of_item
from .store import Shelves, Turn

MANY_ITEMS = 256  # and parts of items; looking at more would hold up the loop
_CHARS_OF_A_PART = 1024
MAX_REFERENCES = 256
MAX_OBJECTS = 1 << 16  # in the JSON of a long list of items: items, parts, and braces in texts

Input: TypeAlias = Annotated[str | list[InputItem], few(MAX_OBJECTS)]

T = TypeVar("T")


async def off_loop(num: int, work: Callable[[], T]) -> T:
    """Do it, in a thread if there is much."""
    return await asyncio.to_thread(work) if num > MANY_ITEMS else work()


async def read_turn(
    response_id: str,
    before: Sequence[InputItem],
    given: Sequence[InputItem],
    shelves: Shelves,
    previous: Turn | None,
) -> Turn:
    """The turn with `before`, which was checked, and the items of `input`. InvalidRequestError
    names the item at fault."""
    num = _size(given)
    references = await off_loop(num, lambda: _check(given))
    if len(references) > MAX_REFERENCES:
        raise InvalidRequestError(
            f"input: expected at most {MAX_REFERENCES} references to items, got {len(references)}; "
            "send the items themselves",
            param="input",
        )
    items: list[Item] = [*before, *given]
    if references:
        library = _Library(shelves, previous)
        for index in references:
            items[len(before) + index] = await library.find(given[index].id or "", index)
    return await off_loop(num + len(before), lambda: Turn(response_id, items, previous))


def _size(items: Sequence[InputItem]) -> int:
    """Items, and parts where they aren't too many anyway. Long texts count as many."""
    if len(items) > MANY_ITEMS:
        return len(items)
    return len(items) + sum(
        len(value) if isinstance(value, list) else len(value or "") // _CHARS_OF_A_PART
        for item in items
        for value in (item.content, item.output, item.summary, item.arguments)
    )


def _check(given: Sequence[InputItem]) -> list[int]:
    """Where the references are."""
    references = []
    for index, item in enumerate(given):
        check_item(item, f"input[{index}]")
        if item.kind == "item_reference":
            references.append(index)
    return references


class _Library:
    """Items by their ids: of responses that are kept, and of the conversation that goes on."""

    def __init__(self, shelves: Shelves, previous: Turn | None) -> None:
        self._shelves = shelves
        self._previous = previous
        self._known: dict[str, Mapping[str, Item]] = {}  # by the response that made them
        self._conversation: Mapping[str, Item] | None = None

    async def find(self, item_id: str, index: int) -> Item:
        """InvalidRequestError if there is none."""
        found = self._of_response(owner_of_item(item_id)).get(item_id)
        if found is None:
            found = (await self._of_conversation()).get(item_id)
        if found is None:
            raise InvalidRequestError(
                f"input[{index}].id: no item {item_id!r:.300} here: its response never was, was "
                "not stored, or is gone; send the item itself",
                param=f"input[{index}].id",
                code="item_not_found",
            )
        return found

    def _of_response(self, response_id: str) -> Mapping[str, Item]:
        if response_id not in self._known:
            record = self._shelves.find(response_id)
            self._known[response_id] = {} if record is None else dict(record.turn.own())
        return self._known[response_id]

    async def _of_conversation(self) -> Mapping[str, Item]:
        previous = self._previous
        if previous is None:
            return {}
        if self._conversation is None:
            pairs = await off_loop(previous.num_items, previous.before)
            self._conversation = dict(pairs) | dict(previous.own())
        return self._conversation
