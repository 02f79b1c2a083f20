"""What is compiled, for whom, and how much room it takes: with gates in place of time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from engine.bound import CHOICE, PROMPT, bound, check_all_is_given_back, make_bound_runner
from engine.support import make_engine, run, until

from streamkv.engine import grammars as grammars_module
from streamkv.engine.async_engine import AsyncEngine
from streamkv.engine.batch import Answer, Job, check_batch, run_batch
from streamkv.engine.llm_prompts import Prompt
from streamkv.errors import EngineDeadError, InvalidRequestError, OverloadedError
from streamkv.sampling import StructuredOutputs
from streamkv.text import grammar as grammar_module
from streamkv.text import grammar_process
from streamkv.text.grammar import GrammarCompiler


class Gates:
    """In place of how a compiler tries a grammar: which were begun, and each waits for its gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[str, StructuredOutputs]] = []
        self.easy, self.hard = threading.Semaphore(0), threading.Semaphore(0)
        self.is_hard = False  # what is tried next
        compile_now = GrammarCompiler.compile

        def compile_if_easy(compiler: GrammarCompiler, structured: StructuredOutputs) -> Any:
            self.begun.append(("easy", structured))
            is_hard = self.is_hard
            assert self.easy.acquire(timeout=20)
            return None if is_hard else compile_now(compiler, structured)

        def compile_it(compiler: GrammarCompiler, structured: StructuredOutputs) -> Any:
            self.begun.append(("hard", structured))
            assert self.hard.acquire(timeout=20)
            return compile_now(compiler, structured)

        monkeypatch.setattr(GrammarCompiler, "compile_if_easy", compile_if_easy)
        monkeypatch.setattr(GrammarCompiler, "compile", compile_it)


def word(number: int) -> StructuredOutputs:
    return StructuredOutputs(choice=[f"the word {number}"])


async def answer_of(engine: AsyncEngine, structured: StructuredOutputs, **params: Any) -> str:
    (answer,) = await engine.generate(PROMPT, bound(structured, **params)).collect()
    return answer.text


async def leave(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_what_nobody_waits_for_any_more_is_not_begun_and_counts_until_its_turn(monkeypatch):
    monkeypatch.setattr(grammars_module, "MAX_COMPILING", 4)
    runner, gates = make_bound_runner(), Gates(monkeypatch)

    async def main() -> None:
        async with make_engine(runner) as engine:
            num_threads = threading.active_count()
            tasks = [asyncio.create_task(answer_of(engine, word(i))) for i in range(4)]
            await until(lambda: gates.begun == [("easy", word(0))])
            await leave(*tasks)  # also the one that is compiled just now
            assert threading.active_count() == num_threads + 1
            with pytest.raises(OverloadedError, match="4 grammars are being compiled, at most 4"):
                await answer_of(engine, word(4))
            again = asyncio.create_task(answer_of(engine, word(2)))  # that waits for its turn still
            gates.easy.release(99)
            assert await again == "the word 2"
            assert gates.begun == [("easy", word(0)), ("easy", word(2))]
            assert await answer_of(engine, word(4)) == "the word 4"
            assert engine._reception._grammars._compiling == {}
            await check_all_is_given_back(engine, runner)

    run(main)


def test_a_grammar_that_is_kept_waits_for_none_that_is_compiled(monkeypatch):
    monkeypatch.setattr(grammars_module, "MAX_COMPILING", 1)
    runner, gates = make_bound_runner(), Gates(monkeypatch)

    async def main() -> None:
        async with make_engine(runner) as engine:
            gates.easy.release()
            await answer_of(engine, CHOICE)
            other = asyncio.create_task(answer_of(engine, word(0)))
            await until(lambda: len(gates.begun) == 2)
            answers = [answer_of(engine, CHOICE, seed=seed) for seed in range(100)]
            assert set(await asyncio.gather(*answers)) == set(CHOICE.choice)
            assert not other.done()
            gates.easy.release()
            assert await other == "the word 0"
            await check_all_is_given_back(engine, runner)

    run(main)


def test_a_hard_grammar_keeps_only_its_like_waiting(monkeypatch):
    runner, gates = make_bound_runner(), Gates(monkeypatch)
    gates.easy.release(99)

    async def main() -> None:
        async with make_engine(runner) as engine:
            gates.is_hard = True
            hard = [asyncio.create_task(answer_of(engine, word(i))) for i in range(3)]
            await until(lambda: len(gates.begun) == 4)
            gates.is_hard = False
            assert await answer_of(engine, word(3)) == "the word 3"
            assert [how for how, _ in gates.begun].count("hard") == 1
            await leave(hard[1])
            gates.hard.release(99)
            assert [await hard[0], await hard[2]] == ["the word 0", "the word 2"]
            assert ("hard", word(1)) not in gates.begun
            await check_all_is_given_back(engine, runner)

    run(main)


def test_equal_grammars_are_compiled_once_and_each_is_told_what_was_wrong(monkeypatch):
    runner, gates = make_bound_runner(), Gates(monkeypatch)
    gates.easy.release(99)

    async def main() -> None:
        async with make_engine(runner) as engine:
            answers = [answer_of(engine, CHOICE, seed=seed) for seed in range(20)]
            assert set(await asyncio.gather(*answers)) == set(CHOICE.choice)
            assert gates.begun == [("easy", CHOICE)]
            bad = [answer_of(engine, StructuredOutputs(regex="(")) for _ in range(3)]
            errors = await asyncio.gather(*bad, return_exceptions=True)
            assert [type(error) for error in errors] == [InvalidRequestError] * 3
            assert len(set(map(id, errors))) == 3 and len(set(map(str, errors))) == 1
            assert {error.param for error in errors} == {"structured_outputs"}
            assert len(gates.begun) == 2
            await check_all_is_given_back(engine, runner)

    run(main)


def test_grammars_take_only_so_much_memory(monkeypatch):
    runner = make_bound_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            await answer_of(engine, CHOICE)
            monkeypatch.setattr(grammars_module, "MAX_BYTES", 1)
            with pytest.raises(OverloadedError, match="grammars of all requests"):
                await answer_of(engine, CHOICE)
            monkeypatch.setattr(grammars_module, "MAX_REQUEST_BYTES", 1 << 20)
            with pytest.raises(InvalidRequestError, match="at most 1 MB for its 9 choices, got"):
                await engine.generate(PROMPT, bound(CHOICE, n=9)).collect()
            await check_all_is_given_back(engine, runner)

    run(main)


@pytest.mark.parametrize("few", ["compiled", "bytes"])
def test_a_batch_waits_for_room_where_a_request_is_refused(monkeypatch, few):
    runner = make_bound_runner(num_blocks=500)
    monkeypatch.setattr(grammars_module, "ROOM_CHECK_S", 1000.0)  # all that gives room tells
    if few == "compiled":
        monkeypatch.setattr(grammars_module, "MAX_COMPILING", 1)
        monkeypatch.setattr(grammar_module, "MAX_CACHED", 1)

    async def main() -> None:
        async with make_engine(runner, max_num_seqs=8) as engine:
            given = [bound(word(i % 5)) for i in range(20)]
            prompts = [Prompt(f"prompts[{i}]", None, tuple(PROMPT)) for i in range(20)]
            jobs = [Job(f"r{i}", prompts[i], given[i], 0) for i in range(20)]
            jobs = await check_batch(engine, jobs)
            if few == "bytes":
                compiler = engine._reception._grammars._compiler
                room = compiler.num_bytes + 3 * compiler.find(word(0)).matcher_bytes
                monkeypatch.setattr(grammars_module, "MAX_BYTES", room)
            answers: list[Answer] = []
            await run_batch(engine, jobs, answers.append)
            assert {(one.job.request_id, one.completions[0].text) for one in answers} == {
                (f"r{i}", f"the word {i % 5}") for i in range(20)
            }
            await check_all_is_given_back(engine, runner)

    run(main)


class Room:
    """Of memory: all that there is, is taken by an answer that is paused."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._monkeypatch = monkeypatch
        self._holder = engine.generate(PROMPT, bound(CHOICE))

    async def __aenter__(self) -> Room:
        await self._holder.__aenter__()
        self._holder.pause()
        self.grammars = self._engine._reception._grammars
        await until(lambda: not self.grammars._num_opening_bytes)
        self._of_one = self.grammars._compiler.find(CHOICE).matcher_bytes
        self._monkeypatch.setattr(grammars_module, "ROOM_CHECK_S", 1000.0)
        self.become(1)
        return self

    def become(self, num: int) -> None:
        """For so many matchers."""
        room = self.grammars._compiler.num_bytes + num * self._of_one
        self._monkeypatch.setattr(grammars_module, "MAX_BYTES", room)

    async def __aexit__(self, *exc: object) -> None:
        await self._holder.__aexit__(None, None, None)

    def waiting(self, **params: Any) -> asyncio.Task[Any]:
        """Who waits for some of it."""
        stream = self._engine.generate(PROMPT, bound(CHOICE, **params), queue_places=0)
        return asyncio.create_task(stream.collect())

    async def until_awaited(self, num: int) -> None:
        await until(lambda: self.grammars._num_awaited_bytes == num * self._of_one)


def test_who_waits_for_room_is_told_at_once_when_the_engine_dies(monkeypatch):
    gates = Gates(monkeypatch)
    gates.easy.release()
    monkeypatch.setattr(grammars_module, "MAX_COMPILING", 1)

    async def main() -> None:
        async with make_engine(make_bound_runner()) as engine:
            async with Room(engine, monkeypatch) as room:
                tasks = [room.waiting(seed=seed) for seed in range(3)]
                await room.until_awaited(3)
                for number in range(3):  # the first is compiled, the others wait for a place
                    stream = engine.generate(PROMPT, bound(word(number)), queue_places=0)
                    tasks.append(asyncio.create_task(stream.collect()))
                await until(lambda: len(gates.begun) == 2 and len(room.grammars._compiling) == 3)
                engine._loop.die(EngineDeadError("the device is broken"))
                errors = await asyncio.gather(*tasks, return_exceptions=True)
                assert [type(error) for error in errors] == [EngineDeadError] * 6
                assert all("the device is broken" in str(error) for error in errors)
            gates.easy.release(99)

    run(main)


def test_who_wants_to_compile_does_not_stand_behind_who_waits_for_memory(monkeypatch):
    monkeypatch.setattr(grammars_module, "MAX_COMPILING", 1)
    runner = make_bound_runner(num_blocks=500)

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with Room(engine, monkeypatch) as room:
                behind = room.waiting(n=2)
                await room.until_awaited(2)
                for number in range(3):
                    await engine.check(tuple(PROMPT), bound(word(number)))
                assert not behind.done()
                room.become(2)
            await behind
            await check_all_is_given_back(engine, runner)

    run(main)


def test_room_that_somebody_waits_for_is_not_for_those_who_come_later(monkeypatch):
    runner = make_bound_runner(num_blocks=500)

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with Room(engine, monkeypatch) as room:
                room.become(3)
                large = room.waiting(n=3)
                await room.until_awaited(3)
                small = room.waiting()
                await room.until_awaited(4)
                with pytest.raises(OverloadedError, match="grammars of all requests"):
                    await answer_of(engine, CHOICE)
                assert not large.done() and not small.done()
            assert len(await large) == 3
            await small
            await check_all_is_given_back(engine, runner)

    run(main)


def test_grammars_of_those_who_wait_do_not_take_the_room_that_they_wait_for(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 1)
    runner = make_bound_runner(num_blocks=500)

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with Room(engine, monkeypatch) as room:
                room.become(2)
                tasks = []
                for number in range(12):
                    sampling = bound(word(number), n=2)
                    stream = engine.generate(PROMPT, sampling, queue_places=0)
                    tasks.append(asyncio.create_task(stream.collect()))
                await until(lambda: len(room.grammars._line._waiters or ()) == 11)
                # That of the answer, the latest one, and the one that is next.
                await until(lambda: len(room.grammars._compiler._alive) <= 3)
                room.become(4)
            answers = await asyncio.gather(*tasks)
            assert [{one.text for one in answer} for answer in answers] == [
                {f"the word {number}"} for number in range(12)
            ]
            await check_all_is_given_back(engine, runner)

    run(main)


def test_when_nothing_is_to_be_compiled_the_process_is_ended_and_reaped(monkeypatch):
    monkeypatch.setattr(grammars_module, "IDLE_S", 0.0)
    runner = make_bound_runner()
    processes: list[Any] = []
    start = grammar_process._start

    def note_start() -> Any:
        processes.append(start())
        return processes[-1]

    monkeypatch.setattr(grammar_process, "_start", note_start)

    async def main() -> None:
        async with make_engine(runner) as engine:
            for number in range(2):
                assert await answer_of(engine, word(number)) == f"the word {number}"
                await until(lambda: processes[-1].returncode is not None)
            assert [process.returncode for process in processes] == [0, 0]

    run(main)
