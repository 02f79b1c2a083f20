"""Matchers alone: what is on the board after each token, who is told what, who waits for whom."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest
from engine.support import run, until
from fakes import FakeMaskBoard

from streamkv.engine import threads
from streamkv.engine.matcher_slot import (
    ALLOWED_S,
    ALLOWED_TOKEN_S,
    MAX_CHARGED_S,
    TURN_S,
    News,
    Slot,
)
from streamkv.engine.matchers import SLOW_SHARE, Matchers

VOCAB_SIZE = 70
POSITION = 5  # of the first token


class Clock:
    """Of CPU time, which passes as it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Grammar:
    slow_share = 0.0


class Rule:
    """A matcher: after token t comes t + 1, or 20."""

    def __init__(
        self,
        on_consume: Callable[[int], None] = lambda token_id: None,
        grammar: Grammar | None = None,
    ) -> None:
        self.grammar = grammar
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
        self.clock = Clock()
        self.matchers = Matchers(self.board, self._on_news, self.clock)

    def _on_news(self, news: Sequence[News]) -> None:
        self.num_calls += 1
        self.news += news

    def add(self, rule: Rule, *, can_skip: bool = True, num_bytes: int = 0) -> Slot:
        (slot,) = self.matchers.add([rule], POSITION, can_skip=can_skip, num_bytes=num_bytes)
        return slot

    def lasting(self, took_s: float) -> Callable[[int], None]:
        """What takes so much CPU time for each token."""

        def pass_time(token_id: int) -> None:
            self.clock.now_s += took_s

        return pass_time

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
        for slot in (ending, failing):  # steps that were sent don't wait for what won't come
            for position in (1, 2, 3):
                assert harness.allowed(slot, POSITION + position) is None
        harness.matchers.push([(failing, 6)])
        harness.matchers.end([ending, failing])
        harness.matchers.push([(other, 2)])
        assert harness.allowed(other, POSITION + 2) == {3, 20}
        assert failing.matcher.consumed == [5]

    with_harness(test)


def test_who_has_ended_is_waited_for_no_more_whatever_its_thread_is_at():
    is_at_it, may_go_on = threading.Event(), threading.Event()

    def take_long(token_id: int) -> None:
        is_at_it.set()
        assert may_go_on.wait(20)

    async def test(harness: Harness) -> None:
        rule = Rule(take_long)
        slot = harness.add(rule)
        harness.matchers.push([(slot, 0), (slot, 1)])
        assert await asyncio.to_thread(is_at_it.wait, 20)
        harness.matchers.end([slot])
        assert harness.allowed(slot, POSITION + 1) is None
        may_go_on.set()
        harness.matchers.give_back([slot])
        await until(lambda: harness.board.num_slots == 0)
        assert rule.consumed == [0], "nobody wants to know what follows the second"

    with_harness(test)


def test_a_request_whose_answers_together_take_long_goes_on_beside_the_others():
    gate = threading.Semaphore(0)

    async def test(harness: Harness) -> None:
        def take_long(token_id: int) -> None:
            harness.clock.now_s += 0.4 * TURN_S
            assert token_id < 50 or gate.acquire(timeout=20)

        rules = [Rule(take_long, Grammar()) for _ in range(4)]
        slow = harness.matchers.add(rules, POSITION, can_skip=True)
        quick = harness.add(Rule())
        harness.matchers.push([(slot, 0) for slot in slow])
        for slot in slow:
            await asyncio.to_thread(harness.allowed, slot, POSITION + 1)
        harness.matchers.push([*((slot, 50) for slot in slow), (quick, 0)])
        assert await asyncio.to_thread(harness.allowed, quick, POSITION + 1) == {1, 20}
        assert not any(50 in rule.consumed[:-1] for rule in rules), "the first is still at it"
        gate.release(4)
        for slot in slow:
            await asyncio.to_thread(harness.allowed, slot, POSITION + 2)
        assert [rule.consumed for rule in rules] == [[0, 50]] * 4
        assert not any(rule.grammar.slow_share for rule in rules), "each alone is quick enough"
        harness.matchers.give_back(slow)  # after all that came before
        await until(lambda: harness.board.num_slots == 1)

    with_harness(test)


def test_a_grammar_that_often_takes_long_for_a_token_is_taken_for_slow_until_it_does_not():
    async def test(harness: Harness) -> None:
        grammar, other = Grammar(), Grammar()

        async def follow(grammar: Grammar, *times_s: float) -> str:
            """Another answer. Returns in which thread it began."""
            names: list[str] = []

            def take(token_id: int) -> None:
                names.append(threading.current_thread().name)
                harness.clock.now_s += times_s[len(names) - 1]

            slot = harness.add(Rule(take, grammar))
            harness.matchers.push([(slot, 0) for _ in times_s])
            await asyncio.to_thread(harness.allowed, slot, POSITION + len(times_s))
            return names[0]

        quick, slow = "streamkv-matchers", "streamkv-matchers-slow"
        long_s = 1.1 * TURN_S
        assert await follow(grammar, long_s) == quick
        assert await follow(grammar, *[0.0] * 20, 300 * TURN_S) == quick, "once is no habit"
        assert await follow(grammar, *[long_s] * 6) == quick
        await until(lambda: grammar.slow_share > SLOW_SHARE)
        assert await follow(grammar, long_s) == slow
        assert await follow(other, 0.0) == quick
        assert await follow(grammar, *[0.0] * 10) == slow
        await until(lambda: grammar.slow_share < SLOW_SHARE)
        assert await follow(grammar, 0.0) == quick

    with_harness(test)


def test_who_goes_on_taking_long_is_ended_however_quick_it_was_before():
    async def test(harness: Harness) -> None:
        times: list[float] = []

        def take(token_id: int) -> None:
            harness.clock.now_s += times[len(slot.matcher.consumed) - 1]

        async def num_consumed(*more: float) -> int:
            """Until it fails."""
            times.extend(more)
            harness.matchers.push([(slot, 0) for _ in more])
            await until(lambda: harness.news or len(slot.matcher.consumed) == len(times))
            return len(slot.matcher.consumed)

        slot = harness.add(Rule(take))
        assert await num_consumed(*[0.9 * ALLOWED_TOKEN_S] * 300) == 300
        num_excesses = 1 + int(ALLOWED_S / ALLOWED_TOKEN_S)
        assert await num_consumed(*[2.01 * ALLOWED_TOKEN_S] * 100) <= 300 + num_excesses
        (news,) = harness.news
        assert "it takes too long, 0.04 s for the last token" in news.failure

    with_harness(test)


def test_no_single_token_ends_an_answer_whatever_else_had_the_threads_time():
    async def test(harness: Harness) -> None:
        quick, pause = [0.0] * 10, [100.0]
        times = pause + quick + pause + quick + pause * 2 + quick
        num_fatal = 1 + int(ALLOWED_S / (MAX_CHARGED_S - ALLOWED_TOKEN_S))
        assert num_fatal > 2
        rule = Rule(lambda token_id: setattr(harness.clock, "now_s", sum(times[: num_taken()])))

        def num_taken() -> int:
            return len(rule.consumed)

        slot = harness.add(rule)
        harness.matchers.push([(slot, 0) for _ in times])
        await until(lambda: harness.news or slot.published == POSITION + len(times))
        assert harness.news == []
        num_quick = len(times)
        times += [100.0] * 20
        harness.matchers.push([(slot, 0)] * 20)
        await until(lambda: harness.news)
        assert num_taken() == num_quick + num_fatal

    with_harness(test)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_matcher_is_gone_with_its_slots_place_whoever_still_has_the_slot(is_closed):
    async def test(harness: Harness) -> None:
        kept = [harness.add(Rule()) for _ in range(3)]
        left = [weakref.ref(slot.matcher) for slot in kept]
        if is_closed:
            await asyncio.to_thread(harness.matchers.close)
        else:
            harness.matchers.end(kept)
            harness.matchers.give_back(kept)
            await until(lambda: harness.board.num_slots == 0)
        assert [one() for one in left] == [None] * 3
        assert harness.matchers.num_bytes == 0

    with_harness(test)


def test_who_waits_for_room_is_told_once_of_the_next_slot_that_is_given_back():
    async def test(harness: Harness) -> None:
        told: list[int] = []
        slots = [harness.add(Rule(), num_bytes=100) for _ in range(3)]
        harness.matchers.give_back(slots[:1])
        await until(lambda: harness.matchers.num_bytes == 200)
        harness.matchers.call_once_there_is_room(lambda: told.append(harness.matchers.num_bytes))
        harness.matchers.give_back(slots[1:2])
        await until(lambda: told)
        harness.matchers.give_back(slots[2:])
        await until(lambda: harness.matchers.num_bytes == 0)
        await asyncio.sleep(0)
        assert told == [100]

    with_harness(test)


def test_slots_are_given_back_and_memory_is_counted():
    async def test(harness: Harness) -> None:
        slots = [harness.add(Rule(), num_bytes=100) for _ in range(3)]
        assert (harness.matchers.num_bytes, harness.board.num_slots) == (300, 3)
        harness.matchers.push([(slots[1], 0)])
        harness.matchers.give_back(slots[:2])
        await until(lambda: harness.board.num_slots == 1)
        assert harness.matchers.num_bytes == 100
        harness.matchers.give_back([slots[0], slots[2]])  # one of them again
        await until(lambda: harness.matchers.num_bytes == 0)

    with_harness(test)


def test_threads_begin_with_the_first_slot_whoever_makes_it_and_end_when_asked():
    def names() -> list[str]:
        found = (one.name for one in threading.enumerate())
        return sorted(name for name in found if name.startswith("streamkv-matchers"))

    async def test(harness: Harness) -> None:
        assert names() == []
        both = threading.Barrier(4)

        def add() -> Slot:
            both.wait(20)
            return harness.add(Rule())

        slots = await asyncio.gather(*(asyncio.to_thread(add) for _ in range(4)))
        assert names() == ["streamkv-matchers", "streamkv-matchers-slow"]
        harness.matchers.stop()
        await until(lambda: names() == [])
        harness.matchers.push([(slots[0], 1)])
        harness.matchers.give_back(slots)
        await asyncio.to_thread(harness.matchers.close)
        harness.add(Rule())
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
    assert len(kept) == 2
    for thread in kept:
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
