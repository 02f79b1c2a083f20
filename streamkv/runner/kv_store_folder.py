"""The folder of a KvStore: its segment files, and how much they take.

Owns which files there are and which blocks in them can be read. Knows no slots, no operations and
no threads: one at a time uses it. Invariants: one process has the folder, and touches nothing in
it any more if it was deleted or replaced; its segments never take more than the limit; a block that
was once found damaged is not given again; each kind of thing that is wrong with a file is one line
in the log, and at the end one with their number, and so is what was deleted for the limit.

Room, up to the limit or on a full disk, is made by deleting whole segments: those that could never
fit, those of no use, then the oldest. A block lost with one is written anew, to a newer one, when
it is used again; of blocks with one digest the newest counts.
"""

from __future__ import annotations

import errno
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
from .kv_folder_lock import FolderLock, unusable
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
                    "%s: in all %d KV blocks can't be used: %s", self.path, count, reason
                )


class KvFolder:
    """Opened by the constructor, which makes and locks it. ConfigError if it can't be used.

    A disk that is full is no reason for that: `full` says that nothing can be written for now. If
    not even the lock can be made on it, that is tried again with each `write`.
    """

    def __init__(self, path: Path, limit_bytes: int, format: SegmentFormat) -> None:
        self.path, self._limit_bytes, self._format = path, limit_bytes, format
        self._check_limit()
        self._limit = f"--kv-cache-disk ({format_bytes(limit_bytes)})"
        self._deleted: Counter[str] = Counter()  # for that, since the start
        self._segments: dict[int, Segment] = {}  # by number, which is their age
        self._current = -1  # the one that is written
        self._next_number = 1
        self._dropped: list[int] = []
        self._is_lost = self._is_full_known = False
        self.unsynced: deque[Segment] = deque()  # finished, but not yet safe from the machine
        self._lock = FolderLock(path)
        self.index: list[StoredBlock] = []  # what there was at the start, parents first
        self.full: OSError | None = None
        try:
            self._open()
        except OSError as error:
            if not is_full(error):
                raise unusable(path, error) from error
            self.full = error

    def close(self) -> None:
        """Sync what was written and let go of the folder. OSError, after which it is closed."""
        try:
            if self._lock.is_held and self._is_ours():
                self.end_segment()
            while self.unsynced:
                self.sync()
        finally:
            for segment in self._segments.values():
                segment.log_faults()
                segment.close()
            if self._deleted["file"] > 1:
                gone = _in_words(self._deleted)
                logger.info("%s: deleted in all %s: as %s says", self.path, gone, self._limit)
            self._lock.release()

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

    def _check_limit(self) -> None:
        """ConfigError."""
        needed_bytes = self._format.file_bytes(1)
        if needed_bytes > self._limit_bytes:
            raise ConfigError(
                f"kv_cache_disk (--kv-cache-disk): expected at least {format_bytes(needed_bytes)}, "
                f"one KV block, got {format_bytes(self._limit_bytes)}; allow more, or leave out "
                "--kv-cache-dir"
            )

    def _open(self) -> None:
        """Lock the folder, and find what is there. OSError; if that is a full disk, and there is a
        lock, all but writing is possible. BlockingIOError: another server has it."""
        self._lock.take()
        try:
            self.index = self._take_stock()
            self._try_to_write()
        except BaseException as error:
            if not isinstance(error, OSError) or not is_full(error):
                self._lock.release()
            raise

    def _try_to_write(self) -> None:
        """As much as a block needs, so that a full disk is found now. OSError, but not for a disk
        that has segments: they may be what filled it, and are deleted for new ones."""
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
            if not is_full(error) or not self._segments:
                raise

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
        index = self._parents_first(newest)
        for block in index:
            number, place = _place(block.record)
            self._segments[number].live.add(place)
        for number, one in list(self._segments.items()):
            is_done = one.capacity and not one.live  # damaged, or written anew
            if (is_done or not one.num_bytes) and self._drop(number):
                logger.info("%s: deleted: nothing in it is of use", one.path)
        if gone := self._make_room(0):
            what = _in_words(gone)
            logger.warning("%s: deleted %s: more than %s allows", self.path, what, self._limit)
        index = [block for block in index if _place(block.record)[0] in self._segments]
        self._dropped.clear()  # nobody knew of them
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
        for block in scan.blocks:
            newest[block.digest] = block._replace(record=number << INDEX_BITS | block.record)

    @staticmethod
    def _parents_first(newest: dict[bytes, StoredBlock]) -> list[StoredBlock]:
        """A block without a parent among them is the first of a prefix, as far as can be told
        here; a circle of parents is damage, and left out."""
        children: defaultdict[bytes, list[StoredBlock]] = defaultdict(list)
        for block in newest.values():
            children[block.parent].append(block)
        index = [
            block for parent, some in children.items() if parent not in newest for block in some
        ]
        for block in index:  # grows meanwhile
            index.extend(children.get(block.digest, ()))
        return index

    # --- files ---

    def _is_ours(self) -> bool:
        """Whether the lock is still where it was; else nothing in the folder is used any more.
        OSError."""
        if not self._lock.is_held:  # the disk was too full for it
            self._open()
            self.index = []  # what was there is for the next start
        if not self._is_lost and not self._lock.is_there():
            self._is_lost = True
            logger.warning(
                "%s: the folder, or the file `lock` in it, was deleted or replaced: no KV blocks "
                "are read from it or written to it any more; restart the server to keep them again",
                self.path,
            )
            for number in list(self._segments):
                self._forget(number)
        return not self._is_lost

    def _num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self._segments.values())

    def _new_segment(self) -> Segment:
        """Begin one, having made room for it. OSError."""
        there_is = min(self._limit_bytes, self._num_bytes() + shutil.disk_usage(self.path).free)
        capacity = self._format.capacity_for(min(SEGMENT_BYTES, there_is // SEGMENTS))
        num_bytes = self._format.file_bytes(capacity)
        gone = self._make_room(num_bytes)
        if gone and not self._deleted:
            logger.info(
                "%s: %s is reached, so files are deleted for what is new: %s; more are only "
                "counted",
                self.path,
                self._limit,
                _in_words(gone),
            )
        self._deleted += gone
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

    def _make_room(self, num_bytes: int) -> Counter[str]:
        """Delete files until so much more fits, or there are none: which, as numbers. OSError."""
        total = self._num_bytes() + num_bytes
        gone: Counter[str] = Counter()
        for number in self._droppable():
            if total <= self._limit_bytes:
                break
            segment = self._segments[number]
            total -= segment.num_bytes
            if self._drop(number):
                gone.update(file=1, block=len(segment.live), byte=segment.num_bytes)
        return gone

    def _drop_oldest(self) -> bool:
        """Whether there was one to delete. OSError."""
        number = next(iter(self._droppable()), None)
        if number is not None:
            self._drop(number)
        return number is not None

    def _droppable(self) -> list[int]:
        """Those that can't be kept, those of no use, then the oldest; never the one that is
        written."""

        def order(number: int) -> tuple[bool, bool, int]:
            segment = self._segments[number]
            return segment.num_bytes <= self._limit_bytes, segment.capacity > 0, number

        return sorted((number for number in self._segments if number != self._current), key=order)

    def _drop(self, number: int) -> bool:
        """Delete a segment. One that can't be deleted is left out (False). OSError: none can be."""
        segment = self._segments[number]
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise
            self._leave_out(number, f"it can't be deleted: {error.strerror}")
            if left := self._segments.pop(number, None):
                self._limit_bytes -= left.num_bytes
            return False
        self._forget(number)
        return True

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
                "%s: KV block %d can't be used: %s; more like it in this file are only counted",
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


def _in_words(gone: Counter[str]) -> str:
    blocks = counted(gone["block"], "usable KV block")
    return f"{counted(gone['file'], 'file')} with {blocks}, {format_bytes(gone['byte'])}"


def _place(record: int) -> tuple[int, int]:
    """The segment's number, and which block of it."""
    return record >> INDEX_BITS, record & (1 << INDEX_BITS) - 1
