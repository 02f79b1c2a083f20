"""What is written to connections in one turn, and what becomes of it when one of them breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamkv.server.direct_write import MAX_PIECES, DirectWriter, WriteBatch


class Transport:
    """Keeps what is written; one that is broken raises."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.written: list[bytes] = []
        self._is_broken = is_broken

    def write(self, data: bytes) -> None:
        if self._is_broken:
            raise OSError("the wire is cut")
        self.written.append(data)


def writer(batch: WriteBatch, transport: Any) -> DirectWriter:
    return DirectWriter(batch, transport)


def test_pieces_of_a_turn_are_joined_and_sent_after_it_in_the_order_of_their_first() -> None:
    order: list[int] = []

    class Noting(Transport):
        def __init__(self, number: int) -> None:
            super().__init__()
            self._number = number

        def write(self, data: bytes) -> None:
            order.append(self._number)
            super().write(data)

    async def main() -> None:
        batch, transports = WriteBatch(), [Noting(i) for i in range(3)]
        writers = [writer(batch, transport) for transport in transports]
        for turn in range(2):
            for one in (2, 0, 1, 2, 0):
                writers[one].write(b"%d%d." % (turn, one))
            assert len(order) == 3 * turn, "nothing is sent before the turn is over"
            await asyncio.sleep(0)
        assert order == [2, 0, 1] * 2
        assert transports[2].written == [b"02.02.", b"12.12."]

    asyncio.run(main())


def test_many_pieces_do_not_wait_for_the_end_of_the_turn() -> None:
    async def main() -> None:
        transport = Transport()
        one = writer(WriteBatch(), transport)
        for _ in range(3 * MAX_PIECES + 5):
            one.write(b"x")
        assert [len(data) for data in transport.written] == [MAX_PIECES] * 3
        await asyncio.sleep(0)
        assert sum(map(len, transport.written)) == 3 * MAX_PIECES + 5

    asyncio.run(main())


def test_a_connection_that_breaks_is_lost_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost: list[str] = []

    async def main() -> None:
        batch, whole = WriteBatch(), Transport()
        broken = writer(batch, Transport(is_broken=True))
        broken.on_lost = lambda: lost.append("broken")
        other = writer(batch, whole)
        broken.write(b"a")
        other.write(b"b")
        await asyncio.sleep(0)
        assert whole.written == [b"b"] and lost == ["broken"] and not broken.is_writable
        broken.write(b"c")  # too late: nobody gets it, and nothing is raised
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [record.message for record in caplog.records] == ["writing to a connection failed"]
