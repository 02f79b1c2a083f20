"""Reading memory-mapped tensors a few rows at a time, giving pages back behind the reader.

Owns the size of a chunk and the advice to the system. Knows no format. Invariant: what was read is
never needed in memory again, so loading takes the model's memory and a little more, however large
the files are; a page that is read again after all comes from the file again.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

CHUNK_VALUES = 1 << 17  # 512 KiB of float32: still in a core's cache when it is packed
ROW_MULTIPLE = 64  # packed weights are written in panels of outputs: whole ones are faster


class RowRange(NamedTuple):
    start: int
    end: int  # exclusive


def row_ranges(shape: Sequence[int], multiple: int = ROW_MULTIPLE) -> Iterator[RowRange]:
    """Ranges that cover the first dimension in order, about CHUNK_VALUES each and, but for the
    last one, a multiple of `multiple` rows. A vector is one range."""
    num_rows, *row_shape = shape
    row_values = max(1, math.prod(row_shape))
    step = max(1, CHUNK_VALUES // row_values // multiple) * multiple
    if not row_shape:
        step = max(1, num_rows)
    for start in range(0, num_rows, step):
        yield RowRange(start, min(start + step, num_rows))


def forget_pages(data: mmap.mmap, start: int, end: int) -> None:
    """Take the pages of bytes start .. end - 1 off this process. A last page that isn't wholly
    among them stays, for whoever reads on."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_DONTNEED") and first < last:
        data.madvise(mmap.MADV_DONTNEED, first, last - first)
