"""Segment files: KV blocks on disk, as bytes.

Owns the format, and what may be wrong with a file. Knows neither the folder nor who reads or
writes. Invariant: a block that `read_block` fills in is the one that `write_block` was given under
the same digest, parent and tokens; whatever else a file holds is a reason not to use it.

    header    magic, version, what a block is, how many there may be, whose they are; a CRC   4 KiB
    table     of each block its entry: digests, tokens, the CRC of the block; a CRC
    blocks    as they lie in memory

An entry is written after its block. So one that is there has a whole block unless the machine
stopped; damage to one hides no other; and the tables are all there is to read to know what a folder
has, in one piece for each file. Entries are a power of two in size: none lies on two pages.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..protocol import StoredBlock

MAGIC = b"SKVBLCKS"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32s")  # magic, version, block_size, block_bytes, capacity, whose
HEADER_BYTES = 4096
ENTRY_MAGIC = b"BLCK"
ENTRY = struct.Struct("<4sIQI32s32s")  # magic, index, block_bytes, CRC, parent, digest; then tokens
CRC = struct.Struct("<I")  # the last bytes of a header and of an entry, over all before
DIGEST_BYTES = 32
ALIGNMENT = 512
SEGMENT_BYTES = 64 << 20
INDEX_BITS = 20  # of a record's number: which block of its segment
OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not be waited for


class UnusableError(Exception):
    """Why a file, or a block in it, can't be used."""


class Scan(NamedTuple):
    """What a file has: blocks, how many entries are of no use and why, or why all of it is not."""

    num_bytes: int
    capacity: int = 0
    blocks: tuple[StoredBlock, ...] = ()  # `record` is the index in the file
    skipped: Counter[str] = Counter()
    unusable: str = ""


class SegmentFormat:
    """Segments of one model's blocks. `fingerprint` says what their content depends on."""

    def __init__(self, fingerprint: str, block_bytes: int, block_size: int) -> None:
        self.block_bytes, self.block_size = block_bytes, block_size
        self._owner = hashlib.blake2b(
            f"{sys.byteorder} {fingerprint}".encode(), digest_size=DIGEST_BYTES
        ).digest()
        content_bytes = ENTRY.size + 4 * block_size + CRC.size
        self._entry_bytes = 1 << (content_bytes - 1).bit_length()
        self._nothing = bytes(self._entry_bytes)
        self._stride = _aligned(block_bytes)
        self._max_capacity = self.capacity_for(SEGMENT_BYTES)

    def capacity_for(self, num_bytes: int) -> int:
        """How many blocks a file of that size has; at least one."""
        room = (num_bytes - HEADER_BYTES - ALIGNMENT) // (self._entry_bytes + self._stride)
        return max(1, min(room, 1 << INDEX_BITS))

    def file_bytes(self, capacity: int) -> int:
        return self._block_start(capacity, capacity)

    def create(self, path: Path, capacity: int) -> int:
        """A new file without blocks; its descriptor. OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
        try:
            write_all(fd, memoryview(self._header(capacity)), 0)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return fd

    def write_block(
        self, fd: int, capacity: int, index: int, block: StoredBlock, data: memoryview
    ) -> None:
        """OSError, after which the file has no such block."""
        entry = self._entry(index, block, zlib.crc32(data))
        start = self._block_start(capacity, index)
        try:
            write_all(fd, data, start)
            write_all(fd, memoryview(entry), self._entry_start(index))
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, start)  # others may need the room
            raise

    def read_block(
        self, fd: int, capacity: int, index: int, block: StoredBlock, data: memoryview
    ) -> None:
        """Fill in `data`. OSError, UnusableError: what is in it is of no use."""
        found, check = self._parse(index, os.pread(fd, self._entry_bytes, self._entry_start(index)))
        if found[1:] != block[1:]:
            raise UnusableError("of another prefix")
        start, done = self._block_start(capacity, index), 0
        while done < self.block_bytes:
            num_bytes = os.preadv(fd, [data[done:]], start + done)
            if not num_bytes:
                raise UnusableError("data cut off")
            done += num_bytes
        if zlib.crc32(data) != check:
            raise UnusableError("damaged data")

    def erase_block(self, fd: int, index: int) -> None:
        """OSError."""
        write_all(fd, memoryview(self._nothing), self._entry_start(index))

    def scan(self, path: Path) -> Scan:
        """What is in the file, without reading blocks. OSError, and UnusableError for what is no
        file of bytes; about any file of bytes there is a Scan."""
        fd = _open_regular(path)
        try:
            num_bytes = os.fstat(fd).st_size
            try:
                capacity = self._read_header(fd)
            except UnusableError as error:
                return Scan(num_bytes, unusable=str(error))
            skipped: Counter[str] = Counter()
            blocks = tuple(self._read_table(fd, capacity, num_bytes, skipped))
            return Scan(num_bytes, capacity, blocks, skipped)
        finally:
            os.close(fd)

    def check(self, path: Path) -> None:
        """OSError, UnusableError: it is no file of such blocks."""
        fd = _open_regular(path)
        try:
            self._read_header(fd)
        finally:
            os.close(fd)

    def _read_table(
        self, fd: int, capacity: int, num_bytes: int, skipped: Counter[str]
    ) -> Iterator[StoredBlock]:
        table = os.pread(fd, capacity * self._entry_bytes, HEADER_BYTES)
        for index, start in enumerate(range(0, len(table), self._entry_bytes)):
            entry = table[start : start + self._entry_bytes]
            if entry == self._nothing:
                continue
            try:
                block, _ = self._parse(index, entry)
            except UnusableError:
                skipped["damaged"] += 1
                continue
            if self._block_start(capacity, index) + self.block_bytes > num_bytes:
                skipped["cut off"] += 1
                continue
            yield block

    def _header(self, capacity: int) -> bytes:
        return _checked(
            HEADER.pack(MAGIC, VERSION, self.block_size, self.block_bytes, capacity, self._owner),
            HEADER_BYTES,
        )

    def _read_header(self, fd: int) -> int:
        """The capacity."""
        header = os.pread(fd, HEADER_BYTES, 0)
        if not header:
            raise UnusableError("empty")
        if len(header) < HEADER_BYTES:
            raise UnusableError("its header is cut off")
        magic, version, block_size, block_bytes, capacity, owner = HEADER.unpack_from(header)
        if magic != MAGIC:
            raise UnusableError("not of KV blocks")
        if version != VERSION:
            raise UnusableError("of another version of the format")
        if not _is_intact(header):
            raise UnusableError("its header is damaged")
        if (block_size, block_bytes, owner) != (self.block_size, self.block_bytes, self._owner):
            raise UnusableError("of another model, or other settings of it")
        if not 1 <= capacity <= self._max_capacity:
            raise UnusableError("its header is damaged")
        return int(capacity)

    def _entry(self, index: int, block: StoredBlock, check: int) -> bytes:
        sizes = (len(block.parent), len(block.digest), len(block.token_ids))
        expected = (DIGEST_BYTES, DIGEST_BYTES, 4 * self.block_size)
        if sizes != expected:
            raise ValueError(f"a block's parent, digest, tokens: expected {expected}, got {sizes}")
        content = ENTRY.pack(
            ENTRY_MAGIC, index, self.block_bytes, check, block.parent, block.digest
        )
        return _checked(content + block.token_ids, self._entry_bytes)

    def _parse(self, index: int, entry: bytes) -> tuple[StoredBlock, int]:
        """The block, and the CRC of its content."""
        if len(entry) < self._entry_bytes or not _is_intact(entry):
            raise UnusableError("damaged in the file's list of blocks")
        magic, at, num_bytes, check, parent, digest = ENTRY.unpack_from(entry)
        if (magic, at, num_bytes) != (ENTRY_MAGIC, index, self.block_bytes):
            raise UnusableError("another one in the file's list of blocks")
        token_ids = entry[ENTRY.size : ENTRY.size + 4 * self.block_size]
        return StoredBlock(index, digest, parent, token_ids), check

    def _entry_start(self, index: int) -> int:
        return HEADER_BYTES + index * self._entry_bytes

    def _block_start(self, capacity: int, index: int) -> int:
        return _aligned(self._entry_start(capacity)) + index * self._stride


def is_regular(path: Path) -> bool:
    """OSError."""
    return stat.S_ISREG(path.lstat().st_mode)


def _open_regular(path: Path) -> int:
    """To read it. OSError, UnusableError."""
    if not is_regular(path):
        raise UnusableError("it is no regular file")
    return os.open(path, os.O_RDONLY | OPEN_FLAGS)


def write_all(fd: int, data: memoryview, start: int) -> None:
    """OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], start + done)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _checked(content: bytes, num_bytes: int) -> bytes:
    padded = content.ljust(num_bytes - CRC.size, b"\0")
    return padded + CRC.pack(zlib.crc32(padded))


def _is_intact(data: bytes) -> bool:
    content = memoryview(data)[: -CRC.size]
    return CRC.unpack_from(data, len(content)) == (zlib.crc32(content),)
