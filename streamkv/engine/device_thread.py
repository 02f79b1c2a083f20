"""The thread that owns the runner: it loads it, steps it in order, and closes it.

Owns the runner (built, used and dropped on this thread alone), the queue of steps going in and the
outputs coming back. It must not know requests, the scheduler or text. The event loop sees four
things (`loaded`, `submit`, `on_output`, `close`), so another transport can take its place.

Invariant: no exception leaves the thread. What fails while loading is set on `loaded`, what fails
in a step is its StepOutput's `error`; every step submitted before the close began is answered in
order, with one wake-up of the event loop each.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import EngineDeadError, ModelLoadError, StreamkvError
from ..protocol import Runner, RunnerInfo, StepInput, StepOutput

logger = logging.getLogger(__name__)

# How often an idle thread looks whether the interpreter is going down. A program that forgets to
# close its engine then still ends, while daemon threads would be killed inside native code.
_EXIT_CHECK_S = 2.0


class LoadProgress(NamedTuple):
    """How far loading has come: a stage in words, and its fraction done (0..1)."""

    stage: str
    fraction: float

    def __str__(self) -> str:
        return f"{self.stage} {self.fraction * 100:.0f} %"


class _Stopped(Exception):
    """Raised out of the progress callback to leave a load that nobody waits for any more."""


class DeviceThread:
    """Runs a Runner away from the event loop. Public methods belong to the loop's thread."""

    def __init__(
        self,
        build: Callable[[Callable[[str, float], None]], Runner],
        on_output: Callable[[StepOutput], None],
        *,
        name: str,
    ) -> None:
        """`build(progress)` makes the runner, on the thread. Needs a running event loop."""
        self.progress = LoadProgress("starting", 0.0)  # replaced as a whole, so any thread may read
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[RunnerInfo] = self._loop.create_future()
        self._build = build
        self._on_output = on_output
        self._steps: queue.SimpleQueue[StepInput | None] = queue.SimpleQueue()
        self._outputs: deque[StepOutput] = deque()
        self._stopping = False
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._thread.start()

    def submit(self, step: StepInput) -> None:
        """Queue a step. Its output arrives at `on_output`, in the order submitted."""
        self._steps.put(step)

    def stop(self) -> None:
        """Ask the thread to end after the call it is in; nothing is delivered any more."""
        if not self._stopping:
            self._stopping = True
            self._steps.put(None)

    async def close(self) -> None:
        """Stop, wait until the runner is closed, and join the thread. Idempotent."""
        self.stop()
        if self._loop is asyncio.get_running_loop():
            await self._ended.wait()
            self._thread.join()  # it has posted its last message: this returns at once
        else:  # the loop that started it is gone: nobody would set the event
            await asyncio.to_thread(self._thread.join)

    # --- on the event loop, called by the thread -------------------------------------------

    def _deliver(self) -> None:
        while self._outputs and not self._stopping:
            self._on_output(self._outputs.popleft())

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
            self._post(self._set_loaded, info)
            self._step_until_stopped(runner)
        except BaseException as exc:
            # Whatever it was: if it ended the thread unseen, clients would wait for ever.
            error = self._load_error(exc)
            # The frames' locals hold weights. NOTE: before the loop gets to see the exception;
            # raised there, it would collect frames that are not ours to clear.
            traceback.clear_frames(exc.__traceback__)
            self._post(self._set_load_error, error)
        try:
            if runner is not None:
                runner.close()
        except Exception:
            logger.exception("closing the runner failed")
        del runner
        self._post(self._ended.set)

    def _step_until_stopped(self, runner: Runner) -> None:
        while not self._stopping:
            try:
                step = self._steps.get(timeout=_EXIT_CHECK_S)
            except queue.Empty:
                if not threading.main_thread().is_alive():
                    return
                continue
            if step is None or self._stopping:
                return
            self._outputs.append(_run_step(runner, step))
            self._post(self._deliver)

    def _report(self, stage: str, fraction: float) -> None:
        if self._stopping:
            raise _Stopped
        self.progress = LoadProgress(stage, fraction)

    def _load_error(self, exc: BaseException) -> StreamkvError:
        if self._stopping:
            return EngineDeadError("the engine was closed while it was loading")
        if isinstance(exc, StreamkvError):
            return exc
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


def _run_step(runner: Runner, step: StepInput) -> StepOutput:
    try:
        return runner.step(step)
    except BaseException as exc:  # see _run
        logger.exception("step %d failed", step.step_id)
        return StepOutput(step.step_id, b"", error=_describe(exc))


def _describe(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"
