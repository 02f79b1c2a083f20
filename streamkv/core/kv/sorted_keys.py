"""SortedKeys: a set of byte strings in order, to find those with the longest common beginning.

Owns the order only. Invariant: chunks are sorted, none is empty, and each begins with the string
that `_firsts` says. Chunks keep the cost of a change nearly the same however many there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

_MAX_CHUNK_LEN = 512


class SortedKeys:
    __slots__ = ("_chunks", "_firsts")

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._chunks: list[list[bytes]] = []
        self._firsts: list[bytes] = []
        for key in keys:
            self.add(key)

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            yield from chunk

    def add(self, key: bytes) -> None:
        """It must not be there."""
        if not self._chunks:
            self._chunks.append([key])
            self._firsts.append(key)
            return
        place = max(bisect_right(self._firsts, key) - 1, 0)
        chunk = self._chunks[place]
        insort(chunk, key)
        self._firsts[place] = chunk[0]
        if len(chunk) > _MAX_CHUNK_LEN:
            half = len(chunk) // 2
            self._chunks.insert(place + 1, chunk[half:])
            self._firsts.insert(place + 1, chunk[half])
            del chunk[half:]

    def remove(self, key: bytes) -> None:
        """It must be there."""
        place = bisect_right(self._firsts, key) - 1
        chunk = self._chunks[place]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._firsts[place] = chunk[0]
        else:
            del self._chunks[place], self._firsts[place]

    def around(self, key: bytes, num: int) -> list[bytes]:
        """At most `num` before the place of `key`, and as many from there on.

        No other string has more in common with `key` from the beginning than the nearest of them.
        """
        if not self._chunks:
            return []
        place = max(bisect_right(self._firsts, key) - 1, 0)
        chunk = self._chunks[place]
        index = bisect_left(chunk, key)
        found = chunk[max(index - num, 0) : index + num]
        if index < num and place > 0:
            found += self._chunks[place - 1][index - num :]
        if index + num > len(chunk) and place + 1 < len(self._chunks):
            found += self._chunks[place + 1][: index + num - len(chunk)]
        return found
