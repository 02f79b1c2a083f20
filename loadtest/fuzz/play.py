"""Plays cases against a server and judges what comes back.

Owns a worker's connections: one for requests in a row, one for WebSocket messages, and one for
each case that breaks its own. Invariant: an Offence is told with the number of its case.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from .cases import Case
from .check import ENDS, check_answer
from .conversation import Conversation, typed
from .frames import FAIR_CLOSES, Closed, Socket, handshake
from .http import Answer, Ask, Gone, Offence, Target, hang_up, read_answer
from .http_cases import Exchange, Leaving, Malformed
from .socket_cases import Broken, Departure, Handshake, Talk


class Fault(NamedTuple):
    """What a case found."""

    numbers: tuple[int, ...]  # one, or several that only together have this effect
    kind: str
    shown: str
    reason: str

    def __str__(self) -> str:
        which = " ".join(map(str, self.numbers))
        return f"case {which} ({self.kind}): {self.reason}\n  sent: {self.shown}"


def make_fault(case: Case, reason: object) -> Fault:
    return Fault((case.number,), case.kind, case.deed.shown, str(reason))


class Player:
    """One client after another. `outcomes` counts statuses and codes."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.outcomes: Counter[str] = Counter()
        self._conversation = Conversation(target, self.outcomes)

    async def close(self) -> None:
        await self._drop_http()
        await self._conversation.drop()

    async def play(self, cases: Sequence[Case]) -> list[Fault]:
        """All of them; the faults found, by number."""
        exchanges = [case for case in cases if isinstance(case.deed, Exchange)]
        talks = [case for case in cases if isinstance(case.deed, Talk)]
        faults = await self._play_exchanges(exchanges)
        faults += await self._play_talks(talks)
        for case in cases:
            if not isinstance(case.deed, Exchange | Talk):
                try:
                    await self._play_alone(case.deed)
                except (Offence, ConnectionError) as reason:
                    faults.append(make_fault(case, reason))
        return sorted(faults)

    async def _play_alone(self, deed: object) -> None:
        match deed:
            case Malformed():
                await self._malformed(deed)
            case Leaving():
                await self._leaving(deed)
            case Broken():
                await self._broken(deed)
            case Departure():
                await self._departure(deed)
            case Handshake():
                await self._handshake(deed)

    def _judge(self, answer: Answer, method: str) -> None:
        self.outcomes[str(answer.status)] += 1
        check_answer(answer, method)

    # --- requests in a row --------------------------------------------------------------------

    async def _drop_http(self) -> None:
        if self._http is not None:
            await hang_up(self._http[1])
            self._http = None

    async def _play_exchanges(self, cases: Sequence[Case]) -> list[Fault]:
        """All requests are written at once. A server may close after any answer: those that it
        has not answered are sent again, and it has to answer the first of them."""
        waiting = [
            (case, ask)
            for case in cases
            if isinstance(case.deed, Exchange)
            for ask in case.deed.asks
        ]
        faults: list[Fault] = []
        while waiting:
            done, reason = await self._ask_all([ask for _, ask in waiting])
            waiting = waiting[done:]
            if reason is not None:
                bad = waiting[0][0]
                faults.append(make_fault(bad, reason))
                await self._drop_http()
                waiting = [(case, ask) for case, ask in waiting if case is not bad]
        return faults

    async def _ask_all(self, asks: Sequence[Ask]) -> tuple[int, Offence | None]:
        """How many were answered well, and what is wrong with the next one."""
        is_new = self._http is None
        if self._http is None:
            self._http = await self._target.connect()
        reader, writer = self._http
        writer.write(b"".join(ask.to_bytes(self._target) for ask in asks))
        for number, ask in enumerate(asks):
            try:
                answer = await self._target.within(read_answer(reader, ask.method))
                self._judge(answer, ask.method)
            except Gone:
                await self._drop_http()
                if number == 0 and is_new:
                    return 0, Offence("the connection was closed without an answer")
                return number, None
            except Offence as offence:
                return number, offence
            if answer.headers.get("connection", "").lower() == "close":
                await self._drop_http()
                return number + 1, None
        return len(asks), None

    # --- on connections of their own ----------------------------------------------------------

    async def _malformed(self, deed: Malformed) -> None:
        reader, writer = await self._target.connect()
        try:
            writer.write(deed.data)
            if deed.answered:
                with suppress(Gone):
                    self._judge(await self._target.within(read_answer(reader, "GET")), "GET")
            with suppress(OSError):
                writer.write_eof()
            while True:
                self._judge(await self._target.within(read_answer(reader, "GET")), "GET")
        except Gone:
            self.outcomes["hung up"] += 1
        finally:
            await hang_up(writer)

    async def _leaving(self, deed: Leaving) -> None:
        reader, writer = await self._target.connect()
        try:
            writer.write(deed.ask.to_bytes(self._target))
            with suppress(asyncio.IncompleteReadError):
                await self._target.within(reader.readexactly(deed.num_bytes))
        finally:
            await hang_up(writer, hard=deed.hard)
        self.outcomes["left"] += 1
        if deed.then:
            _, offence = await self._ask_all(deed.then)
            if offence is not None:
                await self._drop_http()
                raise offence

    async def _handshake(self, deed: Handshake) -> None:
        answer, _, writer = await handshake(self._target, deed.data)
        await hang_up(writer)
        if answer is not None:
            self._judge(answer, "GET")

    async def _broken(self, deed: Broken) -> None:
        socket = await Socket.open(self._target)
        try:
            socket.writer.write(deed.data)
            while True:
                message = await self._target.within(socket.receive())
                if isinstance(message, Closed):
                    break
                typed(message)
        finally:
            await hang_up(socket.writer)
        self.outcomes[f"close {message.code}"] += 1
        if message.code not in FAIR_CLOSES:
            raise Offence(f"expected a close for the client's fault, got {message}")

    async def _departure(self, deed: Departure) -> None:
        socket = await Socket.open(self._target)
        try:
            socket.writer.write(deed.data)
            num_ended = 0
            for _ in range(deed.num_events):
                message = await self._target.within(socket.receive())
                if isinstance(message, Closed):
                    raise Offence(f"expected events, got {message}")
                num_ended += typed(message)["type"] in ENDS
                if num_ended >= deed.num_asked:
                    break
        finally:
            await hang_up(socket.writer, hard=deed.hard)
        self.outcomes["left"] += 1

    # --- messages on one connection -----------------------------------------------------------

    async def _play_talks(self, cases: Sequence[Case]) -> list[Fault]:
        """All on one connection; if something is wrong, one after the other."""
        if not cases:
            return []
        deeds = [case.deed for case in cases]
        try:
            await self._conversation.talk(b"".join(d.data for d in deeds if isinstance(d, Talk)))
            return []
        except (Offence, ConnectionError) as error:
            reason = error
            await self._conversation.drop()
        if len(cases) == 1:
            return [make_fault(cases[0], reason)]
        faults = [fault for case in cases for fault in await self._play_talks([case])]
        if faults:
            return faults
        numbers = tuple(case.number for case in cases)
        shown = "; ".join(deed.shown for deed in deeds)
        return [Fault(numbers, "talk, all on one connection", shown, str(reason))]
