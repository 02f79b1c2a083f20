"""StopChecker: finds stop strings in a stream of text, and says what may be shown.

Owns the search. Knows nothing about tokens. Invariant: what was returned plus what is held back
is the text so far; what is held back is the longest end of it that could begin a stop string.

The stop string that is complete first wins, so that the result doesn't depend on how the text is
split; of several complete at the same character, the longest. Time is O(characters pushed) per
stop string, and no more is built of a search table than the text has matched, so long stop
strings cost nothing until the text follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_LOOKS = 8  # at places where a stop string may begin; more are left to the search


class StopChecker:
    """One sequence's stop strings. Owned by whoever owns the sequence."""

    __slots__ = ("_firsts", "_include", "_is_calm", "_searches", "matched")

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        self.matched: str | None = None
        self._searches = [_Search(pattern) for pattern in stop]
        self._firsts = tuple({pattern[0] for pattern in stop})
        self._include = include_stop_str_in_output
        self._is_calm = True  # nothing is held back, and nothing was matched

    def push(self, text: str) -> str:
        """The text that may be shown now; nothing more after a match."""
        if self._is_calm:
            for first in self._firsts:
                if first in text:
                    break
            else:
                return text
            if not self._may_begin(text):
                return text
        return self._push(text)

    def flush(self) -> str:
        """The end of the stream: what was held back, or nothing after a match."""
        if self.matched is not None:
            return ""
        pattern, num_held = self._held()
        self._searches, self._firsts, self._is_calm = [], (), True
        return pattern[:num_held]

    def _may_begin(self, text: str) -> bool:
        """Whether a stop string is in the text or begins at its end; also True where looking would
        take long."""
        num_looks = 0
        for search in self._searches:
            pattern = search.pattern
            place = text.find(pattern[0])
            while place >= 0:
                num_looks += 1
                if num_looks > MAX_LOOKS or pattern.startswith(text[place : place + len(pattern)]):
                    return True
                place = text.find(pattern[0], place + 1)
        return False

    def _push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        pattern, num_held = self._held()
        num_shown = num_held + len(text)  # of the held characters and the new ones together
        for end, char in enumerate(text, start=1):
            complete = [s.pattern for s in self._searches if s.advance(char)]
            if complete:
                self.matched = max(complete, key=len)
                num_shown = num_held + end - (0 if self._include else len(self.matched))
                self._is_calm = False
                break
        else:
            num_held_now = self._held().length
            num_shown -= num_held_now
            self._is_calm = num_held_now == 0
        return pattern[: min(num_held, num_shown)] + text[: max(num_shown - num_held, 0)]

    def _held(self) -> _Held:
        """The text held back, as a beginning of the stop string it may become, so that it needs
        no buffer and no copying."""
        longest = max(self._searches, key=lambda search: search.depth, default=None)
        return _Held("", 0) if longest is None else _Held(longest.pattern, longest.depth)


class _Held(NamedTuple):
    pattern: str
    length: int


class _Search:
    """Knuth, Morris and Pratt's search for one pattern, a character at a time."""

    __slots__ = ("_borders", "depth", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.depth = 0  # the longest end of the text that begins the pattern
        # _borders[d-1]: the longest proper beginning of pattern[:d] that also ends it.
        # Filled as deep as the text has come, which is as deep as it is read.
        self._borders = [0]

    def advance(self, char: str) -> bool:
        """Take the next character; True when it completes the pattern."""
        self.depth = self._extend(self.depth, char)
        if self.depth > len(self._borders):
            self._borders.append(self._extend(self._borders[-1], char))
        return self.depth == len(self.pattern)

    def _extend(self, depth: int, char: str) -> int:
        """The longest beginning of the pattern that ends a text which ended with
        pattern[:depth], after one more character. O(1) amortized over the text."""
        while depth and self.pattern[depth] != char:
            depth = self._borders[depth - 1]
        return depth + 1 if self.pattern[depth] == char else 0
