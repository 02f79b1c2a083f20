"""Segment files: what was written comes back, and damage of any kind is noticed and contained."""

from __future__ import annotations

import os
import random
import socket

import pytest

from streamkv.protocol import StoredBlock, pack_ints
from streamkv.runner.kv_segments import (
    ALIGNMENT,
    ENTRY,
    HEADER,
    HEADER_BYTES,
    INDEX_BITS,
    SEGMENT_BYTES,
    SegmentFormat,
    UnusableError,
    _checked,
    write_all,
)

BLOCK_BYTES, BLOCK_SIZE, CAPACITY = 1000, 4, 5  # of bytes, not a multiple of anything
ENTRY_BYTES = 128


@pytest.fixture
def format():
    return SegmentFormat("model A", BLOCK_BYTES, BLOCK_SIZE)


def block(number: int, parent: int | None = None) -> StoredBlock:
    parent_digest = digest_of(number - 1 if parent is None else parent)
    tokens = pack_ints(range(number, number + BLOCK_SIZE))
    return StoredBlock(-1, digest_of(number), parent_digest, tokens)


def digest_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def content_of(number: int) -> bytes:
    return random.Random(-1 - number).randbytes(BLOCK_BYTES)


@pytest.fixture
def path(tmp_path, format):
    """A file of three blocks, numbers 0 to 2; there is room for two more."""
    path = tmp_path / "segment"
    fd = format.create(path, CAPACITY)
    for number in range(3):
        format.write_block(fd, CAPACITY, number, block(number), memoryview(content_of(number)))
    os.close(fd)
    return path


def read(format, path, number, wanted=None):
    data = bytearray(BLOCK_BYTES)
    fd = os.open(path, os.O_RDONLY)
    try:
        format.read_block(fd, CAPACITY, number, wanted or block(number), memoryview(data))
    finally:
        os.close(fd)
    return bytes(data)


def indices(scan):
    return [one.record for one in scan.blocks]


def test_blocks_come_back(format, path):
    scan = format.scan(path)
    assert scan.blocks == tuple(block(number)._replace(record=number) for number in range(3))
    assert (scan.capacity, scan.skipped, scan.unusable) == (CAPACITY, {}, "")
    assert scan.num_bytes == path.stat().st_size <= format.file_bytes(CAPACITY)
    for number in range(3):
        assert read(format, path, number) == content_of(number)


def test_nobody_else_may_read_what_was_said(path):
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_is_made_once(format, path):
    with pytest.raises(FileExistsError):
        format.create(path, CAPACITY)
    assert len(format.scan(path).blocks) == 3


@pytest.mark.parametrize("block_bytes", (1, 64, 512, 4097, 368 << 10, 64 << 20, 100 << 20))
@pytest.mark.parametrize("block_size", (1, 16, 128, 4096))
def test_capacity(block_bytes, block_size):
    format = SegmentFormat("", block_bytes, block_size)
    for limit in (1, 1 << 20, SEGMENT_BYTES):
        capacity = format.capacity_for(limit)
        assert 1 <= capacity <= 1 << INDEX_BITS
        assert capacity == 1 or format.file_bytes(capacity) <= limit
        if format.file_bytes(1) > limit:
            assert capacity == 1
    if block_bytes > 1000:
        assert format.file_bytes(1) < 1.05 * block_bytes + HEADER_BYTES + 8 * block_size + 1024


def test_entries_lie_on_one_page_each():
    for block_size in (1, 4, 16, 32, 64, 128, 256, 512):
        format = SegmentFormat("", 1, block_size)
        for index in range(100):
            first = format._entry_start(index)
            assert first // 4096 == (format._entry_start(index + 1) - 1) // 4096
    assert format._block_start(100, 3) % ALIGNMENT == 0


def test_wrong_sizes_are_refused_before_anything_is_written(format, path):
    before = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    for wrong in (
        block(3)._replace(digest=b"short"),
        block(3)._replace(parent=b""),
        block(3)._replace(token_ids=pack_ints(range(BLOCK_SIZE + 1))),
    ):
        with pytest.raises(ValueError, match="expected"):
            format.write_block(fd, CAPACITY, 3, wrong, memoryview(content_of(3)))
    os.close(fd)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "other",
    (
        SegmentFormat("model B", BLOCK_BYTES, BLOCK_SIZE),
        SegmentFormat("model A", BLOCK_BYTES + 1, BLOCK_SIZE),
        SegmentFormat("model A", BLOCK_BYTES, 2 * BLOCK_SIZE),
    ),
)
def test_files_of_others(path, other):
    scan = other.scan(path)
    assert "of another model" in scan.unusable
    assert (scan.blocks, scan.num_bytes) == ((), path.stat().st_size)


def test_another_prefix_is_not_given(format, path):
    for wanted in (
        block(1)._replace(digest=digest_of(9)),
        block(1)._replace(parent=digest_of(9)),
        block(1)._replace(token_ids=pack_ints([7] * BLOCK_SIZE)),
    ):
        with pytest.raises(UnusableError, match="another prefix"):
            read(format, path, 1, wanted)
    assert read(format, path, 1, block(1)._replace(record=12345)) == content_of(1)


def test_an_erased_block_is_gone(format, path):
    fd = os.open(path, os.O_WRONLY)
    format.erase_block(fd, 1)
    os.close(fd)
    scan = format.scan(path)
    assert (indices(scan), scan.skipped) == ([0, 2], {})
    with pytest.raises(UnusableError):
        read(format, path, 1)


# --- damage ---


def test_every_byte_of_the_header(format, path):
    good = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    for at in range(HEADER_BYTES):
        for bit in (1, 0x80) if at < HEADER.size else (0xFF,):
            os.pwrite(fd, bytes([good[at] ^ bit]), at)
            scan = format.scan(path)
            assert scan.unusable and not scan.blocks, at
        os.pwrite(fd, good[at : at + 1], at)
    os.close(fd)
    assert len(format.scan(path).blocks) == 3


def test_every_byte_of_the_table(format, path):
    """Damage to an entry, or to the room for one, is noticed, and is about that entry alone."""
    good = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    for at in range(HEADER_BYTES, HEADER_BYTES + CAPACITY * ENTRY_BYTES):
        index = (at - HEADER_BYTES) // ENTRY_BYTES
        for bit in (1, 0x80):
            os.pwrite(fd, bytes([good[at] ^ bit]), at)
            scan = format.scan(path)
            assert indices(scan) == [one for one in range(3) if one != index]
            assert scan.skipped == {"damaged": 1}
            if index < 3:
                with pytest.raises(UnusableError, match="damaged in the file's list of blocks"):
                    read(format, path, index)
        os.pwrite(fd, good[at : at + 1], at)
    os.close(fd)
    assert len(format.scan(path).blocks) == 3


def test_every_byte_of_a_block(format, path):
    good = path.read_bytes()
    start = good.index(content_of(1))
    fd = os.open(path, os.O_RDWR)
    for at in range(start, start + BLOCK_BYTES):
        os.pwrite(fd, bytes([good[at] ^ 1 << at % 8]), at)
        assert len(format.scan(path).blocks) == 3  # which reads no blocks
        with pytest.raises(UnusableError, match="damaged data"):
            read(format, path, 1)
        os.pwrite(fd, good[at : at + 1], at)
    os.close(fd)
    for number in range(3):
        assert read(format, path, number) == content_of(number)


def test_every_length(format, path):
    """A file that was cut anywhere has exactly the blocks that are whole."""
    good = path.read_bytes()
    ends = [good.index(content_of(number)) + BLOCK_BYTES for number in range(3)]
    last_byte = ends[-1]
    for length in range(last_byte, -1, -1):
        os.truncate(path, length)
        scan = format.scan(path)
        assert scan.num_bytes == length
        if length < HEADER_BYTES:
            assert scan.unusable == ("its header is cut off" if length else "empty")
            continue
        whole = [number for number in range(3) if ends[number] <= length]
        assert indices(scan) == whole
        if length >= HEADER_BYTES + 3 * ENTRY_BYTES:
            num_cut = scan.skipped["cut off"]
            assert num_cut == 3 - len(whole)
        if length % 97 == 0 or length in ends:
            for number in range(3):
                if number in whole:
                    assert read(format, path, number) == content_of(number)
                else:
                    with pytest.raises(UnusableError):
                        read(format, path, number)


def test_entries_in_each_others_place(format, path):
    data = bytearray(path.read_bytes())
    first, second = HEADER_BYTES, HEADER_BYTES + ENTRY_BYTES
    data[first : first + ENTRY_BYTES], data[second : second + ENTRY_BYTES] = (
        data[second : second + ENTRY_BYTES],
        data[first : first + ENTRY_BYTES],
    )
    path.write_bytes(data)
    scan = format.scan(path)
    assert (indices(scan), scan.skipped) == ([2], {"damaged": 2})


@pytest.mark.parametrize("capacity", (0, 1 << 21, 1 << 40, (1 << 64) - 1))
def test_absurd_capacities(format, path, capacity):
    """With a header that is otherwise right, nothing absurd is read."""
    header = HEADER.pack(b"SKVBLCKS", 1, BLOCK_SIZE, BLOCK_BYTES, capacity, format._owner)
    data = bytearray(path.read_bytes())
    data[:HEADER_BYTES] = _checked(header, HEADER_BYTES)
    path.write_bytes(data)
    os.truncate(path, 1 << 40)  # a hole
    assert format.scan(path).unusable == "its header is damaged"


def test_absurd_sizes_of_blocks(format, path):
    entry = ENTRY.pack(b"BLCK", 3, 1 << 60, 0, digest_of(0), digest_of(1)) + block(3).token_ids
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 3 * ENTRY_BYTES)
        file.write(_checked(entry, ENTRY_BYTES))
    scan = format.scan(path)
    assert (indices(scan), scan.skipped) == ([0, 1, 2], {"damaged": 1})


def test_other_versions(format, path):
    header = HEADER.pack(b"SKVBLCKS", 2, BLOCK_SIZE, BLOCK_BYTES, CAPACITY, format._owner)
    with path.open("r+b") as file:
        file.write(_checked(header, HEADER_BYTES))
    assert "another version" in format.scan(path).unusable


def test_random_files(format, path, tmp_path):
    source = random.Random(5)
    good = path.read_bytes()
    for _ in range(300):
        data = bytearray(good)
        for _ in range(source.randrange(1, 20)):
            start = source.randrange(len(data))
            data[start : start + source.randrange(1, 50)] = source.randbytes(source.randrange(99))
        (tmp_path / "other").write_bytes(data)
        scan = format.scan(tmp_path / "other")
        for one in scan.blocks:
            assert one[1:] == block(one.record)[1:]
    (tmp_path / "other").write_bytes(source.randbytes(100_000))
    assert format.scan(tmp_path / "other").unusable == "not of KV blocks"


def test_what_is_no_file(format, path, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name in ("folder", "link", "loop", "pipe", "socket"):
        with pytest.raises(UnusableError, match="no regular file"):
            format.scan(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        format.scan(tmp_path / "missing")


def test_short_writes_are_continued(format, tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, start: real(fd, data[:7], start))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(fd, memoryview(content_of(0)), 3)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == bytes(3) + content_of(0)


def test_a_file_that_cannot_be_begun_is_not_left(format, tmp_path, monkeypatch):
    def no_room(fd, data, start):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_room)
    with pytest.raises(OSError, match="No space"):
        format.create(tmp_path / "segment", CAPACITY)
    assert not list(tmp_path.iterdir())
