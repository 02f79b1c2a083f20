"""The responses that clients can come back to: to read, to cancel, to go on from.

Owns who finds which, for how long, and how much memory they take. Knows no transport and nothing of
how a response is made. Invariants: a response is found only by the key that asked for it; one that
runs stays; of those that have ended the oldest go first, when all together take more than
`max_bytes`, or when `ttl_s` have passed. What turns of a conversation share is counted for each of
them, so the limit is never exceeded.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import structs
from starlette.requests import HTTPConnection

from ...config import ServerConfig
from ...errors import InvalidRequestError, NotFoundError, OverloadedError
from ..answers import answers_of
from ..wire import encode
from .items import Item, item_bytes, item_id
from .object import Response
from .writer import ResponseWriter

RETRY_AFTER_S = 5
_OVERHEAD_BYTES = 2048  # of a response's Python objects


class Turn:
    """One response's part of a conversation: what was asked, and what came of it. `parent` is the
    turn that it goes on from. Making and reading a long one is for a thread."""

    __slots__ = ("inputs", "num_bytes", "num_items", "outputs", "parent", "response_id")

    def __init__(self, response_id: str, inputs: Sequence[Item], parent: Turn | None) -> None:
        self.response_id = response_id
        self.parent = parent
        self.inputs = tuple(inputs)
        self.outputs: tuple[Item, ...] = ()
        self.num_items: int = len(inputs) + (0 if parent is None else parent.num_items)
        before = 0 if parent is None else parent.num_bytes
        self.num_bytes: int = before + sum(map(item_bytes, inputs))

    def own(self) -> Iterator[tuple[str, Item]]:
        """Its items, with their ids."""
        for index, item in enumerate(self.inputs):
            yield item_id(item, self.response_id, index), item
        for item in self.outputs:
            yield item.id or "", item

    def before(self) -> list[tuple[str, Item]]:
        """All items that the response was made from, with their ids, oldest first."""
        turns = list(self._turns())
        items = [pair for turn in reversed(turns[1:]) for pair in turn.own()]
        return items + list(self.own())[: len(self.inputs)]

    def last(self, num: int) -> list[Item]:
        """About the last `num` items of the conversation, this turn's output included: whole
        turns, oldest first."""
        turns: list[Turn] = []
        for turn in self._turns():
            turns.append(turn)
            num -= len(turn.inputs) + len(turn.outputs)
            if num <= 0:
                break
        return [item for turn in reversed(turns) for item in (*turn.inputs, *turn.outputs)]

    def end(self, response: Response) -> None:
        """What came of it."""
        self.outputs = response.output
        self.num_items += len(response.output)
        self.num_bytes += sum(map(item_bytes, response.output))

    def _turns(self) -> Iterator[Turn]:
        """Newest first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


class Record:
    """One response, from its creation on. Owner: the answer that makes it; later its store."""

    def __init__(
        self, owner: bytes, turn: Turn, writer: ResponseWriter, store: ResponseStore | None = None
    ) -> None:
        self.owner = owner
        self.store = store  # where it is kept
        self.turn = turn
        self.id = writer.response.id
        self.is_background = writer.response.background
        self.num_bytes = 0  # once it has ended
        self.expires_s = 0.0
        self._writer: ResponseWriter | None = writer
        self._final: Response | None = None

    @property
    def response(self) -> Response:
        """As it stands."""
        if self._final is not None:
            return self._final
        assert self._writer is not None, "neither running nor ended"
        return self._writer.response_so_far()

    @property
    def has_ended(self) -> bool:
        return self._final is not None

    def end(self, response: Response) -> None:
        """What came of it."""
        self._final, self._writer = response, None
        self.turn.end(response)
        if self.store is not None:
            self.store.end(self)

    @property
    def final_bytes(self) -> int:
        """About what it takes in memory, once it has ended."""
        rest = structs.replace(self.response, output=())  # which is its turn's
        return self.turn.num_bytes + len(encode(rest)) + _OVERHEAD_BYTES

    def move(self, store: ResponseStore) -> None:
        """Keep it there instead."""
        if self.store is not None:
            self.store.remove(self.owner, self.id)
        self.store = store
        store.begin(self)
        if self.has_ended:
            store.end(self)


class ResponseStore:
    """Responses by id. Event-loop thread only."""

    def __init__(self, max_bytes: int, ttl_s: float = float("inf")) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._running: dict[tuple[bytes, str], Record] = {}
        self._num_running_bytes = 0  # of those in the background, which only end by themselves
        self._ended: OrderedDict[tuple[bytes, str], Record] = OrderedDict()
        self._num_bytes = 0

    @classmethod
    def of(cls, config: ServerConfig) -> ResponseStore:
        """The server's."""
        return cls(int(config.response_store_mib * 2**20), config.response_store_ttl)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def takes(self, turn: Turn, wanted: bool | None, *, background: bool = False) -> bool:
        """Whether a response to it is kept, if it is `wanted` or nothing is said of that.
        InvalidRequestError if it must be, and is too large whatever else is here."""
        if not self.is_on or wanted is False:
            return False
        num_bytes = turn.num_bytes + _OVERHEAD_BYTES
        if num_bytes <= self._max_bytes:
            return True
        if wanted or background:
            field = "background" if background else "store"
            raise InvalidRequestError(
                f"{field}: expected a conversation of at most {self._max_bytes} bytes, all that is "
                f"kept here (--response-store-mib), got {num_bytes}; send less, or leave {field} "
                "out, and the response is not kept",
                param=field,
            )
        return False

    def begin(self, record: Record) -> None:
        """It can be found from now on. InvalidRequestError if its id is that of one that runs,
        OverloadedError if too much runs in the background."""
        key = record.owner, record.id
        if key in self._running:
            raise InvalidRequestError(
                f"request_id: expected one that is not in use, got that of {record.id!r}",
                param="request_id",
            )
        if record.is_background:
            num_running = self._num_running_bytes + record.turn.num_bytes
            if num_running > self._max_bytes:
                raise OverloadedError(
                    f"background: expected responses that run to take at most {self._max_bytes} "
                    f"bytes, got {num_running}; wait for some to end",
                    retry_after_s=RETRY_AFTER_S,
                )
            record.num_bytes = record.turn.num_bytes
            self._num_running_bytes += record.num_bytes
        self._running[key] = record

    def end(self, record: Record) -> None:
        """It has ended, and may go when there is need of room."""
        key = record.owner, record.id
        if self._running.get(key) is not record:
            return  # it was removed
        self.remove(*key)
        record.num_bytes = record.final_bytes
        record.expires_s = asyncio.get_running_loop().time() + self._ttl_s
        self._ended[key] = record
        self._num_bytes += record.num_bytes
        self._expire()

    def abandon(self, record: Record) -> None:
        """It was not admitted."""
        if self._running.get((record.owner, record.id)) is record:
            self._forget_running((record.owner, record.id))

    def get(self, owner: bytes, response_id: str) -> Record | None:
        self._expire()
        key = owner, response_id
        return self._running.get(key) or self._ended.get(key)

    def remove(self, owner: bytes, response_id: str) -> None:
        """It can't be found any more."""
        key = owner, response_id
        if key in self._running:
            self._forget_running(key)
        ended = self._ended.pop(key, None)
        if ended is not None:
            self._num_bytes -= ended.num_bytes

    def clear(self) -> None:
        """Nothing is found any more. What runs goes on, and is not kept."""
        self._running.clear()
        self._ended.clear()
        self._num_running_bytes = self._num_bytes = 0

    def _forget_running(self, key: tuple[bytes, str]) -> None:
        self._num_running_bytes -= self._running.pop(key).num_bytes

    def _expire(self) -> None:
        now_s = asyncio.get_running_loop().time() if self._ended else 0.0
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.expires_s > now_s and self._num_bytes <= self._max_bytes:
                return
            self.remove(oldest.owner, oldest.id)


class Shelves:
    """Where one client's responses are found: its connection's own, and the server's."""

    def __init__(self, owner: bytes, *stores: ResponseStore) -> None:
        self.owner = owner
        self._stores = stores

    def find(self, response_id: str) -> Record | None:
        for store in self._stores:
            record = store.get(self.owner, response_id)
            if record is not None:
                return record
        return None

    def get(self, response_id: str) -> Record:
        """NotFoundError."""
        record = self.find(response_id)
        if record is None:
            raise response_not_found(response_id)
        return record

    def previous(self, response_id: str | None) -> Turn | None:
        """The turn to go on from; None for None. InvalidRequestError."""
        if response_id is None:
            return None
        record = self.find(response_id)
        if record is None:
            why = "it never was, was not stored, or was dropped for newer ones"
        elif not record.has_ended:
            why = "it has not ended yet; wait for its end"
        elif record.response.status == "failed":
            why = "it failed"
        else:
            return record.turn
        raise previous_response_not_found(response_id, why)


def response_not_found(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"response_id: no response {response_id!r:.300} here: it never was, was not stored, or is "
        "gone",
        param="response_id",
        code="response_not_found",
    )


def previous_response_not_found(response_id: str, why: str) -> InvalidRequestError:
    """OpenAI's error for a `previous_response_id` that leads nowhere."""
    return InvalidRequestError(
        f"previous_response_id: can't go on from {response_id!r:.300}: {why}; send the whole "
        "conversation as input",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def store_of(connection: HTTPConnection) -> ResponseStore:
    """The server's."""
    store: ResponseStore = connection.app.state.responses
    return store


def shelves_of(connection: HTTPConnection, *own: ResponseStore) -> Shelves:
    """Where the client of this connection finds its responses, on its own shelf first."""
    return Shelves(answers_of(connection).owner_of(connection), *own, store_of(connection))
