"""The thread that owns the runner: it loads it, has it answer steps in order, and closes it.

Owns the runner (built, used and dropped on this thread alone) and the channel that carries steps
to it and outputs back, as bytes. It must not know requests, the scheduler or text. The event loop
sees five things (`loaded`, `submit`, `on_output`, `on_dead`, `close`): another transport can take
its place.

A runner with a `serve` method is given the channel and stays in native code: no step waits for the
interpreter's lock. For other runners the thread runs a loop in Python.

Invariant: no exception leaves the thread. What fails while loading is set on `loaded`, what fails
in a step is its StepOutput's `error`; every step submitted before the close began is answered in
order, with at most one wake-up of the event loop each. If the thread ends for another reason than
being asked to, `on_dead` is called, once, after the last answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import traceback
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from .._cpu import Channel
from ..errors import FREE_MEMORY, EngineDeadError, ModelLoadError, StreamkvError
from ..protocol import BlockStore, MaskBoard, Runner, RunnerInfo, StepInput, StepOutput
from ..step_bytes import decode_output, decode_step, encode_output, encode_step
from . import threads

logger = logging.getLogger(__name__)


class LoadProgress(NamedTuple):
    """How far loading has come: a stage in words, and its fraction done (0..1)."""

    stage: str
    fraction: float

    def __str__(self) -> str:
        return f"{self.stage} {self.fraction * 100:.0f} %"


class _Stopped(Exception):
    """Raised out of the progress callback to leave a load that nobody waits for any more."""


@runtime_checkable
class NativeRunner(Protocol):
    """A runner that takes its steps from the channel by itself."""

    def serve(self, channel: Channel, idle_timeout_s: float) -> bool:
        """Answer steps. True: the channel was closed; False: none has come for so long."""


class DeviceThread:
    """Runs a Runner away from the event loop. Public methods belong to the loop's thread."""

    def __init__(
        self,
        build: Callable[[Callable[[str, float], None]], Runner],
        on_output: Callable[[StepOutput], None],
        on_dead: Callable[[EngineDeadError], None],
        *,
        name: str,
    ) -> None:
        """`build(progress)` makes the runner, on the thread. Needs a running event loop."""
        self.progress = LoadProgress("starting", 0.0)  # replaced as a whole, so any thread may read
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[RunnerInfo] = self._loop.create_future()
        self.store: BlockStore | None = None  # the runner's, once it has loaded
        self.masks: MaskBoard | None = None  # as `store`
        self._build = build
        self._on_output = on_output
        self._on_dead = on_dead
        self._stopping = False
        self._ended = asyncio.Event()
        self._channel = Channel()
        self._loop.add_reader(self._channel.fd, self._deliver)
        self._thread = threads.EngineThread(target=self._run, name=name, daemon=False)
        self._thread.start()

    def submit(self, step: StepInput) -> None:
        """Queue a step. Its output arrives at `on_output`, in the order submitted.

        RuntimeError if 16 are on their way already.
        """
        if not self._stopping:
            self._channel.submit(encode_step(step))

    def stop(self) -> None:
        """Ask the thread to end after the call it is in; nothing is delivered any more."""
        self._stopping = True
        self._channel.close()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._channel.fd)

    async def close(self) -> None:
        """Stop, wait until the runner is closed, and join the thread. Idempotent."""
        self.stop()
        if self._loop is asyncio.get_running_loop():
            await self._ended.wait()
            self._thread.join()  # it has posted its last message: this returns at once
        else:  # the loop that started it is gone: nobody would set the event
            await asyncio.to_thread(self._thread.join)

    # --- on the event loop ------------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            for message in self._channel.take():
                if self._stopping:  # the one before may have been the last straw
                    return
                self._on_output(decode_output(message))
        except Exception as exc:  # an answer is lost: whoever waits for it would for ever
            logger.exception("taking the outputs failed")
            self._die(f"taking the outputs failed: {_describe(exc)}")

    def _set_ended(self, reason: str) -> None:
        """The thread serves nobody any more. What it has answered before comes first."""
        if not self._stopping:
            self._deliver()
            self._die(f"the device thread has ended: {reason}")

    def _die(self, reason: str) -> None:
        if not self._stopping:
            self.stop()
            self._on_dead(EngineDeadError(f"the engine has stopped: {reason}"))

    def _set_loaded(self, info: RunnerInfo) -> None:
        if not self.loaded.done():
            self.loaded.set_result(info)

    def _set_load_error(self, error: StreamkvError) -> None:
        if not self.loaded.done():
            self.loaded.set_exception(error)

    # --- on the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        runner: Runner | None = None
        try:
            runner = self._build(self._report)
            info = runner.load(self._report)
            self.store, self.masks = runner.store, runner.masks
            self._post(self._set_loaded, info)
        except BaseException as exc:
            # Whatever it was: if it ended the thread unseen, clients would wait for ever.
            error = self._load_error(exc)
            # The frames' locals hold weights. NOTE: before the loop gets to see the exception;
            # raised there, it would collect frames that are not ours to clear.
            traceback.clear_frames(exc.__traceback__)
            self._post(self._set_load_error, error)
        else:
            self._post(self._set_ended, self._serve(runner))
        try:
            if runner is not None:
                runner.close()
        except BaseException:  # as above: whoever closes the engine waits for the end
            logger.exception("closing the runner failed")
        del runner
        self._post(self._ended.set)

    def _serve(self, runner: Runner) -> str:
        """Until the channel is closed, or whoever would close it is gone. Returns why it ended."""
        serve = (
            runner.serve
            if isinstance(runner, NativeRunner)
            else functools.partial(_serve_in_python, runner)
        )
        try:
            while not serve(self._channel, threads.EXIT_CHECK_S):
                if self._stopping or threads.is_abandoned(self._loop):
                    return "the program has ended, and nothing runs its event loop"
        except BaseException as exc:  # see _run
            logger.exception("the device thread has ended")
            traceback.clear_frames(exc.__traceback__)
            return _describe(exc)
        return "the runner has stopped serving"

    def _report(self, stage: str, fraction: float) -> None:
        if self._stopping:
            raise _Stopped
        self.progress = LoadProgress(stage, fraction)

    def _load_error(self, exc: BaseException) -> StreamkvError:
        if self._stopping:
            return EngineDeadError("the engine was closed while it was loading")
        if isinstance(exc, StreamkvError):
            return exc
        if isinstance(exc, MemoryError):
            return ModelLoadError(f"out of memory while {self.progress.stage}: {FREE_MEMORY}")
        logger.error("loading failed", exc_info=exc)
        error = ModelLoadError(f"loading failed while {self.progress.stage}: {_describe(exc)}")
        error.__cause__ = exc
        return error

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        """Wake the event loop once. If it has been closed, nobody is left to tell: stop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._stopping = True


def _serve_in_python(runner: Runner, channel: Channel, idle_timeout_s: float) -> bool:
    """NativeRunner.serve for any runner."""
    while (message := channel.receive(idle_timeout_s)) is not None:
        channel.reply(_answer(runner, decode_step(message)))
    return channel.closed


def _answer(runner: Runner, step: StepInput) -> bytes:
    try:
        return encode_output(runner.step(step))
    except BaseException as exc:  # see _run
        logger.exception("step %d failed", step.step_id)
        return encode_output(StepOutput(step.step_id, b"", error=_describe(exc)))


def _describe(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"
