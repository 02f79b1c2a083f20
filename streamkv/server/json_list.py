"""JSON arrays that are written piece by piece.

Owns the pieces. Knows nothing of what is in them. Invariant: no piece takes long, so that a long
array doesn't hold up the event loop, as writing it in one go would: JSON is written at about
150 MB/s, and nothing else runs meanwhile. As JSON the items also take a fraction of the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from .wire import encode

PIECE_LEN = 8192

T = TypeVar("T")


class JsonList:
    """An array that grows, and can be put into a Struct as it is."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def extend(self, items: Sequence[Any]) -> None:
        """Write these items."""
        if items:
            self._pieces.append(encode(items)[1:-1])

    async def extend_long(self, items: Sequence[T], convert: Callable[[T], Any]) -> None:
        """Write any number of items, each as `convert` makes it, letting the loop run between."""
        for start in range(0, len(items), PIECE_LEN):
            self.extend([convert(item) for item in items[start : start + PIECE_LEN]])
            await asyncio.sleep(0)

    def raw(self, *more: JsonList) -> msgspec.Raw:
        """The whole array so far, and the items of others after its own."""
        lists = (self, *more)
        pieces = [piece for items in lists for piece in items._pieces]
        return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
