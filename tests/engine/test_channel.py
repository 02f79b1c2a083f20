"""The channel alone: order, bounds, waking and closing, from one thread and from two."""

from __future__ import annotations

import select
import sys
import threading
import time

import pytest

from streamkv._cpu import Channel, KvCache, Runner, Team
from streamkv.protocol import StepInput, StepOutput
from streamkv.step_bytes import decode_output, encode_step

NUM_MESSAGES = 16  # at most, on their way
LONG_S = 20.0


def is_readable(channel: Channel, timeout_s: float = 0.0) -> bool:
    readable, _, _ = select.select([channel.fd], [], [], timeout_s)
    return bool(readable)


def test_messages_pass_both_ways_in_order_and_ring_once_for_all_that_wait():
    channel = Channel()
    messages = [bytes([i]) * (i * 100) for i in range(NUM_MESSAGES)]
    for _ in range(3):  # around the rings
        for message in messages:
            channel.submit(message)
        for message in messages:
            assert channel.receive(0.0) == message
        assert channel.receive(0.0) is None
        assert not is_readable(channel)
        assert channel.take() == []
        for message in messages:
            channel.reply(message[::-1] + b"!")
        assert is_readable(channel)
        assert channel.take() == [message + b"!" for message in messages]
        assert not is_readable(channel)


def test_only_so_many_may_be_on_their_way_and_only_what_was_asked_is_answered():
    channel = Channel()
    with pytest.raises(RuntimeError, match="expected a step before its answer"):
        channel.reply(b"")
    for _ in range(NUM_MESSAGES):
        channel.submit(b"step")
    with pytest.raises(RuntimeError, match="at most 16 steps without an answer"):
        channel.submit(b"step")
    channel.receive(0.0)
    channel.reply(b"result")
    with pytest.raises(RuntimeError, match="at most 16"):  # not taken yet
        channel.submit(b"step")
    assert channel.take() == [b"result"]
    channel.submit(b"step")


def test_what_was_submitted_before_the_close_is_dropped():
    channel = Channel()
    channel.submit(b"step")
    assert not channel.closed
    channel.close()
    channel.close()
    assert channel.closed
    assert channel.receive(LONG_S) is None
    with pytest.raises(RuntimeError, match="closed"):
        channel.submit(b"step")


def test_a_thread_that_waits_is_woken_by_a_step_and_by_the_close():
    channel = Channel()
    received: list[bytes | None] = []

    def serve() -> None:
        while (message := channel.receive(LONG_S)) is not None:
            received.append(message)
            channel.reply(message)
        received.append(None)

    started = time.monotonic()
    thread = threading.Thread(target=serve)
    thread.start()
    for i in range(5):
        channel.submit(bytes([i]))
        assert is_readable(channel, LONG_S)
        assert channel.take() == [bytes([i])]
    channel.close()
    thread.join(LONG_S)
    assert received == [b"\0", b"\1", b"\2", b"\3", b"\4", None]
    assert time.monotonic() - started < LONG_S / 2


def test_receiving_gives_up_after_the_timeout_and_not_before():
    channel = Channel()
    started = time.monotonic()
    assert channel.receive(0.05) is None
    assert 0.05 <= time.monotonic() - started < LONG_S
    assert not channel.closed


def test_no_message_is_lost_or_changed_and_no_ring_forgotten_between_two_threads():
    """Whoever waits waits for one event only: a lost one would be a hang."""
    channel = Channel()
    num_messages = 20_000

    def serve() -> None:
        while (message := channel.receive(LONG_S)) is not None:
            channel.reply(message)

    thread = threading.Thread(target=serve)
    thread.start()
    num_sent = num_taken = num_rings = 0
    try:
        while num_taken < num_messages:
            # From one on its way to all that may be.
            while num_sent < min(num_messages, num_taken + 1 + num_sent % NUM_MESSAGES):
                channel.submit(b"%d" % num_sent)
                num_sent += 1
            assert is_readable(channel, LONG_S), f"{num_sent} sent, {num_taken} taken"
            num_rings += 1
            for result in channel.take():
                assert result == b"%d" % num_taken
                num_taken += 1
    finally:
        channel.close()
        thread.join(LONG_S)
    assert num_rings <= num_messages + 1


def small_runner() -> Runner:
    cache = KvCache("float32", 1, 1, 1, 1, 16)
    return Runner(None, Team(1), cache, 0, num_rows=1, max_model_len=1, vocab_size=1, max_tokens=1)


def test_the_native_runner_answers_while_the_interpreter_is_held():
    """Nobody else gets the interpreter for as long as this thread asks for the result."""
    channel, runner = Channel(), small_runner()
    ends: list[bool] = []
    thread = threading.Thread(target=lambda: ends.append(runner.serve(channel, LONG_S)))
    thread.start()
    channel.submit(encode_step(StepInput(0, b"", (), b"", b"")))
    assert is_readable(channel, LONG_S)  # it is in native code now
    channel.take()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        for step_id in range(1, 4):
            channel.submit(encode_step(StepInput(step_id, b"", (), b"", b"")))
            deadline_s = time.monotonic() + LONG_S
            while not (results := channel.take()) and time.monotonic() < deadline_s:
                pass
            (output,) = map(decode_output, results)
            assert output == StepOutput(step_id, b"", duration_s=output.duration_s)
    finally:
        sys.setswitchinterval(interval_s)
    channel.close()
    thread.join(LONG_S)
    assert ends == [True]


def test_the_native_runner_comes_back_when_nothing_is_to_be_done():
    channel, runner = Channel(), small_runner()
    assert runner.serve(channel, 0.01) is False
    channel.submit(encode_step(StepInput(5, b"", (), b"", b"")))
    assert runner.serve(channel, 0.01) is False
    (output,) = map(decode_output, channel.take())
    assert output.step_id == 5
    channel.close()
    assert runner.serve(channel, LONG_S) is True
