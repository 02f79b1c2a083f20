"""The device thread alone: order, wake-ups, exceptions, and its end in every state."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engine.support import run, until

from streamkv.engine.device_thread import DeviceThread
from streamkv.errors import EngineDeadError, ModelLoadError
from streamkv.protocol import RunnerInfo, StepInput, StepOutput

INFO = RunnerInfo(
    device="cpu",
    dtype="float32",
    max_model_len=1,
    vocab_size=1,
    block_size=1,
    num_blocks=1,
    kv_bytes_per_token=1,
    weight_bytes=0,
    ops="",
)


class EchoRunner:
    """Answers each step with its id; says on which threads it was called."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.crash: BaseException | None = None
        self.closed = False

    def load(self, progress) -> RunnerInfo:
        self.entered.set()
        self.gate.wait(20)
        progress("loading weights", 0.25)
        self.threads.add(threading.get_ident())
        return INFO

    def step(self, step: StepInput) -> StepOutput:
        self.entered.set()
        self.gate.wait(20)
        self.threads.add(threading.get_ident())
        if self.crash is not None:
            raise self.crash
        return StepOutput(step.step_id, b"")

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed = True
        if self.crash is not None:
            raise self.crash


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the wake-ups that come from other threads."""

    num_wakeups = 0

    def call_soon_threadsafe(self, callback, *args, context=None):
        self.num_wakeups += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


def step(step_id: int) -> StepInput:
    return StepInput(step_id, b"", (), b"", b"")


def test_steps_are_answered_in_order_with_one_wake_up_each_on_one_other_thread():
    runner = EchoRunner()

    async def main() -> None:
        outputs: list[int] = []
        device = DeviceThread(
            lambda progress: runner, lambda output: outputs.append(output.step_id), name="device"
        )
        assert await device.loaded == INFO
        assert str(device.progress) == "loading weights 25 %"
        loop = asyncio.get_running_loop()
        before = loop.num_wakeups
        for step_id in range(100):
            device.submit(step(step_id))
        await until(lambda: len(outputs) == 100)
        assert outputs == list(range(100))
        assert loop.num_wakeups - before == 100
        await device.close()
        assert runner.closed
        assert len(runner.threads) == 1
        assert threading.get_ident() not in runner.threads

    run(main, loop_factory=CountingLoop)


def test_an_exception_in_a_step_becomes_its_error_and_the_thread_goes_on():
    runner = EchoRunner()

    async def main() -> None:
        outputs: list[StepOutput] = []
        device = DeviceThread(lambda progress: runner, outputs.append, name="device")
        await device.loaded
        runner.crash = SystemExit("out of here")
        device.submit(step(0))
        await until(lambda: len(outputs) == 1)
        assert outputs[0].error == "SystemExit: out of here"
        runner.crash = None
        device.submit(step(1))
        await until(lambda: len(outputs) == 2)
        assert outputs[1] == StepOutput(1, b"")
        await device.close()

    run(main)


def test_a_runner_that_can_not_be_built_or_closed_is_no_reason_to_hang():
    async def main() -> None:
        def build(progress):
            progress("importing the runner", 0.0)
            raise ImportError("no torch")

        device = DeviceThread(build, lambda output: None, name="device")
        with pytest.raises(ModelLoadError, match="importing the runner: ImportError: no torch"):
            await device.loaded
        await device.close()

        runner = EchoRunner()
        device = DeviceThread(lambda progress: runner, lambda output: None, name="device")
        await device.loaded
        runner.crash = OSError("can't close")
        await device.close()
        await device.close()
        assert runner.closed

    run(main)


def test_closing_while_loading_ends_the_load_at_its_next_sign_of_progress():
    runner = EchoRunner()
    runner.gate.clear()

    async def main() -> None:
        device = DeviceThread(lambda progress: runner, lambda output: None, name="device")
        await until(runner.entered.is_set)
        closing = asyncio.create_task(device.close())
        await asyncio.sleep(0)
        runner.gate.set()
        await closing
        assert runner.closed
        with pytest.raises(EngineDeadError, match="while it was loading"):
            await device.loaded

    run(main)


def test_closing_during_a_step_drops_it_and_those_behind_it():
    runner = EchoRunner()

    async def main() -> None:
        outputs: list[StepOutput] = []
        device = DeviceThread(lambda progress: runner, outputs.append, name="device")
        await device.loaded
        runner.entered.clear()
        runner.gate.clear()
        device.submit(step(0))
        device.submit(step(1))
        await until(runner.entered.is_set)
        device.stop()
        runner.gate.set()
        await device.close()
        assert outputs == []
        assert runner.closed

    run(main)


def test_a_thread_whose_event_loop_is_gone_ends_and_can_be_closed_from_another():
    runner = EchoRunner()
    kept: list[DeviceThread] = []

    async def forget_to_close() -> None:
        device = DeviceThread(lambda progress: runner, lambda output: None, name="device")
        await device.loaded
        kept.append(device)

    async def close() -> None:
        await kept[0].close()
        assert runner.closed

    run(forget_to_close)
    run(close)
