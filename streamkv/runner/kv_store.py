"""KvStore: KV blocks on disk, written from host slots and read back into them.

Owns the thread that does all work on the folder (kv_store_folder.py), and the operations that wait
for it. Knows neither what a digest is made of nor what is in a block. Invariants: each operation
has one result, unless the store is closed before; a slot is filled with the block that was asked
for, or the result says no; trouble with the disk is a line in the log and never an exception.

Reads go before writes, since a sequence waits for them. A write survives the process once its
result is there. It survives the machine only after the kernel has written it: `close` sees to that,
and idle moments do for each finished segment. What a machine lost is found by its checksum.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from ..protocol import StoredBlock, StoreOp, StoreResult
from ..words import counted
from .kv_segments import SegmentFormat
from .kv_store_folder import KvFolder, is_full

CLOSE_S = 10.0  # how long `close` goes on writing; what is left then isn't kept
RETRY_S = 60.0  # after a write has failed, as long none is tried
MAX_UNSYNCED = 4  # finished segments that wait for an idle moment

logger = logging.getLogger(__name__)


class KvStore:
    """The blocks of one model in `folder`, a BlockStore. `slots` is the host slots' memory, one
    after the other; `fingerprint` says what a block's bytes depend on besides the prefix.

    ConfigError if the folder can't be used. `slots` is in use until `close` has returned, and if
    the disk doesn't answer, until it does: the view keeps its memory alive.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        fingerprint: str,
        slots: memoryview,
        block_bytes: int,
        block_size: int,
    ) -> None:
        self._slots, self._block_bytes = slots.cast("B"), block_bytes
        format = SegmentFormat(fingerprint, block_bytes, block_size)
        self._folder = KvFolder(folder, limit_bytes, format)
        self._retry_at: float | None = None  # writing has failed, and is tried again then
        self._callback: Callable[[StoreResult], None] = lambda result: None
        if self._folder.full:
            self._stop_writing(self._folder.full)

        self._changed = threading.Condition()  # guards what is below
        self._reads: deque[StoreOp] = deque()
        self._writes: deque[StoreOp] = deque()
        self._close_by: float | None = None

        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    def index(self) -> Iterable[StoredBlock]:
        """What was there at the start, parents first. Handed over: the second time it is empty."""
        index, self._folder.index = self._folder.index, []
        return index

    def on_result(self, callback: Callable[[StoreResult], None]) -> None:
        """Call this with each result, on the store's thread. Before the first `submit`."""
        self._callback = callback

    def submit(self, op: StoreOp) -> None:
        """Begin; never waits for the disk. Results come in any order, and not after `close`."""
        with self._changed:
            if self._close_by is None:
                (self._writes if op.is_write else self._reads).append(op)
                self._changed.notify()

    def close(self) -> None:
        """Finish the writes that were submitted, within CLOSE_S, and drop the reads. Idempotent."""
        with self._changed:
            if self._close_by is None:
                self._close_by = time.monotonic() + CLOSE_S
            self._reads.clear()
            self._changed.notify()
        self._thread.join(CLOSE_S + 1.0)
        if self._thread.is_alive():
            logger.warning("%s: the disk doesn't answer; not waited for", self._folder.path)

    # --- the store's thread ---

    def _run(self) -> None:
        while self._wait():
            self._do_next()
        if self._writes:
            logger.warning(
                "%s: not kept, as writing took longer than %.0f s: %s",
                self._folder.path,
                CLOSE_S,
                counted(len(self._writes), "KV block"),
            )
        try:
            self._folder.close()
        except OSError as error:
            logger.warning("%s: KV blocks may be lost: %s", self._folder.path, error)
        self._slots.release()

    def _wait(self) -> bool:
        """Until there is something to do; False: it is time to end."""
        with self._changed:
            while not (self._reads or self._writes or self._folder.unsynced):
                if self._close_by is not None:
                    return False
                self._changed.wait()
            return self._close_by is None or time.monotonic() < self._close_by

    def _do_next(self) -> None:
        """A read, or else a write, or else sync a segment; too many of those don't wait."""
        with self._changed:
            op = self._reads.popleft() if self._reads else None
            if op is None and self._writes and len(self._folder.unsynced) <= MAX_UNSYNCED:
                op = self._writes.popleft()
        if op is None:
            self._sync()
            return
        ok, record = False, -1
        try:
            with self._slot(op.slot) as data:
                if op.is_write:
                    ok, record = self._write(op.block, data)
                else:
                    ok = self._folder.read(op.block, data)
        except Exception:  # a mistake of the caller or here: this operation's alone
            logger.exception("%s: an operation on a KV block failed", self._folder.path)
        result = StoreResult(op.number, ok, record, self._folder.take_dropped())
        if self._close_by is None:
            try:
                self._callback(result)
            except Exception:
                logger.exception("%s: a result can't be delivered", self._folder.path)

    def _slot(self, slot: int) -> memoryview:
        num_slots = len(self._slots) // self._block_bytes
        if not 0 <= slot < num_slots:
            raise ValueError(f"slot: expected 0 to {num_slots - 1}, got {slot}")
        return self._slots[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def _write(self, block: StoredBlock, data: memoryview) -> tuple[bool, int]:
        """Whether it didn't fail, and the record; -1 if it isn't written."""
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return True, -1
        try:
            record = self._folder.write(block, data)
        except OSError as error:
            self._stop_writing(error)
            return False, -1
        if record >= 0 and self._retry_at is not None:
            self._retry_at = None
            logger.info("%s: KV blocks are written again", self._folder.path)
        return True, record

    def _sync(self) -> None:
        if self._folder.unsynced:  # else `close` took the read that there was
            try:
                self._folder.sync()
            except OSError as error:
                self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        """For a while. The warning comes once, until there is success."""
        if self._retry_at is None:
            remedy = "check the disk"
            if is_full(error):
                remedy = "free some space, or lower --kv-cache-disk"
            logger.warning(
                "%s: KV blocks are only read and not written (it is tried every %.0f s): %s; %s",
                error.filename or self._folder.path,
                RETRY_S,
                error.strerror or error,
                remedy,
            )
        self._retry_at = time.monotonic() + RETRY_S
        try:
            self._folder.end_segment()  # nothing is added to one that may have been spoiled
        except OSError:
            logger.debug("%s: the segment could not be ended", self._folder.path)
