"""KvStore when the disk, or its caller, does what it shouldn't while it runs."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import resource
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from runner.kv_stores import (
    BLOCK_BYTES,
    NUM_SLOTS,
    SMALL,
    Driver,
    block,
    content_of,
    number_of,
    opened,
    segments,
    warned,
)

from streamkv.errors import ConfigError
from streamkv.runner import kv_store


def test_a_full_disk(tmp_path, caplog, monkeypatch):
    real, left = os.pwrite, [20_000]

    def write(fd, data, start):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_bytes = real(fd, data[: left[0]], start)
        left[0] -= num_bytes
        return num_bytes

    with opened(tmp_path) as driver:
        monkeypatch.setattr(os, "pwrite", write)
        results = [driver.write(number) for number in range(10)]
        num_good = sum(one.record >= 0 for one in results)
        assert 3 <= num_good <= 5 and all(one.record >= 0 for one in results[:num_good])
        assert {one.record for one in results[num_good:]} == {-1}
        failed, *untried = results[num_good:]
        assert not failed.ok and all(one.ok for one in untried)
        (line,) = warned(caplog)
        assert "No space left" in line and "only read and not written" in line
        assert "; free some space, or lower --kv-cache-disk" in line
        for number in range(num_good):
            assert driver.read(block(number, record=results[number].record)) == content_of(number)
        left[0] = 1 << 30
        assert driver.write(10)[1:] == (True, -1, ())  # it isn't tried for a while
        monkeypatch.setattr(kv_store, "RETRY_S", 0.0)
        driver.store._retry_at = 0.0
        assert driver.write(11).ok
    left[0] = 0
    with opened(tmp_path) as driver:  # on a disk that is full of what it may read
        assert sorted(number_of(one) for one in driver.index) == [*range(num_good), 11]
        assert [driver.read(one) for one in driver.index] == [
            content_of(number_of(one)) for one in driver.index
        ]
    assert warned(caplog) == []


@pytest.mark.parametrize("number", (errno.ENOSPC, errno.EDQUOT))
@pytest.mark.parametrize(
    ("full_for", "is_known"),
    (("mkdir", False), ("open", False), ("open", True), ("pwrite", False), ("pwrite", True)),
)
def test_a_disk_that_is_full_at_the_start(
    tmp_path, caplog, monkeypatch, number, full_for, is_known
):
    """The folder is there, or can't even be made: the start is the same, and so is what comes
    when there is room."""
    folder = tmp_path / "kv"
    if is_known:
        folder.mkdir()

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, full_for, fail)
        driver = Driver(folder)
        (line,) = warned(caplog)
        assert str(folder) in line and os.strerror(number) in line
        assert "only read and not written (it is tried every 60 s)" in line
        assert "; free some space" in line
        assert driver.index == []
        assert driver.write(0)[1:] == (True, -1, ())
        driver.store._retry_at = 0.0
        assert not driver.write(1).ok
        assert driver.read(block(0, record=1 << 20)) is None
    driver.store._retry_at = 0.0
    record = driver.write(2).record
    assert driver.read(block(2, record=record)) == content_of(2)
    with pytest.raises(ConfigError, match="another one is using"):
        Driver(folder)
    driver.store.close()
    assert warned(caplog) == []
    with opened(folder) as driver:
        assert 2 in [number_of(one) for one in driver.index]


def test_a_disk_that_stays_full_till_the_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "open", _fail_full)
    with opened(tmp_path / "kv"):
        assert len(warned(caplog)) == 1
    assert warned(caplog) == []


def test_a_folder_that_another_server_took_while_the_disk_was_full(tmp_path, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _fail_full)
        late = Driver(tmp_path)
    with opened(tmp_path, limit_bytes=SMALL) as first:
        records = [first.write(number).record for number in range(3)]
        warned(caplog)
        late.store._retry_at = 0.0
        assert late.write(5)[1:] == (False, -1, ())
        assert first.read(block(0, record=records[0])) == content_of(0)
    late.store._retry_at = 0.0
    assert late.write(6).record not in (-1, *records)
    late.store.close()
    assert warned(caplog) == []
    with opened(tmp_path) as driver:
        assert [number_of(one) for one in driver.index] == [0, 6, 1, 2]


def _fail_full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


class SmallDisk:
    """Of so many bytes, counted as the files in `folder` are long."""

    def __init__(self, folder, num_bytes, monkeypatch):
        self._real = os.pwrite
        self.folder, self.num_bytes = folder, num_bytes
        monkeypatch.setattr(os, "pwrite", self._write)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: _Free(self.free_bytes()))

    def free_bytes(self):
        return self.num_bytes - sum(path.stat().st_size for path in self.folder.iterdir())

    def _write(self, fd, data, start):
        if start + len(data) - os.fstat(fd).st_size > self.free_bytes():
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._real(fd, data, start)


class _Free(NamedTuple):
    free: int


@pytest.mark.parametrize("is_size_known", (True, False))
def test_the_oldest_make_room_on_a_full_disk(tmp_path, caplog, monkeypatch, is_size_known):
    """One smaller than the limit; of a quota the size isn't known before it is reached."""
    disk = SmallDisk(tmp_path, SMALL, monkeypatch)
    limit = 1 << 30 if is_size_known else 2 * SMALL
    if not is_size_known:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: _Free(1 << 40))
    with opened(tmp_path, limit_bytes=limit) as driver:
        results = [driver.write(number) for number in range(50)]
        records = [one.record for one in results]
        assert min(records) >= 0
        gone = [record for one in results for record in one.dropped]
        assert gone == records[: len(gone)] and len(records) - len(gone) >= 5
        for number in range(len(gone), 50):
            assert driver.read(block(number, record=records[number])) == content_of(number)
        (line,) = warned(caplog)
        assert "No space left" in line and "oldest KV blocks are deleted" in line
        assert disk.free_bytes() >= 0
    with opened(tmp_path, limit_bytes=limit) as driver:
        assert [number_of(one) for one in driver.index] == list(range(len(gone), 50))
        assert driver.write(50).record >= 0


def test_a_disk_that_others_fill(tmp_path, caplog, monkeypatch):
    """What is ours goes, then writing is given up for a while."""
    disk = SmallDisk(tmp_path, SMALL, monkeypatch)
    with opened(tmp_path) as driver:
        records = [driver.write(number).record for number in range(7)]
        disk.num_bytes = 1000
        result = driver.write(7)
        while result.ok and result.record >= 0:
            result = driver.write(8)
        assert not result.ok and records[0] in result.dropped
        full, paused = warned(caplog)
        assert "are deleted for new ones" in full and "only read and not written" in paused
        assert driver.write(9)[1:] == (True, -1, ())
        disk.num_bytes = SMALL
        driver.store._retry_at = 0.0
        assert driver.write(10).record >= 0
    assert warned(caplog) == []


def test_a_limit_of_the_system(tmp_path, caplog):
    """A real failure in the middle of a block."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, block_bytes=1 << 20) as driver:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 19, old[1]))
        try:
            results = [driver.write(number) for number in range(4)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [one.record >= 0 for one in results] == [True, True, False, False]
    assert [one.ok for one in results] == [True, True, False, True]  # the last wasn't tried
    assert "File too large" in warned(caplog)[0]
    (path,) = segments(tmp_path)
    assert path.stat().st_size < 9 << 18  # the half of the third is given back
    with opened(tmp_path, block_bytes=1 << 20) as driver:
        assert [driver.read(one) for one in driver.index] == [
            content_of(number, 1 << 20) for number in range(2)
        ]
    assert warned(caplog) == []


def test_files_that_somebody_deletes(tmp_path, caplog):
    with opened(tmp_path, limit_bytes=SMALL) as driver:
        records = [driver.write(number).record for number in range(4)]
    with opened(tmp_path, limit_bytes=SMALL) as driver:
        segments(tmp_path)[0].unlink()
        number = driver.submit(block(0, record=records[0]), is_write=False)
        assert driver.result(number)[1:] == (False, -1, tuple(records[:2]))
        assert driver.read(block(1, record=records[1])) is None
        assert len(warned(caplog)) == 1
        assert driver.read(block(2, record=records[2])) == content_of(2)


def test_a_read_that_fails_for_now(tmp_path, caplog, monkeypatch):
    with opened(tmp_path) as driver:
        driver.write(0)
    with opened(tmp_path) as driver:
        (stored,) = driver.index
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", _fail)
            assert driver.read(stored) is None
        assert len(warned(caplog)) == 1
        assert driver.write(1).ok
    with opened(tmp_path) as driver:  # the file was not touched for that
        assert len(driver.index) == 2


def _fail(*args):
    raise OSError(errno.EIO, "Input/output error")


def test_failing_to_sync_is_one_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", _fail)
    with opened(tmp_path, limit_bytes=SMALL) as driver:
        assert driver.write(0).ok and driver.write(1).ok
        deadline = time.monotonic() + 10
        while driver.store._folder.unsynced and time.monotonic() < deadline:
            time.sleep(0.01)
        assert driver.write(2).record == -1
    assert len(warned(caplog)) == 1


# --- files that aren't what they were ---


def _damage_all(path, monkeypatch):
    data = path.read_bytes()
    for number in range(10):
        data = data.replace(content_of(number), bytes(BLOCK_BYTES))
    path.write_bytes(data)


def _cut(path, monkeypatch):
    os.truncate(path, path.read_bytes().index(content_of(0)) + 1)


def _break_disk(path, monkeypatch):
    monkeypatch.setattr(os, "preadv", _fail)


@pytest.mark.parametrize(
    ("harm", "reason"),
    ((_damage_all, "damaged data"), (_cut, "data cut off"), (_break_disk, "Input/output error")),
)
def test_each_kind_of_fault_is_a_line_and_a_number(tmp_path, caplog, monkeypatch, harm, reason):
    with opened(tmp_path) as driver:
        for number in range(10):
            driver.write(number)
    (path,) = segments(tmp_path)
    with opened(tmp_path) as driver:
        harm(path, monkeypatch)
        assert [driver.read(one) for one in driver.index] == [None] * 10
        (line,) = warned(caplog)
        assert str(path) in line and reason in line
    (line,) = warned(caplog)
    assert str(path) in line and reason in line and "10 KV blocks" in line


def _make_folder(path):
    path.unlink()
    path.mkdir()


def _make_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _make_pipe(path):
    path.unlink()
    os.mkfifo(path)


REPLACED = {
    "empty": lambda path: os.truncate(path, 0),
    "not of KV blocks": lambda path: path.write_bytes(random.Random(0).randbytes(20_000)),
    "it is no regular file": _make_folder,
    "is no regular file": _make_link,
    "no regular file": _make_pipe,
    "somebody else deleted it": lambda path: path.unlink(),
}


@pytest.mark.parametrize("reason", REPLACED)
@pytest.mark.parametrize("is_new", (True, False))
def test_a_file_that_was_replaced_is_one_line(tmp_path, caplog, reason, is_new):
    """All that was in it is gone at once, and others are used as before. (`is_new`: by the process
    that wrote them.)"""
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(opened(tmp_path, limit_bytes=SMALL))
        records = [driver.write(number).record for number in range(4)]
        if is_new:
            while driver.store._folder.unsynced:
                time.sleep(0.001)
        else:
            stack.close()
            driver = stack.enter_context(opened(tmp_path, limit_bytes=SMALL))
        first, second = segments(tmp_path)
        REPLACED[reason](first)
        number = driver.submit(block(1, record=records[1]), is_write=False)
        assert driver.result(number)[1:] == (False, -1, tuple(records[:2]))
        (line,) = warned(caplog)
        assert str(first) in line and "2 KV blocks" in line and reason in line
        assert driver.read(block(0, record=records[0])) is None
        assert driver.read(block(2, record=records[2])) == content_of(2)
        assert all(driver.write(n).record >= 0 for n in range(4, 40))
        assert _num_bytes(tmp_path) <= SMALL
        is_file = first.is_file() and not first.is_symlink()
        assert not is_file  # it made room; what isn't a file is left alone
    assert warned(caplog) == []


def _num_bytes(folder):
    """Of what is a file, and no link to one."""
    found = [path.lstat() for path in segments(folder)]
    return sum(one.st_size for one in found if stat.S_ISREG(one.st_mode))


def test_the_file_that_is_written_is_cut(tmp_path, caplog):
    with opened(tmp_path) as driver:
        first = driver.write(0).record
        os.truncate(segments(tmp_path)[0], 0)
        assert driver.read(block(0, record=first)) is None
        assert len(warned(caplog)) == 1
        second = driver.write(1).record
        assert driver.read(block(1, record=second)) == content_of(1)
    with opened(tmp_path) as driver:
        assert [number_of(one) for one in driver.index] == [1]


def test_the_file_that_is_written_is_deleted(tmp_path, caplog):
    with opened(tmp_path, limit_bytes=SMALL) as driver:
        first = driver.write(0).record
        segments(tmp_path)[0].unlink()
        assert driver.write(1).dropped == (first, first + 1)
        (line,) = warned(caplog)
        assert "somebody else deleted it" in line and "2 KV blocks" in line
        assert driver.write(2).record >= 0


def test_a_file_in_the_way(tmp_path, caplog):
    with opened(tmp_path) as driver:
        in_the_way = tmp_path / "kv-00000001.segment"
        in_the_way.mkdir()
        assert driver.write(0).record >= 0
        (line,) = warned(caplog)
        assert str(in_the_way) in line


def test_a_file_that_cannot_be_deleted(tmp_path, caplog, monkeypatch):
    """It is left out, and counts as long as it is there."""
    with opened(tmp_path, limit_bytes=SMALL) as driver:
        for number in range(8):
            driver.write(number)
        first = segments(tmp_path)[0]
        _refuse_to_unlink(monkeypatch, errno.EPERM, [first])
        assert all(driver.write(number).record >= 0 for number in range(8, 40))
        assert _num_bytes(tmp_path) <= SMALL and first.exists()
        (line,) = warned(caplog)
        assert str(first) in line and "can't be deleted" in line and "2 KV blocks" in line
        _refuse_to_unlink(monkeypatch, errno.EPERM, None)
        assert not all(driver.write(number).ok for number in range(40, 50))
        assert "beside the files that can't be deleted" in warned(caplog)[-1]
        assert _num_bytes(tmp_path) <= SMALL


def test_a_folder_that_cannot_be_changed_any_more(tmp_path, caplog, monkeypatch):
    """Then nothing is left out: all of it can be read."""
    with opened(tmp_path, limit_bytes=SMALL) as driver:
        records = [driver.write(number).record for number in range(8)]
        _refuse_to_unlink(monkeypatch, errno.EROFS, None)
        assert not driver.write(8).ok
        (line,) = warned(caplog)
        assert "only read and not written" in line and segments(tmp_path)[0].name in line
        for number, record in enumerate(records):
            assert driver.read(block(number, record=record)) == content_of(number)


def _refuse_to_unlink(monkeypatch, number, paths):
    real = Path.unlink

    def unlink(path, missing_ok=False):
        if paths is None or path in paths:
            raise OSError(number, os.strerror(number), str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)


# --- a folder that isn't ours any more ---


def _replace_folder(folder):
    folder.rename(folder.with_name("former"))
    folder.mkdir()


def _replace_by_file(folder):
    shutil.rmtree(folder)
    folder.write_text("mine")


def _replace_lock(folder):
    (folder / "lock").unlink()
    (folder / "lock").touch()


LOST = (
    shutil.rmtree,
    _replace_folder,
    _replace_by_file,
    _replace_lock,
    lambda folder: (folder / "lock").unlink(),
)


@pytest.mark.parametrize("lose", LOST)
@pytest.mark.parametrize("first", ("write", "read", "close"))
def test_nothing_is_kept_in_a_folder_that_was_replaced(tmp_path, caplog, lose, first):
    folder = tmp_path / "kv"
    with opened(folder, limit_bytes=SMALL) as driver:
        records = [driver.write(number).record for number in range(5)]
        while driver.store._folder.unsynced:
            time.sleep(0.001)
        lose(folder)
        for path in segments(folder):  # those of a folder without our lock
            path.unlink()
        before = sorted(tmp_path.rglob("*"))
        if first == "read":
            number = driver.submit(block(0, record=records[0]), is_write=False)
            assert driver.result(number)[1:] == (False, -1, tuple(records))
        if first != "close":
            results = [driver.write(number) for number in range(20)]
            assert all(one[1:3] == (True, -1) for one in results)
            assert results[0].dropped == (() if first == "read" else tuple(records))
            assert driver.read(block(4, record=records[4])) is None
    (line,) = warned(caplog)
    assert str(folder) in line and "was deleted or replaced" in line and "restart" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_another_server_takes_the_place(tmp_path, caplog):
    """Neither touches what the other one has."""
    folder = tmp_path / "kv"
    with opened(folder, limit_bytes=SMALL) as old:
        records = [old.write(number).record for number in range(3)]
        while old.store._folder.unsynced:
            time.sleep(0.001)
        shutil.rmtree(folder)
        with opened(folder, limit_bytes=SMALL) as new:
            new_records = [new.write(number).record for number in range(10, 14)]
            assert new_records[0] == records[0]
            assert old.read(block(0, record=records[0])) is None
            assert old.write(3).record == -1
            assert len(warned(caplog)) == 1
            for number, record in zip(range(10, 14), new_records, strict=True):
                assert new.read(block(number, record=record)) == content_of(number)
    with opened(folder, limit_bytes=SMALL) as new:
        assert [number_of(one) for one in new.index] == [10, 11, 12, 13]
    assert warned(caplog) == []


# --- the caller ---


def test_mistakes_of_the_caller_end_nothing(tmp_path, caplog):
    with opened(tmp_path) as driver:
        for slot in (-1, NUM_SLOTS, 1 << 60):
            assert not driver.result(driver.submit(block(0), slot=slot, is_write=True)).ok
        wrong = block(0)._replace(digest=b"x")
        assert not driver.result(driver.submit(wrong, is_write=True)).ok
        assert sum(one.levelno == logging.ERROR for one in caplog.records) == 4

        called = threading.Event()

        def broken(result):
            called.set()
            raise RuntimeError("the loop is closed")

        deliver = driver.store._callback
        driver.store.on_result(broken)
        driver.submit(block(0), is_write=True)
        assert called.wait(10)
        driver.store.on_result(deliver)
        assert driver.write(1).ok
