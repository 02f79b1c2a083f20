"""Which kernels run, on how many threads, and that the threads are nobody's problem."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from ops.paged import random_context

from streamkv import _cpu
from streamkv.errors import ConfigError
from streamkv.ops import AttentionShape, native
from streamkv.ops.cpu_count import count_cores, num_usable_cores

SHAPE = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64)


def test_the_best_instruction_set_is_chosen_unless_the_environment_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("STREAMKV_CPU_ISA", raising=False)
    best, *others = _cpu.available_isas()
    assert native.load(1).describe() == f"native ({best}, 1 thread)"
    for isa in others:
        monkeypatch.setenv("STREAMKV_CPU_ISA", isa)
        assert native.load(3).describe() == f"native ({isa}, 3 threads)"
        assert _cpu.isa() == isa
    monkeypatch.delenv("STREAMKV_CPU_ISA")
    native.load(1)
    assert _cpu.isa() == best


def test_baseline_is_always_available() -> None:
    assert _cpu.available_isas()[-1] == "baseline"


def test_an_unknown_instruction_set_is_an_error_that_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STREAMKV_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="STREAMKV_CPU_ISA: expected .*baseline.*, got 'sse9'"):
        native.load()


def test_a_missing_extension_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "streamkv._cpu", None)
    monkeypatch.delattr("streamkv._cpu")
    with pytest.raises(ConfigError, match="build them with `pip install .`"):
        native.load()


def test_threads_are_the_usable_cores_unless_told() -> None:
    native.load()
    assert _cpu.num_threads() == num_usable_cores() >= 1
    native.load(1)
    assert _cpu.num_threads() == 1
    with pytest.raises(ValueError, match="at least 1, got 0"):
        _cpu.set_num_threads(0)


def test_calls_from_several_threads_at_once_are_all_right() -> None:
    """One has the pool of threads, the others work alone: two engines in one process."""
    table = native.load(3)
    context = random_context([300], SHAPE, torch.float32)
    expected = context.attend(table, [(0, 0, 300)])
    wrong: list[int] = []

    def attend_often(caller: int) -> None:
        for _ in range(5):
            if not torch.equal(context.attend(table, [(0, 0, 300)]), expected):
                wrong.append(caller)

    callers = [threading.Thread(target=attend_often, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    native.load(1)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


def test_a_process_whose_threads_have_worked_exits_by_itself() -> None:
    program = """
import torch
from streamkv.ops import native
table = native.load(4)
x = torch.ones(2000, 512)
for _ in range(50):
    total = table.rms_norm(x, x[0], 0.0).sum().item()
print(total)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1024000.0", "")


def cpu_tree(root: Path, cores: list[int], files: dict[str, str]) -> Path:
    for cpu, core in enumerate(cores):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files |= {f"{topology}/physical_package_id": "0\n", f"{topology}/core_id": f"{core}\n"}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_hyperthreads_of_a_core_count_once_and_only_allowed_ones_count(tmp_path: Path) -> None:
    root = cpu_tree(tmp_path, [0, 1, 2, 3, 0, 1, 2, 3], {})
    assert count_cores(range(8), root) == 4
    assert count_cores([1, 5, 2], root) == 2


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_cgroup_quota_cuts_the_count_wherever_in_the_tree_it_is_set(
    tmp_path: Path, limit: str, expected: int
) -> None:
    files = {"proc/self/cgroup": "0::/app/worker\n", "sys/fs/cgroup/app/cpu.max": limit + "\n"}
    assert count_cores(range(4), cpu_tree(tmp_path, [0, 1, 2, 3], files)) == expected


def test_a_quota_of_cgroup_version_1_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/app\n2:memory:/app\n",
        "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000\n",
    }
    assert count_cores(range(4), cpu_tree(tmp_path, [0, 1, 2, 3], files)) == 3


def test_where_nothing_is_known_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert count_cores([4, 7], tmp_path) == 2
