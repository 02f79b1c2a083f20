"""The folder of a KvStore: its lock, its segment files, and how much they take.

Owns which files there are and which blocks in them can be read. Knows no slots, no operations and
no threads: one at a time uses it. Invariants: one process has the folder, and touches nothing in
it any more if it was deleted or replaced; its segments never take more than the limit; a block that
was once found damaged is not given again; each kind of thing that is wrong with a file is one line
in the log, and at the end one with their number.

Room, up to the limit or on a full disk, is made by deleting whole segments, oldest first. A block
lost with one is written anew, to a newer one, when it is used again; of blocks with one digest the
newest counts.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..protocol import StoredBlock
from ..words import counted, format_bytes
from .kv_segments import (
    INDEX_BITS,
    OPEN_FLAGS,
    SEGMENT_BYTES,
    Scan,
    SegmentFormat,
    UnusableError,
    is_regular,
    write_all,
)

NAMES = re.compile(r"kv-([0-9]{8,18})\.segment")
SEGMENTS = 4  # at least as many fit, if a block is not larger, so that room can be made in parts
DELETED = "somebody else deleted it"
NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)  # of opening what should be one
FORBIDDEN = (errno.EACCES, errno.EROFS)  # of deleting a file: that is about the folder

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Segment:
    path: Path
    num_bytes: int
    capacity: int = 0  # 0: nothing in it can be used
    fd: int = -1  # of one that this process writes, until it is synced
    num_written: int = 0
    live: set[int] = field(default_factory=set)  # indices of blocks that can be read
    faults: Counter[str] = field(default_factory=Counter)  # blocks given up, by the reason

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def log_faults(self) -> None:
        for reason, count in self.faults.items():
            if count > 1:
                logger.warning(
                    "%s: in all %d KV blocks were given up: %s", self.path, count, reason
                )


class KvFolder:
    """Opened by the constructor, which makes and locks it. ConfigError if it can't be used."""

    def __init__(self, path: Path, limit_bytes: int, format: SegmentFormat) -> None:
        self.path, self._limit_bytes, self._format = path, limit_bytes, format
        self._segments: dict[int, Segment] = {}  # by number, which is their age
        self._current = -1  # the one that is written
        self._next_number = 1
        self._dropped: list[int] = []
        self._is_lost = self._is_full_known = False
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
            if self._is_ours():
                self.end_segment()
            while self.unsynced:
                self.sync()
        finally:
            for segment in self._segments.values():
                segment.log_faults()
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
        except (OSError, UnusableError) as error:
            self._on_fault(number, index, error)
        return False

    def write(self, block: StoredBlock, data: memoryview) -> int:
        """The record; -1 if the folder isn't ours any more. OSError."""
        while self._is_ours():
            try:
                return self._write(block, data)
            except OSError as error:
                if not is_full(error) or not self._drop_oldest():
                    raise
                if not self._is_full_known:
                    self._is_full_known = True
                    logger.warning(
                        "%s: %s: the oldest KV blocks are deleted for new ones; free some space, "
                        "or lower --kv-cache-disk",
                        self.path,
                        error.strerror,
                    )
        return -1

    def _write(self, block: StoredBlock, data: memoryview) -> int:
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
        status = os.fstat(segment.fd)
        if not status.st_nlink:
            self._leave_out(number, DELETED)
        elif segment.num_written:
            segment.num_bytes = status.st_size
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
                "kv_cache_dir (--kv-cache-dir): expected a folder of this server's own, got "
                f"{self.path}, which another one is using; stop that one, or give another folder "
                "with --kv-cache-dir"
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
            if not is_full(error) or not self._find():
                raise

    def _unusable(self, error: OSError) -> ConfigError:
        where = Path(error.filename or self.path)
        what = "" if where == self.path else f"{where}: "
        remedy = ""
        if is_full(error):
            remedy = "free some space, "
        elif isinstance(error, PermissionError):
            remedy = "fix its permissions, "
        elif where.parent == self.path and error.errno in NO_FILE:
            remedy = "delete that, "
        return ConfigError(
            "kv_cache_dir (--kv-cache-dir): expected a folder that can be written, got "
            f"{self.path}: {what}{error.strerror or error}; {remedy}give another one "
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
                self._note_useless(number, path)
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
        taken = f"{format_bytes(self._num_bytes())} on disk"
        logger.info("%s: %s to be found, %s", self.path, counted(len(index), "KV block"), taken)
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
            entries = counted(num_entries, "KV block")
            logger.warning("%s: of %s not used: %s", path, entries, counts)
        self._segments[number] = Segment(path, scan.num_bytes, scan.capacity)
        if not scan.num_bytes:
            self._drop(number)
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

    def _is_ours(self) -> bool:
        """Whether the lock is still where it was; else nothing in the folder is used any more.
        OSError."""
        if not self._is_lost and not self._has_lock():
            self._is_lost = True
            logger.warning(
                "%s: the folder, or the file `lock` in it, was deleted or replaced: no KV blocks "
                "are read from it or written to it any more; restart the server to keep them again",
                self.path,
            )
            for number in list(self._segments):
                self._forget(number)
        return not self._is_lost

    def _has_lock(self) -> bool:
        """OSError."""
        try:
            there = os.lstat(self.path / "lock")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(self._lock_fd))

    def _num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self._segments.values())

    def _new_segment(self) -> Segment:
        """Begin one, having made room for it. OSError."""
        there_is = min(self._limit_bytes, self._num_bytes() + shutil.disk_usage(self.path).free)
        capacity = self._format.capacity_for(min(SEGMENT_BYTES, there_is // SEGMENTS))
        num_bytes = self._format.file_bytes(capacity)
        self._make_room(num_bytes)
        if self._num_bytes() + num_bytes > self._limit_bytes:
            raise OSError(errno.ENOSPC, "No room beside the files that can't be deleted")
        while True:
            number = self._next_number
            self._next_number += 1
            path = self.path / f"kv-{number:08d}.segment"
            try:
                fd = self._format.create(path, capacity)
                break
            except FileExistsError:
                logger.warning("%s: somebody else made it: it is left alone", path)
        self._current = number
        segment = self._segments[number] = Segment(path, num_bytes, capacity, fd)
        return segment

    def _make_room(self, num_bytes: int) -> None:
        """Delete files until so much more fits, or there are none. OSError."""
        total = self._num_bytes() + num_bytes
        for number in self._droppable():
            if total <= self._limit_bytes:
                break
            total -= self._segments[number].num_bytes
            self._drop(number)

    def _drop_oldest(self) -> bool:
        """Whether there was one to delete. OSError."""
        number = next(iter(self._droppable()), None)
        if number is not None:
            self._drop(number)
        return number is not None

    def _droppable(self) -> list[int]:
        """Those of no use, then the oldest; never the one that is written."""
        return sorted(
            (number for number in self._segments if number != self._current),
            key=lambda number: (self._segments[number].capacity > 0, number),
        )

    def _drop(self, number: int) -> None:
        """Delete a segment. One that can't be deleted is left out. OSError: none can be."""
        segment = self._segments[number]
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise
            self._leave_out(number, f"it can't be deleted: {error.strerror}")
            if left := self._segments.pop(number, None):
                self._limit_bytes -= left.num_bytes
        else:
            self._forget(number)

    def _leave_out(self, number: int, reason: str) -> None:
        """Use nothing of it any more."""
        segment = self._segments[number]
        blocks = counted(len(segment.live), "KV block")
        logger.warning("%s: given up, with %s: %s", segment.path, blocks, reason)
        self._forget(number)
        self._note_useless(number, segment.path)

    def _note_useless(self, number: int, path: Path) -> None:
        """If it is a file, it takes room, and is deleted when that is needed."""
        with suppress(OSError):
            if is_regular(path):
                self._segments[number] = Segment(path, path.stat().st_size)

    def _forget(self, number: int) -> None:
        segment = self._segments.pop(number)
        segment.log_faults()
        segment.close()
        self._dropped += [number << INDEX_BITS | index for index in sorted(segment.live)]
        if number == self._current:
            self._current = -1

    def _on_fault(self, number: int, index: int, error: OSError | UnusableError) -> None:
        """Give up the block, or the whole file if that isn't what it was."""
        segment, reason = self._segments[number], ""
        try:
            if not self._is_ours():
                return
            self._format.check(segment.path)
        except FileNotFoundError:
            reason = DELETED
        except UnusableError as found:
            reason = str(found)
        except OSError:  # then the block alone
            pass
        if reason:
            self._leave_out(number, reason)
        else:
            self._give_up(segment, index, error)

    def _give_up(self, segment: Segment, index: int, error: OSError | UnusableError) -> None:
        """Never give that block again; if it is damaged, not after the next start either."""
        segment.live.discard(index)
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        segment.faults[reason] += 1
        if segment.faults[reason] == 1:
            logger.warning(
                "%s: block %d is given up: %s; more of the kind in this file are only counted",
                segment.path,
                index,
                reason,
            )
        if isinstance(error, OSError):
            return
        with suppress(OSError):
            fd = os.open(segment.path, os.O_WRONLY | OPEN_FLAGS)
            try:
                self._format.erase_block(fd, index)
            finally:
                os.close(fd)


def is_full(error: OSError) -> bool:
    """Whether it is that there is no more room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _place(record: int) -> tuple[int, int]:
    """The segment's number, and which block of it."""
    return record >> INDEX_BITS, record & (1 << INDEX_BITS) - 1
