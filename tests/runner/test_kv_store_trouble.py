"""KvStore when the disk, or its caller, does what it shouldn't while it runs."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import time

from runner.kv_stores import (
    NUM_SLOTS,
    SMALL,
    block,
    content_of,
    number_of,
    opened,
    segments,
    warned,
)

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
        num_good = sum(one.ok for one in results)
        assert 3 <= num_good <= 5 and all(one.ok for one in results[:num_good])
        assert {one.record for one in results[num_good:]} == {-1}
        (line,) = warned(caplog)
        assert "No space left" in line and "not written any more" in line
        for number in range(num_good):
            assert driver.read(block(number, record=results[number].record)) == content_of(number)
        left[0] = 1 << 30
        assert not driver.write(10).ok  # it isn't tried for a while
        monkeypatch.setattr(kv_store, "RETRY_S", 0.0)
        driver.store._retry_at = 0.0
        assert driver.write(11).ok
        left[0] = 0
        assert not driver.write(12).ok and not driver.write(13).ok
        assert len(warned(caplog)) == 1
    with opened(tmp_path) as driver:  # on a disk that is full of what it may read
        assert len(driver.index) == num_good + 1
        assert not driver.write(14).ok
        assert len(warned(caplog)) == 1
        left[0] = 1 << 30
    with opened(tmp_path) as driver:
        assert sorted(number_of(one) for one in driver.index) == [*range(num_good), 11]
        assert [driver.read(one) for one in driver.index] == [
            content_of(number_of(one)) for one in driver.index
        ]
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
    assert [one.ok for one in results] == [True, True, False, False]
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
        assert not driver.write(2).ok
    assert len(warned(caplog)) == 1


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
