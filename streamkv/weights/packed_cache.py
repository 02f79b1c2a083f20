"""Packed weights on disk: what loading made of a checkpoint, as bytes for the next start.

Owns the files of a folder: their names, their contents and how many there may be. Knows no formats:
bytes go from and to the buffers it is given. Invariant: what `read` fills in is what `write` was
given for the same checkpoint and the same kernels; a file that is cut, foreign or damaged is left
out with one line in the log, and trouble with the folder never ends a load.

A file is read into the weights' own memory and not mapped: that has huge pages, and a file cut by
others is a line in the log and not a signal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..ops import Parameter
from ..words import format_bytes
from .formats import MADE, Formats, StoredTensors, is_made, packed_bytes, row_bytes
from .jobs import Job, Progress, run_jobs
from .reading import Bytes

MAGIC = b"SKVPACK2"
HEADER = struct.Struct("<8s32sQ")  # magic, key, how many pieces; then a check of each, a digest
DIGEST_BYTES = 32
PIECE_BYTES = 4 << 20
DATA_ALIGNMENT = 4096
CHECK_ROWS, CHECK_COLUMNS = 128, 1024  # of 8 bytes: 1 MiB, which a core's cache holds
NAMES = re.compile(r"[0-9a-f]{64}\.([^.]*\.tmp|bin)")
# Less isn't worth a file: of blocks as a checkpoint has them a GiB is packed in half a second, and
# reading it takes a third of that; of weights that are quantized first, a tenth or less.
WORTH_BYTES, WORTH_MADE_BYTES = 512 << 20, 16 << 20
STALE_S = 3600  # an unfinished file as old is of a process that was killed

logger = logging.getLogger(__name__)


class _Unusable(Exception):
    """Why packed weights can't be read, or not be kept."""


class _Piece(NamedTuple):
    data: Bytes  # some of a buffer
    start: int  # in the file


class PackedFile:
    """The file of one key, and the buffers that it is for, multiples of 8 bytes each."""

    def __init__(self, folder: Path, key: str, buffers: Sequence[Bytes]) -> None:
        self._folder, self._key = folder, bytes.fromhex(key)
        self._path = folder / f"{key}.bin"
        self.num_bytes = sum(buffer.nbytes for buffer in buffers)
        views = [
            buffer[start : start + PIECE_BYTES]
            for buffer in buffers
            for start in range(0, buffer.nbytes, PIECE_BYTES)
        ]
        self._header_bytes = HEADER.size + 8 * len(views) + DIGEST_BYTES
        data_start = -(-self._header_bytes // DATA_ALIGNMENT) * DATA_ALIGNMENT
        self._pieces = list(_placed(views, data_start))
        self._file_bytes = data_start + self.num_bytes

    def read(self, max_bytes: int, num_threads: int, done: Progress) -> bool:
        """Fill the buffers; if False, what is in them is of no use. What is more than `max_bytes`
        of the folder is deleted first, this file last."""
        try:
            _shrink(self._folder, max_bytes, last=self._path)
            # A pipe must not be waited for: it is found to have no bytes.
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            return self._leave_out(error)
        try:
            sums = self._check_header(fd)
            jobs = [
                Job(piece.data.nbytes, partial(_read_piece, fd, piece, expected))
                for piece, expected in zip(self._pieces, sums, strict=True)
            ]
            run_jobs(jobs, num_threads, done)
            with contextlib.suppress(OSError):
                os.utime(fd)  # the last one used
            logger.info(
                "packed weights (%s) read from %s", format_bytes(self.num_bytes), self._path
            )
        except (OSError, _Unusable) as error:
            return self._leave_out(error)
        finally:
            os.close(fd)
        return True

    def write(self, max_bytes: int, num_threads: int, done: Progress) -> None:
        """Keep what is in the buffers, and delete what was used longest ago, so that the folder
        has at most `max_bytes`."""
        try:
            self._make_room(max_bytes)
            self._write(num_threads, done)
            logger.info(
                "packed weights (%s) kept for the next start: %s",
                format_bytes(self.num_bytes),
                self._path,
            )
        except (OSError, _Unusable) as error:
            logger.warning("%s: packed weights are not kept there: %s", self._folder, error)

    def _leave_out(self, error: Exception) -> bool:
        logger.warning("%s: not used, the weights are packed again: %s", self._path, error)
        return False

    def _check_header(self, fd: int) -> list[int]:
        """The check of each piece."""
        num_bytes = os.fstat(fd).st_size
        if num_bytes != self._file_bytes:
            raise _Unusable(f"expected {self._file_bytes} bytes, got {num_bytes}")
        header = os.pread(fd, self._header_bytes, 0)
        content, digest = header[:-DIGEST_BYTES], header[-DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise _Unusable("the header is damaged")
        if HEADER.unpack_from(content) != (MAGIC, self._key, len(self._pieces)):
            raise _Unusable("it belongs to another model")
        return list(struct.unpack_from(f"<{len(self._pieces)}Q", content, HEADER.size))

    def _make_room(self, max_bytes: int) -> None:
        if self._file_bytes > max_bytes:
            raise _Unusable(
                f"they take {format_bytes(self._file_bytes)}, --packed-cache-gib allows "
                f"{format_bytes(max_bytes)}"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        _delete_oldest(self._folder, max_bytes - self._file_bytes, self._path)  # to be replaced
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < 2 * self._file_bytes:
            raise _Unusable(
                f"expected {format_bytes(2 * self._file_bytes)} of free disk space, got "
                f"{format_bytes(free_bytes)}"
            )

    def _write(self, num_threads: int, done: Progress) -> None:
        """Under another name until it is whole."""
        fd, temporary = tempfile.mkstemp(".tmp", f"{self._key.hex()}.", self._folder)
        try:
            sums = [0] * len(self._pieces)

            def write_piece(index: int) -> None:
                sums[index] = _write_piece(fd, self._pieces[index])

            jobs = [
                Job(piece.data.nbytes, partial(write_piece, index))
                for index, piece in enumerate(self._pieces)
            ]
            run_jobs(jobs, num_threads, done)
            content = HEADER.pack(MAGIC, self._key, len(sums)) + struct.pack(
                f"<{len(sums)}Q", *sums
            )
            os.pwrite(fd, content + hashlib.sha256(content).digest(), 0)
            os.replace(temporary, self._path)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)


def _placed(views: Sequence[Bytes], start: int) -> Iterator[_Piece]:
    for view in views:
        yield _Piece(view, start)
        start += view.nbytes


def _read_piece(fd: int, piece: _Piece, expected: int) -> None:
    check = _Check()
    for part in _parts(piece):
        done, data = 0, part.data
        while done < data.nbytes:
            num_bytes = os.preadv(fd, [data.data[done:]], part.start + done)
            if not num_bytes:
                raise _Unusable("it was cut while it was read")
            done += num_bytes
        check.add(data)
    if check.value != expected:
        end = piece.start + piece.data.nbytes
        raise _Unusable(f"damaged between bytes {piece.start} and {end}")


def _write_piece(fd: int, piece: _Piece) -> int:
    check = _Check()
    for part in _parts(piece):
        done, data = 0, part.data
        while done < data.nbytes:
            done += os.pwrite(fd, data.data[done:], part.start + done)
        check.add(data)
    return check.value


def _parts(piece: _Piece) -> Iterator[_Piece]:
    """As large as they are checked."""
    num_bytes = 8 * CHECK_ROWS * CHECK_COLUMNS
    for start in range(0, piece.data.nbytes, num_bytes):
        yield _Piece(piece.data[start : start + num_bytes], piece.start + start)


class _Check:
    """A digest of the sums of 64-bit words over rows and columns of a table: damage to a disk,
    holes in a file and words in each other's place change it. A GiB takes two threads 50 ms, where
    reading it takes 100 ms if it is in memory and far longer if it isn't."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, data: Bytes) -> None:
        """The next part, a multiple of 8 bytes."""
        words = data.view(np.uint64)
        num_whole = len(words) // CHECK_COLUMNS * CHECK_COLUMNS
        rows = words[:num_whole].reshape(-1, CHECK_COLUMNS)
        self._digest.update(np.add.reduce(rows, axis=0))
        self._digest.update(np.add.reduce(rows, axis=1))
        self._digest.update(words[num_whole:].data)

    @property
    def value(self) -> int:
        return int.from_bytes(self._digest.digest(), "little")


def _shrink(folder: Path, max_bytes: int, last: Path) -> None:
    """Delete what was used longest ago, `last` after all others, until the folder has at most
    `max_bytes`. FileNotFoundError without a folder."""
    try:
        last_bytes = last.stat().st_size
    except FileNotFoundError:
        last_bytes = 0
    if last_bytes > max_bytes:
        last.unlink()
        last_bytes = 0
    _delete_oldest(folder, max_bytes - last_bytes, last)


def _delete_oldest(folder: Path, max_bytes: int, other: Path) -> None:
    """Until all files but `other` take at most `max_bytes`."""
    left_bytes = max_bytes
    for path, stat in _newest_first(folder):
        if path == other:
            continue
        left_bytes -= stat.st_size
        is_stale = time.time() - stat.st_mtime > STALE_S
        if is_stale if path.suffix == ".tmp" else left_bytes < 0:
            path.unlink(missing_ok=True)


def _newest_first(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Our files in the folder, those used last first."""
    found = []
    for path in folder.iterdir():
        if NAMES.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # deleted by another process
                found.append((path, path.stat()))
    return sorted(found, key=lambda item: -item[1].st_mtime_ns)


def is_worth_keeping(
    source: StoredTensors, parameters: Sequence[Parameter], formats: Formats
) -> bool:
    """Whether a start that finds these packed is noticeably quicker."""
    made = [one for one in parameters if is_made(source, one, formats)]
    return (
        packed_bytes(parameters, formats) >= WORTH_BYTES
        or packed_bytes(made, formats) >= WORTH_MADE_BYTES
    )


def packed_key(
    cpu: ModuleType, identity: Sequence[Any], parameters: Sequence[Parameter], formats: Formats
) -> str:
    """What packed weights depend on, in 64 hexadecimal digits: the files, what was made of them,
    and how the kernels lay out and quantize each format."""
    used = sorted({name for one in parameters for name in formats[one.name]})
    facts = [
        identity,
        [(one.name, one.parts, one.is_paired, formats[one.name]) for one in parameters],
        [_fingerprint(cpu, name) for name in used],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _fingerprint(cpu: ModuleType, name: str, num_rows: int = 40, depth: int = 512) -> str:
    """Of what the kernels make of some rows of a format: another layout gives another one."""
    count = np.arange(num_rows * depth, dtype=np.uint32)
    scattered = count * np.uint32(2654435761) >> np.uint32(8)
    digest = hashlib.sha256()
    if name in MADE:
        values = scattered.astype(np.float32) * np.float32(2**-23) - np.float32(1)  # exactly
        source = cpu.quantize(values.reshape(num_rows, depth), name)
        digest.update(source)
    else:
        num_bytes = num_rows * row_bytes(name, depth)
        source = np.resize(scattered.astype(np.uint8), num_bytes).reshape(num_rows, -1)
    weight = cpu.QuantizedWeight([name], [num_rows], depth)
    weight.pack(source, 0, 0)
    for buffer in weight.buffers():
        digest.update(buffer)
    return digest.hexdigest()
