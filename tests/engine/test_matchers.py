"""Matchers alone: what is on the board after each token, who is told what, who waits for whom."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from engine.support import run, until
from fakes import FakeMaskBoard

from streamkv.engine import matchers as matchers_module
from streamkv.engine import threads
from streamkv.engine.matchers import Matchers, News, Slot

VOCAB_SIZE = 70
POSITION = 5  # of the first token


class Rule:
    """A grammar: after token t comes t + 1, or anything up to `steps[t]`."""

    def __init__(self, on_consume: Callable[[int], None] = lambda token_id: None) -> None:
        self.forced: list[int] = []
        self.has_ended = False
        self.mask = self._mask({0})
        self.consumed: list[int] = []
        self._on_consume = on_consume

    def consume(self, token_id: int) -> None:
        self.consumed.append(token_id)
        self._on_consume(token_id)
        if self.forced:
            del self.forced[0]
        self.has_ended = token_id == 60
        if token_id == 20:
            self.forced = [31, 32, 33]
        self.mask = self._mask({token_id + 1, 20})

    def _mask(self, token_ids: set[int]) -> bytes:
        return sum(1 << token_id for token_id in token_ids).to_bytes(12, "little")


class Harness:
    """Matchers with a board, and what they told."""

    def __init__(self) -> None:
        self.board = FakeMaskBoard(VOCAB_SIZE)
        self.news: list[News] = []
        self.num_calls = 0
        self.matchers = Matchers(self.board, self._on_news)

    def _on_news(self, news: Sequence[News]) -> None:
        self.num_calls += 1
        self.news += news

    def add(self, rule: Rule, *, can_skip: bool = True, num_bytes: int = 0) -> Slot:
        (slot,) = self.matchers.add([rule], POSITION, can_skip=can_skip, num_bytes=num_bytes)
        return slot

    def allowed(self, slot: Slot, position: int) -> frozenset[int] | None:
        """By the board; waits for it."""
        return self.board.wait(slot.number, position, time.monotonic() + 20)


def with_harness(test: Callable[[Harness], object]) -> None:
    async def main() -> None:
        harness = Harness()
        try:
            await test(harness)
        finally:
            await asyncio.to_thread(harness.matchers.close)
        assert harness.board.violations == []

    run(main)


def test_each_token_is_followed_by_the_mask_of_the_next_position():
    async def test(harness: Harness) -> None:
        slots = [harness.add(Rule()) for _ in range(3)]
        assert [harness.allowed(slot, POSITION) for slot in slots] == [{0}] * 3
        harness.matchers.push([(slots[0], 0), (slots[2], 7)])
        assert harness.allowed(slots[0], POSITION + 1) == {1, 20}
        assert harness.allowed(slots[2], POSITION + 1) == {8, 20}
        assert harness.allowed(slots[1], POSITION) == {0}
        harness.matchers.push([(slots[0], 1), (slots[0], 2)])
        await asyncio.to_thread(harness.allowed, slots[0], POSITION + 3)
        assert slots[0].matcher.consumed == [0, 1, 2]
        assert harness.news == []  # nobody waits, nothing is forced

    with_harness(test)


def test_forced_tokens_are_told_once_and_stand_on_the_board_one_by_one():
    async def test(harness: Harness) -> None:
        slot, sampled = harness.add(Rule()), harness.add(Rule(), can_skip=False)
        harness.matchers.push([(slot, 20), (sampled, 20)])
        assert harness.allowed(slot, POSITION + 1) == {31}
        await until(lambda: harness.news)
        assert harness.news == [News(slot, POSITION + 1, (31, 32, 33))]
        for number, token_id in enumerate((31, 32), start=2):
            harness.matchers.push([(slot, token_id), (sampled, token_id)])
            for one in (slot, sampled):
                assert harness.allowed(one, POSITION + number) == {token_id + 1}
        assert len(harness.news) == 1

    with_harness(test)


def test_the_highest_token_of_a_word_may_be_the_only_one():
    async def test(harness: Harness) -> None:
        for token_id in (0, 31, 32, 63, 69):
            rule = Rule()
            rule.forced = [token_id]
            assert harness.allowed(harness.add(rule), POSITION) == {token_id}

    with_harness(test)


def test_masks_that_are_waited_for_are_told_and_all_news_of_a_turn_in_one_call():
    async def test(harness: Harness) -> None:
        slots = [harness.add(Rule()) for _ in range(8)]
        harness.matchers.push([(slot, 0) for slot in slots])
        for slot in slots:
            await asyncio.to_thread(harness.allowed, slot, POSITION + 1)
        assert harness.num_calls == 0
        assert [harness.matchers.gate(slot) for slot in slots] == [POSITION + 1] * 8
        harness.matchers.push([(slot, 1) for slot in slots])
        await until(lambda: harness.num_calls)
        assert harness.news == [News(slot, POSITION + 2) for slot in slots]
        assert harness.num_calls == 1

    with_harness(test)


def test_the_end_of_a_grammar_and_its_failures_are_told_and_nothing_follows():
    def fail(token_id: int) -> None:
        if token_id == 5:
            raise KeyboardInterrupt("as a panic of the library, this is no Exception")

    async def test(harness: Harness) -> None:
        ending, failing, other = (harness.add(Rule(fail)) for _ in range(3))
        harness.matchers.push([(ending, 60), (failing, 5), (other, 1)])
        await until(lambda: len(harness.news) == 2)
        end, failure = harness.news
        assert end == News(ending, POSITION + 1, has_ended=True)
        assert failure.slot is failing and "panic" in failure.failure
        assert harness.allowed(other, POSITION + 1) == {2, 20}
        harness.matchers.push([(failing, 6)])
        harness.matchers.end([ending, failing])
        for slot in (ending, failing):  # a step that was sent doesn't wait for what won't come
            assert harness.allowed(slot, POSITION + 1) is not None
        assert failing.matcher.consumed == [5]

    with_harness(test)


def test_who_takes_long_goes_on_beside_the_others(monkeypatch):
    monkeypatch.setattr(matchers_module, "ALLOWED_S", 1000.0)
    gate = threading.Semaphore(0)

    def take_long(token_id: int) -> None:
        end_s = time.thread_time() + 2 * matchers_module.SLOW_S
        while token_id < 50 and time.thread_time() < end_s:
            pass
        assert token_id < 50 or gate.acquire(timeout=20)

    async def test(harness: Harness) -> None:
        slow, quick = harness.add(Rule(take_long)), harness.add(Rule())
        harness.matchers.push([(slow, 0)])
        await asyncio.to_thread(harness.allowed, slow, POSITION + 1)
        harness.matchers.push([(slow, 50), (slow, 51), (quick, 0)])  # it is known to be slow now
        assert await asyncio.to_thread(harness.allowed, quick, POSITION + 1) == {1, 20}
        assert slow.matcher.consumed in ([0], [0, 50])
        gate.release(2)
        await asyncio.to_thread(harness.allowed, slow, POSITION + 3)
        assert slow.matcher.consumed == [0, 50, 51]
        harness.matchers.give_back([slow])  # after all that came before
        await until(lambda: harness.board.num_slots == 1)

    with_harness(test)


def test_who_takes_long_for_every_token_is_ended(monkeypatch):
    monkeypatch.setattr(matchers_module, "ALLOWED_S", 0.02)
    monkeypatch.setattr(matchers_module, "ALLOWED_TOKEN_S", 0.001)

    def take_long(token_id: int) -> None:
        end_s = time.thread_time() + 0.01
        while time.thread_time() < end_s:
            pass

    async def test(harness: Harness) -> None:
        slot = harness.add(Rule(take_long))
        for token_id in range(30):
            harness.matchers.push([(slot, token_id)])
        await until(lambda: harness.news)
        (news,) = harness.news
        assert "it takes 0.01 s a token" in news.failure
        assert 2 <= len(slot.matcher.consumed) <= 4

    with_harness(test)


def test_slots_are_given_back_and_memory_is_counted():
    async def test(harness: Harness) -> None:
        slots = [harness.add(Rule(), num_bytes=100) for _ in range(3)]
        assert (harness.matchers.num_bytes, harness.board.num_slots) == (300, 3)
        harness.matchers.push([(slots[1], 0)])
        harness.matchers.give_back(slots[:2])
        await until(lambda: harness.board.num_slots == 1)
        assert harness.matchers.num_bytes == 100

    with_harness(test)


def test_threads_begin_when_there_is_something_to_do_and_end_when_asked(monkeypatch):
    def names() -> list[str]:
        found = (one.name for one in threading.enumerate())
        return [name for name in found if name.startswith("streamkv-matchers")]

    async def test(harness: Harness) -> None:
        assert names() == []
        slot = harness.add(Rule())
        harness.matchers.push([(slot, 0)])
        await until(lambda: names() == ["streamkv-matchers"])
        harness.matchers.stop()
        await until(lambda: names() == [])
        harness.matchers.push([(slot, 1)])
        assert names() == []

    with_harness(test)


def test_a_thread_whose_event_loop_is_gone_ends_by_itself(monkeypatch):
    monkeypatch.setattr(threads, "EXIT_CHECK_S", 0.01)
    kept: list[threading.Thread] = []

    async def forget() -> None:
        harness = Harness()
        harness.matchers.push([(harness.add(Rule()), 20)])
        kept.extend(t for t in threading.enumerate() if t.name.startswith("streamkv-matchers"))

    run(forget)
    (thread,) = kept
    thread.join(20)
    assert not thread.is_alive()


def test_all_slots_of_a_request_are_made_or_none():
    class Broken(Rule):
        forced = property(lambda self: pytest.fail("asked"), lambda self, value: None)

    async def test(harness: Harness) -> None:
        with pytest.raises(pytest.fail.Exception):
            harness.matchers.add([Rule(), Broken()], POSITION, can_skip=True)
        assert harness.board.num_slots == 0

    with_harness(test)
