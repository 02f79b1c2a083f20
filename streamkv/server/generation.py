"""The streams of one request as a whole: admitted together, cancelled together, left together.

Owns their contexts. It must not know what becomes of their tokens. Invariants: all prompts are
admitted or none; whatever ends it, its streams are cancelled and left, which aborts what has not
finished, and then lets go of them; `on_ended` callbacks are called once, while the streams still
say how far they came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from ..engine.stream import TokenStream

logger = logging.getLogger(__name__)

Source = AbstractAsyncContextManager[TokenStream]


class Generation:
    """The streams of one request, from their admission to their end."""

    def __init__(self, answer_id: str, *, owner: bytes = b"") -> None:
        """`owner`: who alone may read and cancel it (a digest)."""
        self.answer_id = answer_id
        self.owner = owner
        self.streams: list[TokenStream] = []
        self.error: BaseException | None = None  # why it ended
        self.is_admitted = False
        self.is_cancelled = False
        self.is_paused = False  # it has no reader, and waits for one
        self.is_ended = False
        self.is_forgotten = False  # nobody finds it any more
        self.num_held_bytes = 0  # of what it will hold once it has ended, besides text and events
        self._on_ended: list[Callable[[], None]] = []
        self._stack = AsyncExitStack()
        self._settled = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    def on_ended(self, callback: Callable[[], None]) -> None:
        """Call it once, at the end. Its streams still say how far they came."""
        self._on_ended.append(callback)

    async def admit(self, sources: Sequence[Source]) -> None:
        """Enter all sources or none; raises what entering one of them does."""
        try:
            async with AsyncExitStack() as stack:
                for source in sources:
                    if self.streams:
                        await asyncio.sleep(0)  # many prompts may be tokenized here: let others run
                    stream = await stack.enter_async_context(source)
                    self.streams.append(stream)
                    if self.is_cancelled:
                        stream.cancel()
                self._stack = stack.pop_all()
        except BaseException as error:
            self.error = error
            self.streams = []
            raise
        finally:
            self._settled.set()
        self.is_admitted = True

    async def wait_settled(self) -> None:
        """Until all prompts are admitted or none will be. Who waits goes on before the streams can
        be let go of."""
        await self._settled.wait()

    def cancel(self) -> None:
        """End it soon, whatever state it is in. Idempotent."""
        self.is_cancelled = True
        for stream in self.streams:
            stream.cancel()

    def forget(self) -> None:
        """It can't be found any more, now and once it has ended."""
        self.is_forgotten = True

    def end(self) -> None:
        """It has ended: leave the streams. Idempotent."""
        if self.is_ended:
            return
        self.is_ended = True
        self._settled.set()
        for stream in self.streams:
            stream.cancel()
        for callback in self._on_ended:
            try:
                callback()
            except Exception:
                logger.exception("request %s: what follows its end failed", self.answer_id)
        self._on_ended.clear()
        self._leaving = asyncio.get_running_loop().create_task(self._leave())

    async def _leave(self) -> None:
        try:
            await self._stack.aclose()
        finally:
            self.streams = []

    async def wait_left(self) -> None:
        """Until its streams are left, after `end`."""
        if self._leaving is not None:
            await self._leaving
