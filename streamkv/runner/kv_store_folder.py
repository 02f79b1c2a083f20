"""The folder of a KvStore: its lock, its segment files, and how much they take.

Owns which files there are and which blocks in them can be read. Knows no slots, no operations and
no threads: one at a time uses it. Invariants: one process has the folder; its segments never take
more than the limit; a block that was once found damaged is not given again; what is wrong with a
file is one line in the log.

Room is made by deleting whole segments, oldest first. A block lost with one is written anew, to a
newer one, when it is used again; of blocks with one digest the newest counts.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..protocol import StoredBlock
from .kv_cache import format_bytes
from .kv_segments import (
    INDEX_BITS,
    OPEN_FLAGS,
    SEGMENT_BYTES,
    Scan,
    SegmentFormat,
    UnusableError,
    write_all,
)

NAMES = re.compile(r"kv-([0-9]{8,18})\.segment")
SEGMENTS = 4  # at least as many fit, if a block is not larger, so that room can be made in parts

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Segment:
    path: Path
    num_bytes: int
    capacity: int = 0  # 0: nothing in it can be used
    fd: int = -1  # of one that this process writes, until it is synced
    num_written: int = 0
    live: set[int] = field(default_factory=set)  # indices of blocks that can be read

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class KvFolder:
    """Opened by the constructor, which makes and locks it. ConfigError if it can't be used."""

    def __init__(self, path: Path, limit_bytes: int, format: SegmentFormat) -> None:
        self.path, self._limit_bytes, self._format = path, limit_bytes, format
        self._capacity = format.capacity_for(min(SEGMENT_BYTES, limit_bytes // SEGMENTS))
        self._segments: dict[int, Segment] = {}  # by number, which is their age
        self._current = -1  # the one that is written
        self._next_number = 1
        self._dropped: list[int] = []
        self.unsynced: deque[Segment] = deque()  # finished, but not yet safe from the machine
        self._lock_fd = self._open()
        try:
            self.index = self._take_stock()  # what there was at the start, parents first
        except BaseException as error:
            os.close(self._lock_fd)
            if isinstance(error, OSError):
                raise self._unusable(error) from error
            raise

    def close(self) -> None:
        """Sync what was written and let go of the folder. OSError, after which it is closed."""
        try:
            self.end_segment()
            while self.unsynced:
                self.sync()
        finally:
            for segment in self._segments.values():
                segment.close()
            os.close(self._lock_fd)

    def take_dropped(self) -> tuple[int, ...]:
        """Records that are gone since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def read(self, block: StoredBlock, data: memoryview) -> bool:
        """Fill in `data`; if False, what is in it is of no use."""
        number, index = _place(block.record)
        segment = self._segments.get(number)
        if segment is None or index not in segment.live:
            return False
        try:
            fd = segment.fd if segment.fd >= 0 else os.open(segment.path, os.O_RDONLY | OPEN_FLAGS)
            try:
                self._format.read_block(fd, segment.capacity, index, block, data)
            finally:
                if fd != segment.fd:
                    os.close(fd)
            return True
        except FileNotFoundError:
            logger.warning("%s: somebody else deleted it: its KV blocks are gone", segment.path)
            self._drop(number)
        except UnusableError as error:
            logger.warning("%s: block %d is given up: %s", segment.path, index, error)
            self._give_up(segment, index)
        except OSError as error:
            logger.warning("%s: block %d can't be read: %s", segment.path, index, error)
            segment.live.discard(index)
        return False

    def write(self, block: StoredBlock, data: memoryview) -> int:
        """The record. OSError."""
        segment = self._segments.get(self._current) or self._new_segment()
        index = segment.num_written
        self._format.write_block(segment.fd, segment.capacity, index, block, data)
        segment.live.add(index)
        segment.num_written += 1
        record = self._current << INDEX_BITS | index
        if segment.num_written == segment.capacity:
            self.end_segment()
        return record

    def end_segment(self) -> None:
        """No more goes into the one that is written, if there is one. OSError."""
        number, self._current = self._current, -1
        segment = self._segments.get(number)
        if segment is None:
            return
        if segment.num_written:
            segment.num_bytes = os.fstat(segment.fd).st_size
            self.unsynced.append(segment)
        else:
            self._drop(number)

    def sync(self) -> None:
        """Have the next finished segment survive the machine, too. OSError."""
        segment = self.unsynced.popleft()
        try:
            if segment.fd >= 0:  # else it was deleted meanwhile
                os.fdatasync(segment.fd)
        finally:
            segment.close()

    # --- at the start ---

    def _open(self) -> int:
        """The descriptor that holds the lock, once the folder is known to be fit. ConfigError."""
        needed_bytes = self._format.file_bytes(1)
        if needed_bytes > self._limit_bytes:
            raise ConfigError(
                f"kv_cache_disk (--kv-cache-disk): expected at least {format_bytes(needed_bytes)}, "
                f"one KV block, got {format_bytes(self._limit_bytes)}; allow more, or leave out "
                "--kv-cache-dir"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._try_to_write()
        except OSError as error:
            os.close(lock_fd)
            if not isinstance(error, BlockingIOError):
                raise self._unusable(error) from error
            raise ConfigError(
                f"kv_cache_dir: expected a folder of this server's own, got {self.path}, which "
                "another one is using; stop that one, or give another folder with --kv-cache-dir"
            ) from error
        return lock_fd

    def _try_to_write(self) -> None:
        """As much as a block needs, so that a full disk is found now. OSError, but not for a disk
        that has segments: they may be what filled it, and can be read."""
        path = self.path / "probe"
        try:
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
            try:
                write_all(fd, memoryview(bytes(self._format.block_bytes)), 0)
            finally:
                os.close(fd)
                path.unlink()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._find():
                raise

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"kv_cache_dir: expected a folder that can be written, got {self.path}: "
            f"{error.strerror or error}; free some space or fix its permissions, give another one "
            "with --kv-cache-dir, or leave it out"
        )

    def _take_stock(self) -> list[StoredBlock]:
        """Find the files, delete what is too much, and return the index. OSError."""
        found = self._find()
        self._next_number = found[-1][0] + 1 if found else 1
        newest: dict[bytes, StoredBlock] = {}
        unusable: defaultdict[str, list[str]] = defaultdict(list)
        for number, path in found:
            try:
                scan = self._format.scan(path)
            except (OSError, UnusableError) as error:
                unusable[getattr(error, "strerror", None) or str(error)].append(path.name)
                if path.is_file() and not path.is_symlink():
                    self._segments[number] = Segment(path, path.stat().st_size)
                continue
            if scan.unusable:
                unusable[scan.unusable].append(path.name)
            self._take(number, path, scan, newest)
        for reason, names in unusable.items():
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            logger.warning("%s/%s%s: not used: %s", self.path, names[0], rest, reason)
        self._make_room(0)
        index = self._parents_first(newest)
        for block in index:
            number, place = _place(block.record)
            self._segments[number].live.add(place)
        for number in [n for n, one in self._segments.items() if one.capacity and not one.live]:
            self._drop(number)
        total = sum(segment.num_bytes for segment in self._segments.values())
        logger.info("%s: %d KV blocks, %s", self.path, len(index), format_bytes(total))
        return index

    def _find(self) -> list[tuple[int, Path]]:
        """What is named like our segments, the oldest first. OSError."""
        return sorted(
            (int(match[1]), path)
            for path in self.path.iterdir()
            if (match := NAMES.fullmatch(path.name))
        )

    def _take(self, number: int, path: Path, scan: Scan, newest: dict[bytes, StoredBlock]) -> None:
        if scan.skipped:
            num_entries = len(scan.blocks) + scan.skipped.total()
            counts = ", ".join(f"{count} {what}" for what, count in scan.skipped.items())
            logger.warning("%s: of %d KV blocks not used: %s", path, num_entries, counts)
        if not scan.num_bytes:
            path.unlink(missing_ok=True)
            return
        self._segments[number] = Segment(path, scan.num_bytes, scan.capacity)
        for block in scan.blocks:
            newest[block.digest] = block._replace(record=number << INDEX_BITS | block.record)

    def _parents_first(self, newest: dict[bytes, StoredBlock]) -> list[StoredBlock]:
        """Those whose files are still there. A block without a parent among them is the first of
        a prefix, as far as can be told here; a circle of parents is damage, and left out."""
        present = {
            digest: block
            for digest, block in newest.items()
            if _place(block.record)[0] in self._segments
        }
        children: defaultdict[bytes, list[StoredBlock]] = defaultdict(list)
        for block in present.values():
            children[block.parent].append(block)
        index = [
            block for parent, some in children.items() if parent not in present for block in some
        ]
        for block in index:  # grows meanwhile
            index.extend(children.get(block.digest, ()))
        return index

    # --- files ---

    def _new_segment(self) -> Segment:
        """Begin one, having made room for it. OSError."""
        num_bytes = self._format.file_bytes(self._capacity)
        self._make_room(num_bytes)
        number = self._next_number
        path = self.path / f"kv-{number:08d}.segment"
        fd = self._format.create(path, self._capacity)
        self._next_number, self._current = number + 1, number
        segment = self._segments[number] = Segment(path, num_bytes, self._capacity, fd)
        return segment

    def _make_room(self, num_bytes: int) -> None:
        """Delete files until so much more fits: those of no use first, then the oldest. OSError."""
        total = sum(segment.num_bytes for segment in self._segments.values()) + num_bytes
        for number in sorted(self._segments, key=lambda n: (self._segments[n].capacity > 0, n)):
            if total <= self._limit_bytes:
                break
            total -= self._segments[number].num_bytes
            self._drop(number)

    def _drop(self, number: int) -> None:
        """Delete a segment. OSError."""
        segment = self._segments[number]
        segment.path.unlink(missing_ok=True)
        segment.close()
        self._dropped += [number << INDEX_BITS | index for index in sorted(segment.live)]
        del self._segments[number]

    def _give_up(self, segment: Segment, index: int) -> None:
        """Never give that block again, nor after the next start."""
        segment.live.discard(index)
        with suppress(OSError):
            fd = os.open(segment.path, os.O_WRONLY | OPEN_FLAGS)
            try:
                self._format.erase_block(fd, index)
            finally:
                os.close(fd)


def _place(record: int) -> tuple[int, int]:
    """The segment's number, and which block of it."""
    return record >> INDEX_BITS, record & (1 << INDEX_BITS) - 1
