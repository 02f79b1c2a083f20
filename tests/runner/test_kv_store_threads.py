"""KvStore with many operations on their way, at its end, and when the process is killed."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from runner.kv_stores import Driver, block, content_of, number_of, opened, segments

from streamkv.protocol import StoreOp
from streamkv.runner import kv_store

HERE = Path(__file__).parent


class Gate:
    """Holds up every block that is written until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self.is_open, self.reached = threading.Event(), threading.Event()
        real = kv_store.KvFolder.write

        def write(*args):
            self.reached.set()
            assert self.is_open.wait(20)
            return real(*args)

        monkeypatch.setattr(kv_store.KvFolder, "write", write)


def test_many_at_once(tmp_path):
    """Slots are used again and again, as a KV manager does."""
    source, limit = random.Random(7), 300_000
    written: dict[int, int] = {}  # number: record
    num_failed = 0
    with opened(tmp_path, limit_bytes=limit, num_slots=32) as driver:
        for round in range(60):
            ops = {}
            gone: set[int] = set()
            for slot in range(32):
                if written and source.random() < 0.6:
                    number = source.choice(list(written))
                    stored = block(number, record=written[number])
                    ops[driver.submit(stored, slot=slot, is_write=False)] = (slot, number, False)
                else:
                    number = 100 * round + slot
                    driver.fill(slot, content_of(number))
                    ops[driver.submit(block(number), slot=slot, is_write=True)] = (
                        slot, number, True,
                    )  # fmt: skip
            for op, (slot, number, is_write) in ops.items():
                result = driver.result(op)
                gone.update(result.dropped)
                if is_write:
                    assert result.ok
                    written[number] = result.record
                elif result.ok:
                    assert driver.slot(slot) == content_of(number)
                else:
                    num_failed += 1
            written = {number: record for number, record in written.items() if record not in gone}
        assert num_failed == 0  # reads went before the writes that make room
        assert len(driver.results) == 60 * 32
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit
    with opened(tmp_path, limit_bytes=limit) as driver:
        assert {number_of(one): one.record for one in driver.index} == written


def test_any_thread_may_submit(tmp_path):
    with opened(tmp_path) as driver:
        record = driver.write(0).record
        threads = [
            threading.Thread(
                target=lambda first: [
                    driver.store.submit(StoreOp(first + n, 1, block(0, record=record), False))
                    for n in range(100)
                ],
                args=(1000 * one,),
            )
            for one in range(1, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in range(1, 9):
            for n in range(100):
                assert driver.result(1000 * one + n).ok


def test_reads_go_first_and_nobody_waits(tmp_path, monkeypatch):
    with opened(tmp_path, num_slots=64) as driver:
        record = driver.write(0).record
        gate = Gate(monkeypatch)
        start = time.perf_counter()
        writes = [driver.submit(block(n), slot=n, is_write=True) for n in range(1, 50)]
        assert gate.reached.wait(10)
        reads = [driver.submit(block(0, record=record), slot=50, is_write=False) for _ in range(5)]
        assert time.perf_counter() - start < 5
        gate.is_open.set()
        assert driver.result(writes[-1]).ok
        order = driver.order[1:]
        assert order == [writes[0], *reads, *writes[1:]]


def test_close_finishes_writes_and_drops_reads(tmp_path, monkeypatch):
    driver = Driver(tmp_path, num_slots=64)
    record = driver.write(0).record
    gate = Gate(monkeypatch)
    for number in range(1, 40):
        driver.fill(number, content_of(number))
        driver.submit(block(number), slot=number, is_write=True)
    assert gate.reached.wait(10)
    read = driver.submit(block(0, record=record), slot=60, is_write=False)
    closing = [threading.Thread(target=driver.store.close) for _ in range(3)]
    for thread in closing:
        thread.start()
    while driver.store._close_by is None:
        time.sleep(0.001)
    driver.submit(block(99), is_write=True)
    gate.is_open.set()
    for thread in closing:
        thread.join()
    driver.store.close()
    assert read not in driver.results
    driver.memory.extend(b"no view of it is left")  # BufferError otherwise
    with opened(tmp_path) as again:
        assert [number_of(one) for one in again.index] == list(range(40))
        assert [again.read(one) for one in again.index] == [content_of(n) for n in range(40)]


def test_close_does_not_wait_forever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kv_store, "CLOSE_S", 0.1)
    real = kv_store.KvFolder.write
    monkeypatch.setattr(kv_store.KvFolder, "write", lambda *args: time.sleep(0.03) or real(*args))
    driver = Driver(tmp_path)
    for number in range(100):
        driver.submit(block(number), is_write=True)
    start = time.monotonic()
    driver.store.close()
    assert time.monotonic() - start < 3
    assert "not kept" in caplog.text
    with opened(tmp_path) as again:
        assert 1 <= len(again.index) < 50


def test_close_while_the_disk_hangs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kv_store, "CLOSE_S", -0.9)
    gate = Gate(monkeypatch)
    driver = Driver(tmp_path)
    driver.submit(block(0), is_write=True)
    assert gate.reached.wait(10)
    driver.store.close()
    assert "doesn't answer" in caplog.text
    gate.is_open.set()
    driver.store._thread.join(20)
    with opened(tmp_path) as again:
        assert len(again.index) == 1


def test_an_idle_store_syncs_what_is_finished(tmp_path, monkeypatch):
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(fd) or real(fd))
    with opened(tmp_path, limit_bytes=46_000) as driver:
        for number in range(5):  # two files and a half
            driver.write(number)
        deadline = time.monotonic() + 10
        while len(synced) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(synced) == 2
    assert len(synced) == 3


def test_no_descriptors_are_left(tmp_path):
    def num_open():
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    for _ in range(3):
        with opened(tmp_path, limit_bytes=46_000) as driver:
            for number in range(30):
                result = driver.write(number)
                driver.read(block(number, record=result.record))
            assert num_open() < before + 12
    assert num_open() == before


# Writes block after block from the number given on, and says which have their results.
WRITER = f"""
import itertools, sys
sys.path[:0] = [{str(HERE.parent)!r}]
from pathlib import Path
from runner.kv_stores import Driver
driver = Driver(Path(sys.argv[1]), limit_bytes=1 << 30, num_slots=2, block_bytes=200_000)
print("index", len(driver.index), flush=True)
for number in itertools.count(int(sys.argv[2])):
    assert driver.write(number).ok
    print(number, flush=True)
"""


def test_killing_it_loses_nothing_that_was_written(tmp_path, caplog):
    """Again and again in the middle of a write, in the folder that the last one left."""
    source, said, first = random.Random(11), set(), 0
    for _ in range(15):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(first)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert int(writer.stdout.readline().split()[1]) >= len(said)
        time.sleep(source.uniform(0, 0.05))
        writer.kill()
        lines = writer.stdout.read().split(b"\n")[:-1]
        writer.wait()
        writer.stdout.close()
        said.update(int(line) for line in lines)
        first = max(said, default=-1) + 2  # a block may be written and not yet said
    assert len(said) > 15
    caplog.set_level(logging.INFO)
    with opened(tmp_path, block_bytes=200_000) as driver:
        found = {number_of(one) for one in driver.index}
        assert said <= found and len(found - said) <= 15
        for one in driver.index:
            assert driver.read(one) == content_of(number_of(one), 200_000)
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
