"""What is written to connections in one turn, and what becomes of it when one of them breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from streamkv.server.direct_write import MAX_PIECES, DirectWriter, WriteBatch


class Transport:
    """Keeps what is written; one that is broken raises."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.written: list[bytes] = []
        self._is_broken = is_broken

    def get_extra_info(self, name: str) -> None:
        """It has no socket."""

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


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


async def connected() -> tuple[asyncio.Transport, socket.socket]:
    """A transport over TCP, and the socket at the other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        mine, _ = listener.accept()
    mine.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=mine)
    return transport, other


@LOOPS
def test_a_reader_who_falls_behind_gets_all_in_order(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Whether the socket took it, the transport, or each a part; and what others write between."""

    async def main() -> None:
        transport, other = await connected()
        one, sent = writer(WriteBatch(), transport), bytearray()
        with other:
            for number in range(60):
                piece = b"%d," % number * 40_000
                if number % 7 == 3:
                    transport.write(piece)
                else:
                    one.write(piece)
                    one.flush()
                sent += piece
            assert transport.get_write_buffer_size() > 0, "the socket took all there was"
            received = bytearray()
            while len(received) < len(sent):
                received += await asyncio.to_thread(other.recv, 1 << 16)
            assert received == sent
            transport.close()
            assert await asyncio.to_thread(other.recv, 1) == b""

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@LOOPS
@pytest.mark.parametrize("end", ["close", "abort"])
def test_nothing_is_written_to_who_gets_the_socket_of_a_closed_connection(
    new_loop: Callable[[], asyncio.AbstractEventLoop], end: str
) -> None:
    async def main() -> None:
        transport, other = await connected()
        one, number = writer(WriteBatch(), transport), transport.get_extra_info("socket").fileno()
        with other:
            getattr(transport, end)()
            one.write(b"late")
            one.flush()
            await asyncio.sleep(0.01)  # until the transport has given its socket back
            left, right = socket.socketpair()
            with left, right:
                assert number in (left.fileno(), right.fileno())
                one.write(b"later")
                with contextlib.suppress(RuntimeError):  # uvloop's transports mind
                    one.flush()
                for end_of_pair in (left, right):
                    end_of_pair.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        end_of_pair.recv(1)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
