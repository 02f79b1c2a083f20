"""Lanes alone: who has a turn when, by what each token is said to cost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from engine.support import run, until

from streamkv.engine.matcher_lane import POST_S, Lane
from streamkv.engine.matcher_slot import TURN_S, Account


class Slot:
    """Of a request; each of its tokens is a number of microseconds."""

    def __init__(self, name: str, account: Account | None = None) -> None:
        self.name = name
        self.account = account or Account()


Work = tuple[Slot, int]


class Harness:
    """A lane, whose thread is held at the first token until all that a test wants is put."""

    def __init__(self, slower: Lane | None = None) -> None:
        self.done: list[tuple[str, int]] = []
        self.posts: list[list[str]] = []
        self._may_go_on = threading.Event()
        self._num_put = 1
        self.lane: Any = Lane("streamkv-matchers", self._do, self.posts.append, slower)
        self.lane.start()
        self.lane.put([(Slot("hold"), 0)])

    def _do(self, slot: Slot, token: int, news: list[str]) -> float:
        assert self._may_go_on.wait(20)
        self.done.append((slot.name, token))
        if slot.name.startswith("told"):
            news.append(slot.name)
        return token * 1e-6

    def put(self, work: Sequence[Work]) -> None:
        self._num_put += len(work)
        self.lane.put(work)

    async def finish(self, num_elsewhere: int = 0) -> list[tuple[str, int]]:
        """What was done, in order."""
        self._may_go_on.set()
        await until(lambda: len(self.done) == self._num_put - num_elsewhere)
        await asyncio.to_thread(self.lane.close)
        return self.done[1:]


TURN = int(TURN_S * 1e6)


def taught(name: str, cost: int) -> Slot:
    """Of a request whose last turn cost so much."""
    slot = Slot(name)
    slot.account.cost_s = cost * 1e-6
    return slot


def test_who_costs_little_goes_first_whoever_came_first():
    async def test() -> None:
        harness = Harness()
        costs = [2900, 80, 500, 2900, 20]
        harness.put([(taught(f"{number}", cost), cost) for number, cost in enumerate(costs)])
        names = [name for name, _ in await harness.finish()]
        assert names == ["4", "1", "2", "0", "3"]

    run(test)


@pytest.mark.parametrize("num_choices", [16, 64, 1000])
def test_one_request_with_many_choices_has_a_turn_like_one_with_few(num_choices):
    async def test() -> None:
        harness = Harness()
        account = Account()
        harness.put([(Slot("many", account), 500) for _ in range(num_choices)])
        others = [Slot(f"other {number}") for number in range(3)]
        harness.put([(slot, 500) for slot in others])
        done = await harness.finish()
        before = done[: max(number for number, one in enumerate(done) if one[0] != "many")]
        assert sum(cost for name, cost in before if name == "many") <= TURN + 500
        assert len(done) == num_choices + 3

    run(test)


@pytest.mark.parametrize("seed", range(10))
def test_all_get_their_share_of_the_time_and_each_its_tokens_in_order(seed):
    async def test() -> None:
        rng = random.Random(seed)
        harness = Harness()
        slots = [Slot(f"{number}") for number in range(6)]
        costs = [rng.choice([100, 300, 1000, 4000, 20000]) for _ in slots]
        total = 100_000  # of each
        wanted = {
            slot.name: [cost + rng.randrange(5) for _ in range(total // cost)]
            for slot, cost in zip(slots, costs, strict=True)
        }
        for slot in slots:
            harness.put([(slot, token) for token in wanted[slot.name]])
        done = await harness.finish()
        for slot in slots:
            assert [token for name, token in done if name == slot.name] == wanted[slot.name]
        had: Counter[str] = Counter()
        for name, cost in done:
            had[name] += cost
            shares = [had[slot.name] for slot in slots]
            if max(shares) >= total:
                break  # one has got all that it wanted
            assert max(shares) - min(shares) <= 2 * (max(costs) + TURN)

    run(test)


def test_who_is_expensive_is_served_too_while_cheap_ones_keep_coming():
    async def test() -> None:
        harness = Harness()
        cheap, dear = [taught(f"{number}", 100) for number in range(10)], taught("dear", 2900)
        harness.put([(dear, 2900)])
        for slot in cheap:
            harness.put([(slot, 100)] * 200)  # their turns are long ones: many at once
        names = [name for name, _ in await harness.finish()]
        assert names.index("dear") < 500

    run(test)


def test_who_takes_more_than_a_turn_goes_on_in_the_slower_lane_with_all_that_follows():
    async def test() -> None:
        slow = Harness()
        quick = Harness(slow.lane)
        moving, staying, known = Slot("moving"), Slot("staying"), Slot("known", Account())
        known.account.is_slow = True
        tokens = [TURN // 2 + number for number in range(8)]
        quick.put([(moving, token) for token in tokens[:6]])
        quick.put([(known, 1), (staying, TURN // 3), (moving, tokens[6])])
        quick.put([(staying, TURN // 3), (known, 2), (moving, tokens[7])])
        done = await quick.finish(num_elsewhere=8 - 2 + 2)
        assert [one for one in done if one[0] == "moving"] == [("moving", t) for t in tokens[:2]]
        assert ("known", 1) not in done and len(done) == 4
        assert moving.account.is_slow and not staying.account.is_slow
        slow._num_put += 8
        done = await slow.finish()
        assert [token for name, token in done if name == "moving"] == tokens[2:]
        assert [token for name, token in done if name == "known"] == [1, 2]

    run(test)


def test_news_are_posted_once_for_many_but_wait_for_nobody_long():
    async def test() -> None:
        post = int(POST_S * 1e6)
        harness = Harness()
        harness.put([(Slot(f"told {number}"), 1) for number in range(8)])
        await harness.finish()
        assert harness.posts == [[f"told {number}" for number in range(8)]]

        harness = Harness()
        harness.put([(Slot("silent"), 10 * post)])  # before there is anything to tell
        harness.put([(Slot(f"told {number}"), 1) for number in range(2)])
        harness.put([(Slot(f"{number}"), post // 2) for number in range(10)])
        harness.put([(Slot("told last"), 1)])
        await harness.finish()
        assert harness.posts == [["told 0", "told 1"], ["told last"]]

    run(test)
