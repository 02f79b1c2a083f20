"""Reading tensors a few rows at a time from files that others may cut or rewrite meanwhile.

Owns the size of a chunk and the open file. Knows no format. Invariant: bytes come from positional
reads, never through a memory map, so a file that shrinks under the reader is one ModelLoadError and
not a signal; what is in memory of a file is what its reader asked for last.
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError
from ..files import is_file, unreadable

CHUNK_VALUES = 1 << 17  # 512 KiB of float32: still in a core's cache when it is packed
ROW_MULTIPLE = 64  # packed weights are written in panels of outputs: whole ones are faster

Bytes = NDArray[np.uint8]


class RowRange(NamedTuple):
    start: int
    end: int  # exclusive


def row_ranges(
    shape: Sequence[int], multiple: int = ROW_MULTIPLE, rows: RowRange | None = None
) -> Iterator[RowRange]:
    """Ranges that cover `rows` (None: the first dimension) in order, about CHUNK_VALUES each and,
    but for the last one, a multiple of `multiple` rows. A vector is one range."""
    num_rows, *row_shape = shape
    first, end = rows or (0, num_rows)
    row_values = max(1, math.prod(row_shape))
    step = max(1, CHUNK_VALUES // row_values // multiple) * multiple
    if not row_shape:
        step = max(1, num_rows)
    for start in range(first, end, step):
        yield RowRange(start, min(start + step, end))


class CheckpointFile:
    """A regular file, open until `close` or until nobody has it. Several threads may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        is_file(path)  # which raises for what may never end when it is read
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as exc:
            raise unreadable(path, exc) from exc
        self._close = weakref.finalize(self, os.close, self._fd)
        self.opened = os.fstat(self._fd)
        if not self.opened.st_size:
            raise ModelLoadError(f"{path}: cannot be read: the file is empty; get it again")

    @property
    def size(self) -> int:
        """In bytes, when it was opened."""
        return self.opened.st_size

    def read_into(self, buffer: Bytes, start: int, what: str) -> None:
        """Fill `buffer` with the bytes from `start` on. ModelLoadError, about `what`, if the file
        ends before, as it does if it was cut after it was opened."""
        if not self._close.alive:
            raise ValueError(f"{self.path} is closed")
        done = 0
        while done < buffer.nbytes:
            try:
                num_bytes = os.preadv(self._fd, [buffer.data[done:]], start + done)
            except OSError as exc:
                raise unreadable(self.path, exc, what) from exc
            if not num_bytes:
                raise ModelLoadError(
                    f"{self.path}: truncated while it was read: {what} needs bytes {start} to "
                    f"{start + buffer.nbytes}, the file ends at {start + done}; get it again"
                )
            done += num_bytes

    def read(self, start: int, num_bytes: int, what: str) -> bytes:
        buffer = np.empty(num_bytes, np.uint8)
        self.read_into(buffer, start, what)
        return buffer.tobytes()

    def check_unchanged(self) -> None:
        """Raise ModelLoadError if the file was written to since it was opened. One that was put in
        its place is another file, and doesn't matter to this one's readers."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self.opened.st_size, self.opened.st_mtime_ns):
            raise self.changed()

    def identity(self, num_header_bytes: int) -> tuple[Any, ...]:
        """What tells this file from another and from itself written to: the same as long as it
        wasn't, in all likelihood."""
        opened = self.opened
        header = hashlib.sha256(self.read(0, num_header_bytes, "the header")).hexdigest()
        changed = (opened.st_mtime_ns, opened.st_ctime_ns)  # the latter, whatever a copy restores
        return (str(self.path.resolve()), opened.st_size, *changed, header)

    def changed(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: changed while it was read; load it again when nothing writes to it"
        )

    def close(self) -> None:
        self._close()
