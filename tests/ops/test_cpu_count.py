"""How many physical cores this process may use, from files of /proc and /sys as they may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamkv.ops.cpu_count import count_cores, num_usable_cores


def test_this_machine_has_a_core() -> None:
    assert num_usable_cores() >= 1


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
