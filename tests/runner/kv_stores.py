"""Support for the tests of KvStore: blocks whose content is known from their number."""

from __future__ import annotations

import hashlib
import logging
import threading
from contextlib import contextmanager
from pathlib import Path

from streamkv.protocol import StoredBlock, StoreOp, StoreResult, pack_ints
from streamkv.runner.kv_store import KvStore

BLOCK_BYTES, BLOCK_SIZE, NUM_SLOTS = 3000, 4, 8
SMALL = 46_000  # of a limit: segments of two blocks, four of them


def digest_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def block(number: int, parent: int | None = None, record: int = -1) -> StoredBlock:
    """Of a chain, unless it has another parent."""
    above = digest_of(number - 1 if parent is None else parent)
    return StoredBlock(record, digest_of(number), above, pack_ints([number] * BLOCK_SIZE))


def content_of(number: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(num_bytes)


def number_of(stored: StoredBlock) -> int:
    return int.from_bytes(stored.token_ids[:4], "little")


class Driver:
    """A store with its slots, used one operation at a time or many."""

    def __init__(self, folder: Path, *, num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES, **changes):
        self.block_bytes = block_bytes
        self.memory = bytearray(num_slots * block_bytes)
        self.results: dict[int, StoreResult] = {}
        self.order: list[int] = []
        self._came = threading.Condition()
        self._number = 0
        options = {"limit_bytes": 1 << 30, "fingerprint": "a model", "block_size": BLOCK_SIZE}
        self.store = KvStore(
            folder,
            slots=memoryview(self.memory),
            block_bytes=block_bytes,
            **(options | changes),
        )
        self.index = list(self.store.index())
        self.store.on_result(self._take)

    def _take(self, result: StoreResult) -> None:
        with self._came:
            assert result.number not in self.results
            assert threading.current_thread().name == "kv-store"
            self.results[result.number] = result
            self.order.append(result.number)
            self._came.notify_all()

    def submit(self, stored: StoredBlock, *, slot: int = 0, is_write: bool) -> int:
        self._number += 1
        self.store.submit(StoreOp(self._number, slot, stored, is_write))
        return self._number

    def result(self, number: int) -> StoreResult:
        with self._came:
            assert self._came.wait_for(lambda: number in self.results, 20)
            return self.results[number]

    def fill(self, slot: int, content: bytes) -> None:
        self.memory[slot * self.block_bytes : (slot + 1) * self.block_bytes] = content

    def slot(self, slot: int) -> bytes:
        return bytes(self.memory[slot * self.block_bytes : (slot + 1) * self.block_bytes])

    def write(self, number: int, slot: int = 0, **kwargs) -> StoreResult:
        self.fill(slot, content_of(number, self.block_bytes))
        return self.result(self.submit(block(number, **kwargs), slot=slot, is_write=True))

    def read(self, stored: StoredBlock, slot: int = 1) -> bytes | None:
        self.fill(slot, b"\xee" * self.block_bytes)
        result = self.result(self.submit(stored, slot=slot, is_write=False))
        assert result.record == -1
        return self.slot(slot) if result.ok else None


@contextmanager
def opened(folder: Path, **changes):
    driver = Driver(folder, **changes)
    try:
        yield driver
    finally:
        driver.store.close()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("kv-*.segment"))


def warned(caplog) -> list[str]:
    """The warnings in the log since the last call."""
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    caplog.clear()
    return lines
