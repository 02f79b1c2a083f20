"""Life: where an engine is between loading and its end, and who waits for what.

Owns the status, and why it failed. It must not know what an engine does. Used on the event-loop
thread only. Invariant: once it is closed, it stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum

from ..errors import EngineDeadError, EngineNotReadyError, StreamkvError


class EngineStatus(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # what runs goes on, nothing new is taken
    FAILED = "failed"  # it could not load, or it died
    CLOSED = "closed"


class Life:
    """Begins with LOADING."""

    def __init__(self) -> None:
        self.status = EngineStatus.LOADING
        self._error: BaseException | None = None  # why the status is FAILED
        self._settled = asyncio.Event()  # set once the status is not LOADING
        self._draining = asyncio.Event()  # set once its end was asked for

    def become(self, status: EngineStatus) -> None:
        if self.status is not EngineStatus.CLOSED:
            self.status = status
            if status is not EngineStatus.LOADING:
                _set(self._settled)

    def fail(self, error: BaseException) -> None:
        if self.status is not EngineStatus.CLOSED:
            self._error = error
            self.become(EngineStatus.FAILED)

    def drain(self) -> None:
        """Its end was asked for. Idempotent."""
        if self.status in (EngineStatus.LOADING, EngineStatus.READY):
            self.become(EngineStatus.DRAINING)
        _set(self._draining)

    async def wait_draining(self) -> None:
        await self._draining.wait()

    async def wait_settled(self) -> None:
        """Until it is not loading any more. Raises what kept it from loading."""
        await self._settled.wait()
        if self.status is EngineStatus.FAILED and self._error is not None:
            raise self._error

    def detail(self, progress: str) -> str:
        """The status in words: how far it has loaded, or what went wrong."""
        match self.status:
            case EngineStatus.FAILED:
                return str(self._error)
            case EngineStatus.LOADING:
                return progress
            case EngineStatus.DRAINING:
                return "shutting down; it takes no new requests"
        return str(self.status)

    def not_ready(self, progress: str) -> StreamkvError:
        """For who asks for what only one that is ready can do."""
        detail = self.detail(progress)
        if self.status is EngineStatus.LOADING:
            return EngineNotReadyError(
                f"the model is loading ({detail}): try again in a few seconds"
            )
        return EngineDeadError(f"the engine serves nobody any more: {detail}")


def _set(event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # its waiters were left behind by a loop that is closed
        event.set()
