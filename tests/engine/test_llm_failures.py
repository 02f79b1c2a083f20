"""LLM: what fails, interrupts and closes leaves the rest as it was; threads and loops beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from engine.llm_support import SilentBar, check_idle, llm_threads, make_llm, texts, wait_until
from engine.support import NOT_ASCII_IDS, SPECIAL_IDS, TOKENIZER, greedy, make_runner, oracle

from streamkv.errors import EngineDeadError


def test_a_prompt_that_fails_on_the_device_does_not_take_the_others_with_it(caplog):
    broken = 60
    runner = make_runner(avoid=[*SPECIAL_IDS, broken])
    runner.broken_token_ids = frozenset((broken,))
    with make_llm(runner, max_num_seqs=2) as llm:
        prompts = [[index] for index in range(58, 63)]
        outputs = llm.generate(prompts, greedy(n=2, max_tokens=4), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            if prompt == [broken]:
                assert "not finite" in output.error
                assert [choice.finish_reason for choice in output.outputs] == ["error"] * 2
                assert [choice.text for choice in output.outputs] == [""] * 2
            else:
                assert output.error == ""
                assert output.outputs[1].token_ids == oracle(runner, prompt, 4)
        (warning,) = (one for one in caplog.records if one.name == "streamkv.engine.llm")
        assert "1 of 5 prompts failed" in warning.getMessage()
        assert "prompts[2]: " in warning.getMessage()
        check_idle(llm, runner)


def test_an_engine_that_dies_ends_the_call_and_all_later_ones():
    runner = make_runner()
    runner.fail_step_ids = frozenset(range(2, 100))
    with make_llm(runner, max_num_seqs=2) as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="3 steps failed in a row"):
                llm.generate([[index] for index in range(20)], greedy(max_tokens=9), use_tqdm=False)


def test_an_interrupt_ends_the_requests_and_leaves_the_llm_usable():
    runner = make_runner(gate=(gate := threading.Semaphore(10)))  # steps before it stands still
    with make_llm(runner, max_num_seqs=4) as llm:
        engine = llm._background.engine

        def interrupt() -> None:
            wait_until(llm, lambda: engine.stats().num_requests_running == 4)
            os.kill(os.getpid(), signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[index] for index in range(30)], greedy(max_tokens=90), use_tqdm=False)
        interrupter.join()
        gate.release(1000)
        check_idle(llm, runner)
        assert engine.stats().request_success_total["length"] == 0
        (output,) = llm.generate([[7]], greedy(max_tokens=9), use_tqdm=False)
        assert output.outputs[0].token_ids == oracle(runner, [7], 9)


def test_a_progress_bar_that_fails_ends_the_requests_too():
    class Broken(SilentBar):
        def update(self, num: int) -> None:
            raise ZeroDivisionError

    runner = make_runner()
    with make_llm(runner, max_num_seqs=2) as llm:
        with pytest.raises(ZeroDivisionError):
            llm.generate([[index] for index in range(30)], greedy(max_tokens=50), use_tqdm=Broken)
        check_idle(llm, runner)


def test_closing_ends_the_calls_of_other_threads():
    runner = make_runner(gate=(gate := threading.Semaphore(10)))
    llm = make_llm(runner)
    engine = llm._background.engine
    errors = []

    def generate() -> None:
        with pytest.raises(EngineDeadError, match="closed") as caught:
            llm.generate([[1], [2]], greedy(max_tokens=50), use_tqdm=False)
        errors.append(caught.value)

    callers = [threading.Thread(target=generate) for _ in range(3)]
    for caller in callers:
        caller.start()

    def num_requests() -> int:
        stats = engine.stats()
        return stats.num_requests_running + stats.num_requests_waiting

    wait_until(llm, lambda: num_requests() == 6)
    closer = threading.Thread(target=llm.close)
    closer.start()
    for caller in callers:  # they hear of it though the device stands still
        caller.join(20)
    gate.release(1000)
    closer.join(20)
    assert len(errors) == 3
    with pytest.raises(EngineDeadError, match="the LLM is closed"):
        llm.generate("user")
    llm.close()
    assert runner.closed and llm_threads() == []


def test_threads_share_one_llm():
    runner = make_runner()
    found: dict[int, list[int]] = {}
    with make_llm(runner, max_num_seqs=4) as llm:

        def generate(first: int) -> None:
            prompts = [[first + index] for index in range(10)]
            for prompt, output in zip(
                prompts, llm.generate(prompts, greedy(max_tokens=6), use_tqdm=False), strict=True
            ):
                found[prompt[0]] = output.outputs[0].token_ids

        callers = [threading.Thread(target=generate, args=(first,)) for first in (0, 50, 100)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(20)
    assert len(found) == 30
    assert all(token_ids == oracle(runner, [key], 6) for key, token_ids in found.items())


def test_it_works_beside_a_running_event_loop():
    runner = make_runner(avoid=NOT_ASCII_IDS)

    async def main() -> list[str]:
        with make_llm(runner) as llm:
            return texts(llm.generate(["user", "the fox"], greedy(max_tokens=4), use_tqdm=False))

    for prompt, text in zip(("user", "the fox"), asyncio.run(main()), strict=True):
        assert text == TOKENIZER.decode(oracle(runner, TOKENIZER.encode(prompt), 4))
