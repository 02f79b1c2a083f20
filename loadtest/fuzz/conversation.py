"""A WebSocket that many cases share, one batch of messages after another.

Owns how it is known that all of a batch has been dealt with: nonsense that is sent after it is
answered when all before it was read; and a bad request in a lane, when all before it in that lane
has ended. Knows no cases. Invariant: what isn't as it has to be is an Offence.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from typing import Any

from .check import ENDS, check_typed, strict_json
from .frames import Closed, Socket, frame
from .http import Offence, Target, hang_up

LANE = "lane"  # what cases name theirs, if they name one in earnest
_PATIENCE_S = 0.5  # with responses that wait for their client, which a case may ask for
_MAX_BATCHES = 100  # on one connection
_MAX_IDLE_S = 5.0  # between two of them nobody reads, and no ping is answered


class Conversation:
    """Opens connections as they are needed. `outcomes` counts what events said."""

    def __init__(self, target: Target, outcomes: Counter[str]) -> None:
        self._target = target
        self._outcomes = outcomes
        self._socket: Socket | None = None
        self._num_batches = 0
        self._read_s = 0.0  # when that was last done
        self._numbers = itertools.count()
        self._open_ids: set[str] = set()  # of responses that run
        self._marks: set[str] = set()  # what was sent to be answered by an error

    async def drop(self) -> None:
        if self._socket is not None:
            await hang_up(self._socket.writer)
            self._socket = None

    async def talk(self, data: bytes) -> None:
        """Send frames, and follow the events until all of them are dealt with."""
        is_idle = time.monotonic() - self._read_s > _MAX_IDLE_S
        if is_idle or self._num_batches >= _MAX_BATCHES:
            await self.drop()
        if self._socket is None:
            self._socket = await Socket.open(self._target)
            self._num_batches = 0
        self._num_batches += 1
        self._open_ids, self._marks = set(), set()
        self._mark({"type": "fuzz.probe"}, "stream_id", data)
        await self._target.within(self._follow(self._socket, to_the_end=False))
        # A lane goes on to this when it has done with all before; unless that waits for its client.
        create = {"type": "response.create", "input": "x"}
        self._mark(create, "model")
        self._mark(create | {"stream_id": LANE}, "model")
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._follow(self._socket, to_the_end=True)
        except TimeoutError:
            self._outcomes["never ended"] += 1
            await self.drop()
        self._read_s = time.monotonic()

    def _mark(self, event: dict[str, str], field: str, before: bytes = b"") -> None:
        """Send what will be an error that has a new name in it."""
        assert self._socket is not None
        name = f"mark-{next(self._numbers)}-"
        self._marks.add(name)
        data = json.dumps(event | {field: name}).encode()
        self._socket.writer.write(before + frame(data))

    async def _follow(self, socket: Socket, *, to_the_end: bool) -> None:
        """Until all marks are seen, and of responses that run the ends."""
        while self._marks or (to_the_end and self._open_ids):
            message = await socket.receive()
            if isinstance(message, Closed):
                raise Offence(f"expected the connection to stay open, got {message}")
            event = typed(message)
            kind = event["type"]
            if kind == "error":
                text = message.decode()
                self._marks = {mark for mark in self._marks if mark not in text}
                self._outcomes[f"error event {event.get('status')}"] += 1
            elif isinstance(response := event.get("response"), dict):
                ended = kind in ENDS
                (self._open_ids.discard if ended else self._open_ids.add)(response.get("id", ""))
                if ended:
                    self._outcomes[kind] += 1


def typed(message: bytes) -> dict[str, Any]:
    """A message that is an event."""
    event = strict_json(message, "an event")
    if not isinstance(event, dict) or "type" not in event:
        raise Offence(f"expected an event with a type, got {message[:120]!r}")
    check_typed(event)
    return event
