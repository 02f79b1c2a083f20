"""The team of threads: what it computes doesn't depend on it, and it takes nothing it shouldn't."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ops.arrays import Array

from streamkv import _cpu

IS_LINUX = sys.platform == "linux"


@pytest.fixture
def one_core() -> Iterator[None]:
    """The calling thread, and those it starts, share one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def flushed_denormals() -> Iterator[None]:
    """The calling thread takes denormals for zero, as some libraries set it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't")
    yield
    torch.set_flush_denormal(False)


def thread_ids() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def weight(num_outputs: int, depth: int) -> tuple[Array, _cpu.PackedWeight]:
    values = np.random.default_rng(0).standard_normal((num_outputs, depth), np.float32)
    packed = _cpu.PackedWeight("float32", num_outputs, depth)
    packed.pack(values, 0)
    return values, packed


def multiply(team: _cpu.Team, x: Array, packed: _cpu.PackedWeight) -> Array:
    """Some dozens of items."""
    return np.asarray(_cpu.ops.linear(team, x, packed))


def check_many_products(num_threads: int) -> None:
    team = _cpu.Team(num_threads)
    values, packed = weight(600, 64)
    x = np.random.default_rng(1).standard_normal((40, 64), np.float32)
    expected = multiply(_cpu.Team(1), x, packed)
    np.testing.assert_allclose(expected, x @ values.T, rtol=1e-4, atol=1e-4)
    for _ in range(200):
        assert np.array_equal(multiply(team, x, packed), expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_the_number_of_threads_changes_no_bit(num_threads: int):
    assert _cpu.Team(num_threads).num_threads == num_threads
    check_many_products(num_threads)


@pytest.mark.skipif(not IS_LINUX, reason="asks for a core")
def test_threads_that_share_one_core_finish(one_core):
    check_many_products(4)


@pytest.mark.parametrize("num_threads", [0, -1])
def test_no_threads_are_refused(num_threads: int):
    with pytest.raises(ValueError, match=f"num_threads expected 1 to 4096, got {num_threads}"):
        _cpu.Team(num_threads)


def test_several_teams_work_at_once():
    values, packed = weight(600, 64)
    x = np.random.default_rng(1).standard_normal((40, 64), np.float32)
    expected = multiply(_cpu.Team(1), x, packed)
    wrong = []

    def work() -> None:
        team = _cpu.Team(3)
        wrong.extend(
            i for i in range(50) if not np.array_equal(multiply(team, x, packed), expected)
        )

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_denormals_are_numbers_in_every_thread(flushed_denormals):
    num_outputs, depth = 600, 64
    packed = _cpu.PackedWeight("float32", num_outputs, depth)
    packed.pack(np.full((num_outputs, depth), 2.0**-70, np.float32), 0)
    x = np.full((40, depth), 2.0**-70, np.float32)
    for num_threads in (1, 3):
        out = multiply(_cpu.Team(num_threads), x, packed)
        bits = out.view(np.int32)  # looked at as integers: this thread reads denormals as zero
        assert (bits == np.float64(depth * 2.0**-140 / 2.0**-149)).all()


@pytest.mark.skipif(not IS_LINUX, reason="reads /proc")
def test_workers_start_with_the_team_take_no_signals_and_end_with_it():
    before = thread_ids()
    team = _cpu.Team(3)
    workers = thread_ids() - before
    assert len(workers) == 2
    _, packed = weight(600, 64)
    for _ in range(100):  # a thread that is only starting takes no signals either
        multiply(team, np.ones((40, 64), np.float32), packed)
    for worker in workers:
        status = Path(f"/proc/self/task/{worker}/status").read_text()
        blocked = next(line for line in status.splitlines() if line.startswith("SigBlk"))
        for signal in (2, 10, 14, 15):  # INT, USR1, ALRM, TERM
            assert int(blocked.split()[1], 16) >> (signal - 1) & 1
    del team
    gc.collect()
    assert not workers & thread_ids()


def test_a_team_without_work_uses_no_cpu():
    team = _cpu.Team(4)
    _, packed = weight(600, 64)
    for _ in range(20):
        multiply(team, np.ones((40, 64), np.float32), packed)
    start = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - start < 0.05
