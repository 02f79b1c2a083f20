"""Sessions: prefixes that are evicted last, because a conversation will go on with them.

Owns whose prefix is pinned until when, and the budget. Must not know clocks (time is passed in)
nor what a prefix is for. Invariant: no more than `max_blocks` blocks are pinned for sessions; a
block of two sessions counts twice.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from .prefix_node import PrefixNode
from .tiers import KVTiers

_Key = tuple[str, str]  # cache salt, session id: nobody can touch the sessions of another salt


class _Session(NamedTuple):
    path: list[PrefixNode]
    expires_s: float


class Sessions:
    __slots__ = ("_expiries", "_max_blocks", "_num_blocks", "_sessions", "_tiers")

    def __init__(self, tiers: KVTiers, max_blocks: int) -> None:
        self._tiers = tiers
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._sessions: dict[_Key, _Session] = {}  # the one kept last is the last
        self._expiries: list[tuple[float, _Key]] = []  # a heap; of former paths too

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, key: _Key, path: list[PrefixNode], expires_s: float) -> None:
        """Instead of the session's former path. The oldest sessions make room; too long a path
        is kept as far as the budget goes."""
        path = path[: self._max_blocks]
        self._tiers.pin(path)  # before the former one is unpinned: most of it is the same
        self.drop(key)
        while self._sessions and self._num_blocks + len(path) > self._max_blocks:
            self.drop(next(iter(self._sessions)))
        if not path:
            return
        self._sessions[key] = _Session(path, expires_s)
        self._num_blocks += len(path)
        heapq.heappush(self._expiries, (expires_s, key))
        if len(self._expiries) > 2 * len(self._sessions) + 64:
            self._expiries = [(s.expires_s, key) for key, s in self._sessions.items()]
            heapq.heapify(self._expiries)

    def drop(self, key: _Key) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._num_blocks -= len(session.path)
            self._tiers.unpin(session.path)

    def expire(self, now_s: float) -> None:
        while self._expiries and self._expiries[0][0] <= now_s:
            _, key = heapq.heappop(self._expiries)
            session = self._sessions.get(key)
            if session is not None and session.expires_s <= now_s:
                self.drop(key)

    def pinned(self) -> list[PrefixNode]:
        """Once for each pin (for checks)."""
        return [node for session in self._sessions.values() for node in session.path]
