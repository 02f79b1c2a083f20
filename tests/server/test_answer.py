"""An answer between its streams and its reader, without HTTP: numbers, order, faults, the log."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine.support import check_nothing_is_held, greedy, make_engine, make_runner, run, until

from streamkv.config import ServerConfig
from streamkv.engine.async_engine import AsyncEngine
from streamkv.engine.stream import TokenDelta, TokenStream
from streamkv.errors import (
    CapacityError,
    GoneError,
    InvalidRequestError,
    NotFoundError,
    StreamkvError,
)
from streamkv.protocol import FinishReason
from streamkv.server import answer as answers
from streamkv.server import deltas
from streamkv.server.answer import Answer, Event, OnDisconnect, Policy
from streamkv.server.answers import Answers
from streamkv.server.event_log import EVENT_OVERHEAD_BYTES, EventLog, LogBudget

KEPT = Policy(resumable=True, on_disconnect=OnDisconnect.CONTINUE, window_s=60.0)
END = Event("end", b"")


class Writer:
    """An event for each delta: prompt, choice and token ids."""

    def __init__(self, *, breaks_in: str = "", num_before_break: int = 2) -> None:
        self.calls: list[str] = []
        self._breaks_in = breaks_in
        self._num_left = num_before_break

    def begin(self, streams: Sequence[TokenStream]) -> Sequence[Event]:
        self._call("begin")
        return (Event("begin", b"%d" % len(streams)),)

    def push(self, prompt: int, delta: TokenDelta) -> Sequence[Event]:
        if "push" not in self.calls or self._breaks_in == "push":
            self._call("push")
        ids = b",".join(b"%d" % token_id for token_id in delta.token_ids)
        return (Event("", b"%d:%d:%b" % (prompt, delta.choice, ids)),)

    def end(self) -> Sequence[Event]:
        self._call("end")
        return (END,)

    def fail(self, error: BaseException) -> Sequence[Event]:
        self._call("fail")
        return (Event("fail", str(error).encode()),)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._breaks_in:
            self._num_left -= name == "push"
            if name != "push" or self._num_left <= 0:
                raise ZeroDivisionError(f"a writer that breaks in {name}")


class Reader:
    """An outlet that is open until it has got so many events."""

    def __init__(self, *, room: int = 1 << 30, breaks: bool = False) -> None:
        self.room = room
        self.got: list[tuple[int, Event]] = []
        self.num_ends = 0
        self.error: StreamkvError | None = None
        self._breaks = breaks

    @property
    def is_open(self) -> bool:
        return self.room > 0

    def write(self, number: int, event: Event) -> None:
        assert self.is_open and not self.num_ends
        if self._breaks and number == 3:
            raise ZeroDivisionError("an outlet that breaks")
        self.room -= 1
        self.got.append((number, event))

    def ended(self, error: StreamkvError | None = None) -> None:
        self.num_ends += 1
        self.error = error

    def tokens(self) -> dict[tuple[int, int], list[int]]:
        """By prompt and choice."""
        tokens: dict[tuple[int, int], list[int]] = {}
        for _, event in self.got:
            if not event.name:
                prompt, choice, ids = event.data.split(b":")
                found = tokens.setdefault((int(prompt), int(choice)), [])
                found += map(int, ids.split(b",")) if ids else ()
        return tokens


def budget(max_bytes: int = 1 << 20, max_total_bytes: int = 1 << 22) -> LogBudget:
    return LogBudget(max_bytes, max_total_bytes)


def make_answer(
    writer: Writer | None = None, policy: Policy = KEPT, logs: LogBudget | None = None
) -> Answer:
    return Answer("a-1", writer or Writer(), logs or budget(), policy=policy)


def sources(engine: AsyncEngine, num_prompts: int = 1, **params: Any) -> list[TokenStream]:
    return [
        engine.generate([5 + i, 6, 7], greedy(**{"max_tokens": 12} | params), request_id=f"r-{i}")
        for i in range(num_prompts)
    ]


def with_engine(test: Callable[[AsyncEngine], Any], **options: Any) -> None:
    """Run it, and look that nothing is held after it."""
    runner = make_runner(**{"num_blocks": 256, **options})

    async def main() -> None:
        async with make_engine(runner) as engine:
            await test(engine)
            await until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)
            check_nothing_is_held(engine, runner)

    run(main)


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("policy", [KEPT, Policy()])
def test_a_reader_gets_every_token_once_in_order_with_numbers_without_a_gap(
    num_prompts: int, n: int, policy: Policy
) -> None:
    async def test(engine: AsyncEngine) -> None:
        writer, reader = Writer(), Reader()
        answer = make_answer(writer, policy)
        answer.attach(reader)
        await answer.start(sources(engine, num_prompts, n=n))
        await answer.wait_ended()
        assert [number for number, _ in reader.got] == list(range(answer.num_events))
        assert reader.got[0][1] == Event("begin", b"%d" % num_prompts)
        assert reader.got[-1][1] == END
        assert writer.calls == ["begin", "push", "end"]
        assert reader.num_ends == 1
        alone = {}
        for prompt, source in enumerate(sources(engine, num_prompts, n=n)):
            for completion in await source.collect():
                alone[prompt, completion.choice] = list(completion.token_ids)
        assert reader.tokens() == alone

    with_engine(test)


@pytest.mark.parametrize("policy", [KEPT, Policy()])
def test_a_reader_that_opens_now_and_then_gets_the_same_tokens_in_fewer_events(
    policy: Policy,
) -> None:
    rng = random.Random(3)

    async def test(engine: AsyncEngine) -> None:
        reader = Reader(room=0)
        answer = make_answer(policy=policy)
        answer.attach(reader)
        await answer.start(sources(engine, 2, n=2, max_tokens=60))
        await until(lambda: engine.stats().generation_tokens_total >= 100)
        while not reader.num_ends:
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            reader.room = rng.randrange(3)
            answer.pump()
        alone = [
            list(completion.token_ids)
            for source in sources(engine, 2, n=2, max_tokens=60)
            for completion in await source.collect()
        ]
        assert [*dict(sorted(reader.tokens().items())).values()] == alone
        assert len(reader.got) <= 240 - 100 + 4 + 2, "deltas merge while the reader is closed"
        assert [number for number, _ in reader.got] == list(range(len(reader.got)))

    with_engine(test)


@pytest.mark.parametrize("part", ["begin", "push", "end", "fail"])
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_writer_that_breaks_ends_its_own_answer_only(
    part: str, num_prompts: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: AsyncEngine) -> None:
        other = engine.generate([9, 9, 9], greedy(max_tokens=40))
        async with other:
            reader = Reader()
            writer = Writer(breaks_in="push" if part == "fail" else part)
            if part == "fail":
                writer.fail = None  # type: ignore[assignment, method-assign]
            answer = make_answer(writer)
            answer.attach(reader)
            await answer.start(sources(engine, num_prompts, max_tokens=100))
            await answer.wait_ended()
            assert isinstance(answer.error, ZeroDivisionError)
            assert answer.is_ended and reader.num_ends == 1
            names = [event.name for _, event in reader.got]
            if part == "begin":
                assert names == [], "an error of the request, not an event"
            elif part == "fail":
                assert names[-1] != "fail"
            else:
                assert names[-1] == "fail" and "end" not in names
            assert len((await other.collect())[0].token_ids) == 40

    with_engine(test)
    assert any("a-1" in record.message for record in caplog.records)


@pytest.mark.parametrize("policy", [KEPT, Policy()])
def test_an_outlet_that_breaks_ends_its_answer_and_is_told(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: AsyncEngine) -> None:
        reader = Reader(breaks=True)
        answer = make_answer(policy=policy)
        answer.attach(reader)
        await answer.start(sources(engine, max_tokens=100))
        await answer.wait_ended()
        assert [number for number, _ in reader.got] == [0, 1, 2]
        assert reader.num_ends == 1 and not answer.has_reader
        await until(lambda: engine.stats().num_requests_running == 0)
        assert engine.stats().generation_tokens_total < 20

    with_engine(test)
    assert caplog.records


def test_a_source_that_is_refused_leaves_none_of_the_others_behind() -> None:
    async def test(engine: AsyncEngine) -> None:
        writer = Writer()
        answer = make_answer(writer)
        too_long = engine.generate([1, 2, 3], greedy(max_tokens=100), request_id="r-9")
        with pytest.raises(CapacityError):
            await answer.start([*sources(engine, 2), too_long])
        assert answer.is_ended and writer.calls == []
        assert engine.stats().num_requests_running == engine.stats().num_requests_waiting == 0

    with_engine(test, num_blocks=8)


def test_cancelling_before_the_admission_ends_it_at_once_like_any_other() -> None:
    async def test(engine: AsyncEngine) -> None:
        writer, reader = Writer(), Reader()
        answer = make_answer(writer)
        answer.attach(reader)
        answer.cancel()
        await answer.start(sources(engine, 3, max_tokens=100))
        await answer.wait_ended()
        assert writer.calls == ["begin", "push", "end"]
        assert engine.stats().generation_tokens_total <= 3

    with_engine(test)


def test_without_a_reader_the_rest_of_an_answer_is_one_delta_in_its_log() -> None:
    async def test(engine: AsyncEngine) -> None:
        first, second = Reader(), Reader()
        answer = make_answer()
        answer.attach(first)
        await answer.start(sources(engine, max_tokens=80))
        await until(lambda: len(first.got) > 5)
        answer.detach(first)
        num_before = answer.num_events
        await answer.wait_ended()
        assert answer.num_events == num_before + 2, "what was left in one, and the end"
        answer.attach(second, after=first.got[-1][0])
        assert first.num_ends == 0 and second.num_ends == 1
        (alone,) = await sources(engine, max_tokens=80)[0].collect()
        assert first.tokens()[0, 0] + second.tokens()[0, 0] == list(alone.token_ids)

    with_engine(test)


@pytest.mark.parametrize(
    ("num_chars", "num_tokens"), [(0, 0), (7, 2), (512, 512), (513, 9), (9, 513)]
)
def test_a_delta_is_its_pieces_joined_and_none_of_them_is_long(
    num_chars: int, num_tokens: int
) -> None:
    text = "".join(map(chr, range(1000, 1000 + num_chars)))
    delta = TokenDelta(2, text, tuple(range(num_tokens)), (), FinishReason.STOP, 5, -0.5)
    *pieces, last = deltas.cut(delta)
    assert len(pieces) == deltas.is_long(delta)
    assert "".join(piece.text for piece in (*pieces, last)) == text
    assert [i for piece in (*pieces, last) for i in piece.token_ids] == list(range(num_tokens))
    assert not any(map(deltas.is_long, (*pieces, last)))
    assert [piece.finish_reason for piece in pieces] == [None] * len(pieces)
    assert (last.choice, last.finish_reason, last.stop_reason) == (2, FinishReason.STOP, 5)
    assert last.cumulative_logprob == -0.5


@pytest.mark.parametrize("num_before", [20, 80])  # goes on with the next token, or when told to
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_what_merged_comes_to_the_writer_in_pieces_with_turns_of_the_loop_between(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int, num_before: int
) -> None:
    monkeypatch.setattr(deltas, "MAX_PIECE_LEN", 4)
    monkeypatch.setattr(answers, "LEN_PER_TAKE", 1)
    monkeypatch.setattr(answers, "TAKES_PER_TURN", 4)
    gate = threading.Semaphore(num_before + 4)
    turns: list[int] = []  # in which pieces were read

    class CountingWriter(Writer):
        def push(self, prompt: int, delta: TokenDelta) -> Sequence[Event]:
            assert not deltas.is_long(delta)
            turns.append(turn)
            return super().push(prompt, delta)

    turn = 0

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def test(engine: AsyncEngine) -> None:
        counting = asyncio.create_task(count())
        reader = Reader(room=1)
        answer = make_answer(CountingWriter())
        answer.attach(reader)
        await answer.start(sources(engine, num_prompts, max_tokens=80))
        await until(lambda: engine.stats().generation_tokens_total >= num_before * num_prompts)
        reader.room = 1 << 30
        if num_before == 80:
            answer.pump()
        gate.release(1000)
        await answer.wait_ended()
        counting.cancel()
        if num_before == 80:  # nothing else is read meanwhile
            assert len(turns) == len(set(turns)) > 20 * num_prompts
        for prompt, source in enumerate(sources(engine, num_prompts, max_tokens=80)):
            (alone,) = await source.collect()
            assert reader.tokens()[prompt, 0] == list(alone.token_ids)

    with_engine(test, gate=gate)


def test_an_answer_that_has_ended_holds_its_events_and_nothing_that_made_them() -> None:
    async def test(engine: AsyncEngine) -> None:
        writer, reader = Writer(), Reader()
        made_by = weakref.ref(writer)
        answer = make_answer(writer)
        answer.attach(reader)
        (source,) = sources(engine)
        stream = weakref.ref(source)
        await answer.start([source])
        await answer.wait_ended()
        await answer.wait_left()
        del writer, source
        gc.collect()
        assert made_by() is None and stream() is None
        again = Reader()
        answer.attach(again)
        assert again.got == reader.got and again.num_ends == 1

    with_engine(test)


def test_a_pause_is_of_the_answers_own_streams_whatever_their_ids() -> None:
    async def test(engine: AsyncEngine) -> None:
        reader = Reader(room=1)
        answer = make_answer(policy=KEPT._replace(on_disconnect=OnDisconnect.PAUSE))
        answer.attach(reader)
        await answer.start(sources(engine))
        await until(lambda: answer.streams[0].finish_s is not None)
        (other,) = sources(engine)  # the id is free again
        async with other:
            answer.detach(reader)
            (whole,) = await other.collect()
        assert len(whole.token_ids) == 12

    with_engine(test)


@pytest.mark.parametrize("has_reader", [True, False])
def test_one_that_is_forgotten_while_it_runs_gives_its_log_back_when_it_has_been_read(
    has_reader: bool,
) -> None:
    async def test(engine: AsyncEngine) -> None:
        logs, reader = budget(), Reader(room=3)
        answer = make_answer(logs=logs)
        if has_reader:
            answer.attach(reader)
        await answer.start(sources(engine))
        answer.forget()
        if has_reader:
            await until(lambda: not reader.room and answer.streams[0].finish_s is not None)
            reader.room = 1 << 30
            answer.pump()
        await answer.wait_ended()
        assert logs.num_bytes == 0
        assert [number for number, _ in reader.got] == list(
            range(answer.num_events if has_reader else 0)
        )

    with_engine(test)


def test_a_second_reader_takes_over_and_the_first_one_is_told() -> None:
    async def test(engine: AsyncEngine) -> None:
        first, second = Reader(), Reader()
        answer = make_answer()
        answer.attach(first)
        await answer.start(sources(engine, max_tokens=80))
        await until(lambda: len(first.got) > 5)
        answer.attach(second)
        assert first.num_ends == 1 and first.error is not None
        assert first.error.code == "taken_over"
        num_first = len(first.got)
        answer.detach(first)  # too late to matter
        await answer.wait_ended()
        assert len(first.got) == num_first
        assert [number for number, _ in second.got] == list(range(answer.num_events))
        assert second.got[:num_first] == first.got
        assert second.error is None, "it has all of it"

    with_engine(test)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_an_answer_ends_when_the_reader_is_gone_that_was_too_slow_for_its_last_tokens(
    num_prompts: int,
) -> None:
    async def test(engine: AsyncEngine) -> None:
        slow, second = Reader(room=3), Reader()
        answer = make_answer()
        answer.attach(slow)
        await answer.start(sources(engine, num_prompts))
        await until(lambda: all(stream.finish_s is not None for stream in answer.streams))
        assert not answer.is_ended
        answer.detach(slow)
        await answer.wait_ended()
        assert not answer.is_cancelled
        answer.attach(second)
        assert sum(map(len, second.tokens().values())) == 12 * num_prompts

    with_engine(test)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_an_answer_has_ended_as_soon_as_its_writer_has_had_the_last_token(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int
) -> None:
    monkeypatch.setattr(answers, "TAKES_PER_TURN", 1)
    have_ended: list[bool] = []

    class TerminalWriter(Writer):
        num_unfinished = num_prompts

        def push(self, prompt: int, delta: TokenDelta) -> Sequence[Event]:
            self.num_unfinished -= delta.finish_reason is not None
            if not self.num_unfinished:  # what comes next on the loop, as a client's message may
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: have_ended.append(answer.is_ended))
            return super().push(prompt, delta)

    answer = make_answer(TerminalWriter())

    async def test(engine: AsyncEngine) -> None:
        reader = Reader(room=1)
        answer.attach(reader)
        await answer.start(sources(engine, num_prompts))
        await until(lambda: all(stream.finish_s is not None for stream in answer.streams))
        reader.room = 1 << 30
        answer.pump()
        await answer.wait_ended()
        await until(lambda: bool(have_ended))
        assert have_ended == [True]

    with_engine(test)


def test_room_is_made_of_logs_that_nobody_reads() -> None:
    async def test(engine: AsyncEngine) -> None:
        registry = Answers(ServerConfig(resume_memory_bytes=64 << 10))
        read, left = (
            Answer(name, Writer(), registry.budget, policy=KEPT) for name in ("read", "left")
        )
        for answer in (read, left):
            registry.add(answer)
            await answer.start(sources(engine))
            await answer.wait_ended()
        slow = Reader(room=1)
        read.attach(slow)
        log = EventLog(registry.budget)
        log.append(Event("", bytes(64 << 10)), keep_from=0)
        assert read.log and not left.log and registry.num_kept == 1
        slow.room = 1 << 30
        read.pump()
        assert [number for number, _ in slow.got] == list(range(read.num_events))
        log.append(Event("", b""), keep_from=0)
        assert not read.log and registry.num_kept == 0

    with_engine(test)


@pytest.mark.parametrize("window_s", [0.0, 60.0])
def test_without_a_window_nothing_of_an_answer_is_kept(window_s: float) -> None:
    async def test(engine: AsyncEngine) -> None:
        registry = Answers(ServerConfig(resume_window=window_s))
        answer = Answer("a-1", Writer(), registry.budget, policy=KEPT)
        registry.add(answer)
        await answer.start(sources(engine))
        await answer.wait_ended()
        assert bool(registry.budget.num_bytes) == bool(window_s)
        await registry.close()
        assert registry.budget.num_bytes == 0

    with_engine(test)


def test_only_events_that_are_kept_can_be_asked_for() -> None:
    async def test(engine: AsyncEngine) -> None:
        # Room for four events of a delta.
        small = budget(max_bytes=4 * (EVENT_OVERHEAD_BYTES + 10))
        answer = make_answer(logs=small)
        reader = Reader()
        answer.attach(reader)
        await answer.start(sources(engine, max_tokens=30))
        await answer.wait_ended()
        last = answer.num_events - 1
        with pytest.raises(GoneError) as gone:
            answer.attach(Reader(), after=2)
        assert gone.value.code == "events_dropped"
        with pytest.raises(InvalidRequestError) as refused:
            answer.attach(Reader(), after=last + 1)
        assert refused.value.param == "after"
        again = Reader()
        answer.attach(again, after=last - 2)
        assert again.got == reader.got[-2:]
        plain = make_answer(policy=Policy())
        plain.attach(Reader())
        await plain.start(sources(engine, max_tokens=3))
        with pytest.raises(NotFoundError) as missing:
            plain.attach(Reader())
        assert missing.value.code == "not_resumable"
        await plain.wait_ended()

    with_engine(test)


def test_a_log_keeps_what_its_reader_has_not_got_even_beyond_its_size() -> None:
    async def test(engine: AsyncEngine) -> None:
        answer = make_answer(logs=budget(max_bytes=1))
        reader = Reader(room=1)
        answer.attach(reader)
        await answer.start(sources(engine, 2, n=3, max_tokens=20))
        await until(lambda: engine.stats().num_requests_running == 0)
        while not reader.num_ends:
            reader.room = 1
            answer.pump()
            await asyncio.sleep(0)
        assert [number for number, _ in reader.got] == list(range(answer.num_events))

    with_engine(test)


def test_logs_together_stay_within_their_budget() -> None:
    rng = random.Random(1)
    freed: list[EventLog] = []

    def make_room() -> None:
        while ended and logs.is_exceeded:
            freed.append(ended.pop(0))
            freed[-1].clear()

    logs = LogBudget(4000, 20_000, make_room)
    ended = [EventLog(logs) for _ in range(3)]
    running = [EventLog(logs) for _ in range(8)]
    for log in ended:
        for i in range(10):
            log.append(Event("", bytes(100)), keep_from=i + 1)
    sizes: dict[EventLog, list[int]] = {log: [] for log in running}
    for _ in range(2000):
        log = rng.choice(running)
        size = rng.randrange(400)
        sizes[log].append(size)
        log.append(Event("", bytes(size)), keep_from=len(sizes[log]))
        assert logs.num_bytes <= 20_000
        assert log.num_bytes <= 4000
        assert [len(log[i].data) for i in range(log.first, log.first + len(log))] == sizes[log][
            log.first :
        ]
    assert len(freed) == 3, "those that have ended go first"
    for log in running:
        log.clear()
    assert logs.num_bytes == 0


def test_a_paused_answer_holds_no_block_and_goes_on_where_it_was() -> None:
    gate = threading.Semaphore(6)

    async def test(engine: AsyncEngine) -> None:
        first, second = Reader(), Reader()
        answer = make_answer(policy=KEPT._replace(on_disconnect=OnDisconnect.PAUSE))
        answer.attach(first)
        await answer.start(sources(engine, max_tokens=60))
        await until(lambda: len(first.got) > 3)
        answer.detach(first)
        gate.release(1000)
        await until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)
        num_tokens = engine.stats().generation_tokens_total
        await engine.generate([9, 9], greedy(max_tokens=30)).collect()
        assert engine.stats().generation_tokens_total == num_tokens + 30
        answer.attach(second, after=first.got[-1][0])
        await answer.wait_ended()
        (alone,) = await sources(engine, max_tokens=60)[0].collect()
        assert first.tokens()[0, 0] + second.tokens()[0, 0] == list(alone.token_ids)

    with_engine(test, gate=gate)


@pytest.mark.parametrize("on_disconnect", [OnDisconnect.CONTINUE, OnDisconnect.PAUSE])
def test_after_the_window_an_answer_without_a_reader_is_cancelled(
    on_disconnect: OnDisconnect,
) -> None:
    gate = threading.Semaphore(6)

    async def test(engine: AsyncEngine) -> None:
        answer = make_answer(policy=Policy(True, on_disconnect, 0.02))
        reader = Reader()
        answer.attach(reader)
        await answer.start(sources(engine, max_tokens=60))
        await until(lambda: len(reader.got) > 3)
        answer.detach(reader)
        await answer.wait_ended()
        assert answer.is_cancelled
        assert engine.stats().request_success_total["abort"] == 1
        gate.release(2)

    with_engine(test, gate=gate)
