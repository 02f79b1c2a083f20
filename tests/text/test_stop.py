"""StopChecker against a search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkv.text.stop import StopChecker


def oracle(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The text to show and the stop string: the first to be complete, the longest of those."""
    for end in range(len(text) + 1):
        for pattern in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(pattern):
                return text[: end if include else end - len(pattern)], pattern
    return text, None


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = sorted(place % (len(text) + 1) for place in places)
    pairs = zip([0, *bounds], [*bounds, len(text)], strict=True)
    return [text[a:b] for a, b in pairs]


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=8), max_size=4),
    st.lists(st.integers(0, 1000), max_size=12),
    st.booleans(),
)
def test_any_split_shows_what_a_search_of_the_whole_text_shows(
    text: str, stop: list[str], places: list[int], include: bool
) -> None:
    checker = StopChecker(stop, include_stop_str_in_output=include)
    shown = "".join(checker.push(piece) for piece in cut(text, places))
    assert (shown + checker.flush(), checker.matched) == oracle(text, stop, include)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=8), min_size=1))
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += checker.push(char)
        if checker.matched is not None:
            break
        so_far = text[:end]
        held = max(n for n in range(end + 1) for p in stop if p.startswith(so_far[end - n :]))
        assert shown == so_far[: end - held]


@pytest.mark.parametrize(
    ("stop", "text", "shown", "matched"),
    [
        (["END"], "the END of it", "the ", "END"),
        (["b", "abc"], "xabc", "xa", "b"),  # complete first wins, although abc begins before
        (["bc", "abc"], "xabc", "x", "abc"),  # complete together: the longest
        (["abc", "bc"], "xabc", "x", "abc"),  # whatever the order
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["👍🏽"], "a👍b👍🏽c", "a👍b", "👍🏽"),
        (["x"], "x", "", "x"),
        ([], "text", "text", None),
        (["zz"], "text z", "text z", None),
    ],
)
def test_the_stop_string_that_is_complete_first_ends_the_text(
    stop: list[str], text: str, shown: str, matched: str | None
) -> None:
    for pieces in ([text], list(text)):
        checker = StopChecker(stop)
        assert "".join(map(checker.push, pieces)) + checker.flush() == shown
        assert checker.matched == matched


def test_the_stop_string_is_shown_when_asked_for() -> None:
    checker = StopChecker(["END"], include_stop_str_in_output=True)
    assert [checker.push(piece) for piece in ("the E", "N", "D of it", "more")] == [
        *("the ", "", "END", ""),
    ]
    assert checker.flush() == ""


def test_nothing_follows_a_match() -> None:
    checker = StopChecker(["."])
    assert checker.push("a.b") == "a"
    assert checker.push("c.d") == ""
    assert checker.flush() == ""
    assert checker.matched == "."


def test_the_end_releases_what_was_held_back_once() -> None:
    checker = StopChecker(["END"])
    assert checker.push("the EN") == "the "
    assert (checker.flush(), checker.flush()) == ("EN", "")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abx", max_size=24), max_size=6), st.integers(1, 12))
def test_many_places_that_look_like_a_stop_string_are_found_as_few_are(
    pieces: list[str], num: int
) -> None:
    stop = ["a" * num + "b", "bab"]
    checker = StopChecker(stop)
    shown = "".join(map(checker.push, pieces))
    assert (shown + checker.flush(), checker.matched) == oracle("".join(pieces), stop, False)


class CountingStr(str):
    """A stop string that counts how often its characters are read, one by one or in slices."""

    reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        value = super().__getitem__(key)
        self.reads += max(len(value), 1)
        return value


def test_work_is_linear_in_the_text_however_long_the_stop_strings() -> None:
    # The worst case of a naive search: a long partial match that fails at each last character.
    length = 2000
    stop = CountingStr("a" * length + "b")
    checker = StopChecker([stop])
    text = "a" * (5 * length)
    shown = "".join(map(checker.push, text))
    assert shown + checker.flush() == text
    assert stop.reads < 8 * len(text)


def test_a_huge_stop_string_costs_nothing_until_the_text_follows_it() -> None:
    stop = CountingStr("ab" * 5_000_000)
    checker = StopChecker([stop])
    assert checker.push("xyz") == "xyz"
    assert stop.reads < 20
