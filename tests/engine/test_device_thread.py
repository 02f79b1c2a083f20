"""The device thread alone: order, wake-ups, exceptions, and its end in every state."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest
import uvloop
from engine.support import CountingLoop, run, until

from streamkv._cpu import Channel, KvCache, Team
from streamkv._cpu import Runner as StepRunner
from streamkv.engine import threads as engine_threads
from streamkv.engine.device_thread import DeviceThread
from streamkv.errors import EngineDeadError, ModelLoadError
from streamkv.protocol import RunnerInfo, StepInput, StepOutput
from streamkv.step_bytes import decode_step, encode_output

INFO = RunnerInfo(
    device="cpu",
    dtype="float32",
    formats="",
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

    store = None
    masks = None

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


class NativeEchoRunner(EchoRunner):
    """The same without a model, from the extension: it answers in native code."""

    def __init__(self) -> None:
        super().__init__()
        cache = KvCache("float32", 1, 1, 1, 1, 16)
        self._runner = StepRunner(
            None, Team(1), cache, 0, num_rows=1, max_model_len=1, vocab_size=1, max_tokens=1
        )

    def serve(self, channel: Channel, idle_timeout_s: float) -> bool:
        self.threads.add(threading.get_ident())
        return self._runner.serve(channel, idle_timeout_s)


LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
RUNNERS = pytest.mark.parametrize("make_runner", [EchoRunner, NativeEchoRunner])


def ignore(error: EngineDeadError) -> None:
    """Nobody to tell."""


def step(step_id: int) -> StepInput:
    return StepInput(step_id, b"", (), b"", b"")


@RUNNERS
def test_steps_are_answered_in_order_with_one_wake_up_each_on_one_other_thread(make_runner):
    runner = make_runner()

    async def main() -> None:
        outputs: list[int] = []
        device = DeviceThread(
            lambda progress: runner,
            lambda output: outputs.append(output.step_id),
            ignore,
            name="device",
        )
        assert await device.loaded == INFO
        assert str(device.progress) == "loading weights 25 %"
        loop = asyncio.get_running_loop()
        for step_id in range(50):
            device.submit(step(step_id))
            await until(lambda: len(outputs) > step_id)  # noqa: B023 - awaited at once
        assert loop.num_wakeups == 50
        for step_id in range(50, 60):
            device.submit(step(step_id))
        await until(lambda: len(outputs) == 60)
        assert outputs == list(range(60))
        assert loop.num_wakeups <= 60
        await device.close()
        assert runner.closed
        assert len(runner.threads) == 1
        assert threading.get_ident() not in runner.threads

    run(main, loop_factory=CountingLoop)


def test_more_steps_than_any_engine_sends_are_refused():
    runner = EchoRunner()
    runner.gate.clear()

    async def main() -> None:
        outputs: list[StepOutput] = []
        device = DeviceThread(lambda progress: runner, outputs.append, ignore, name="device")
        with pytest.raises(RuntimeError, match="at most 16 steps without an answer"):
            for step_id in range(17):
                device.submit(step(step_id))
        runner.gate.set()
        await until(lambda: len(outputs) == 16)
        device.submit(step(17))
        await until(lambda: len(outputs) == 17)
        await device.close()

    run(main)


@LOOPS
@RUNNERS
def test_every_event_loop_and_runner_will_do(loop_factory, make_runner):
    async def main() -> None:
        outputs: list[StepOutput] = []
        device = DeviceThread(lambda progress: make_runner(), outputs.append, ignore, name="device")
        await device.loaded
        for step_id in range(20):
            device.submit(step(2 * step_id))
            device.submit(step(2 * step_id + 1))
            await until(lambda: len(outputs) == 2 * step_id + 2)  # noqa: B023 - awaited at once
        assert [output.step_id for output in outputs] == list(range(40))
        assert {output.error for output in outputs} == {""}
        device.stop()
        device.submit(step(40))
        await device.close()
        assert len(outputs) == 40

    run(main, loop_factory=loop_factory)


def test_an_exception_in_a_step_becomes_its_error_and_the_thread_goes_on():
    runner = EchoRunner()

    async def main() -> None:
        outputs: list[StepOutput] = []
        device = DeviceThread(lambda progress: runner, outputs.append, ignore, name="device")
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

        device = DeviceThread(build, lambda output: None, ignore, name="device")
        with pytest.raises(ModelLoadError, match="importing the runner: ImportError: no torch"):
            await device.loaded
        await device.close()

        runner = EchoRunner()
        device = DeviceThread(lambda progress: runner, lambda output: None, ignore, name="device")
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
        device = DeviceThread(lambda progress: runner, lambda output: None, ignore, name="device")
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
        device = DeviceThread(lambda progress: runner, outputs.append, ignore, name="device")
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


@LOOPS
@RUNNERS
def test_a_thread_whose_event_loop_is_gone_can_be_closed_from_another(loop_factory, make_runner):
    runner = make_runner()
    kept: list[DeviceThread] = []

    async def forget_to_close() -> None:
        device = DeviceThread(lambda progress: runner, lambda output: None, ignore, name="device")
        await device.loaded
        device.submit(step(0))
        kept.append(device)

    async def close() -> None:
        await kept[0].close()
        assert runner.closed

    run(forget_to_close, loop_factory=loop_factory)
    run(close, loop_factory=loop_factory)


@LOOPS
@RUNNERS
def test_a_thread_whose_event_loop_is_gone_ends_by_itself(monkeypatch, loop_factory, make_runner):
    monkeypatch.setattr(engine_threads, "EXIT_CHECK_S", 0.01)
    runner = make_runner()
    threads: list[threading.Thread] = []

    async def forget_to_close() -> weakref.ref[DeviceThread]:
        device = DeviceThread(lambda progress: runner, lambda output: None, ignore, name="device")
        await device.loaded
        threads.extend(one for one in threading.enumerate() if one.name == "device")
        return weakref.ref(device)

    forgotten = run(forget_to_close, loop_factory=loop_factory)
    threads[0].join(20)
    assert not threads[0].is_alive()
    assert runner.closed
    assert forgotten() is None


class MortalRunner(EchoRunner):
    """Answers one step, then ends as it was told to."""

    def __init__(self, end: BaseException | None) -> None:
        super().__init__()
        self.end = end

    def serve(self, channel: Channel, idle_timeout_s: float) -> bool:
        while (message := channel.receive(20)) is None:
            pass
        channel.reply(encode_output(StepOutput(decode_step(message).step_id, b"")))
        if self.end is not None:
            raise self.end
        return True


@LOOPS
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (MemoryError("no more"), "MemoryError: no more"),
        (SystemExit("out of here"), "SystemExit: out of here"),
        (None, "has stopped serving"),
    ],
)
def test_a_thread_that_ends_unasked_says_why_after_its_last_answer(loop_factory, end, reason):
    runner = MortalRunner(end)

    async def main() -> None:
        events: list[StepOutput | EngineDeadError] = []
        device = DeviceThread(lambda progress: runner, events.append, events.append, name="device")
        await device.loaded
        device.submit(step(0))
        device.submit(step(1))
        await until(lambda: len(events) == 2)
        assert events[0] == StepOutput(0, b"")
        assert isinstance(events[1], EngineDeadError)
        assert reason in str(events[1])
        await until(lambda: runner.closed)
        device.submit(step(2))  # nothing happens any more
        await device.close()
        assert len(events) == 2

    run(main, loop_factory=loop_factory)


@pytest.mark.parametrize("broken", ["output", "reader"])
def test_an_answer_that_can_not_be_taken_is_the_end(broken):
    class BrokenRunner(EchoRunner):
        def serve(self, channel: Channel, idle_timeout_s: float) -> bool:
            if channel.receive(idle_timeout_s) is not None:
                channel.reply(b"nonsense")
            return channel.closed

    def read_output(output: StepOutput) -> None:
        raise LookupError("nonsense")

    runner = BrokenRunner() if broken == "output" else EchoRunner()

    async def main() -> None:
        errors: list[EngineDeadError] = []
        device = DeviceThread(lambda progress: runner, read_output, errors.append, name="device")
        await device.loaded
        device.submit(step(0))
        await until(lambda: len(errors) == 1)
        assert "taking the outputs failed" in str(errors[0])
        await until(lambda: runner.closed)
        await device.close()
        assert len(errors) == 1

    run(main)


def test_closing_does_not_wait_for_ever_whatever_closing_the_runner_raises():
    runner = EchoRunner()

    async def main() -> None:
        device = DeviceThread(lambda progress: runner, lambda output: None, ignore, name="device")
        await device.loaded
        runner.crash = SystemExit("in close")
        await device.close()
        assert runner.closed

    run(main)
