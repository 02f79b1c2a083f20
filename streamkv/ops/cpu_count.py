"""How many physical cores this process may use: its affinity mask, cut by its cgroup's CPU quota.

Kernels that fill the vector units gain nothing from a core's second hyperthread. Reads /proc and
/sys; where they say nothing, every CPU counts as a core and there is no quota.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def num_usable_cores() -> int:
    """At least 1."""
    if hasattr(os, "sched_getaffinity"):
        cpus: Iterable[int] = os.sched_getaffinity(0)
    else:
        cpus = range(os.cpu_count() or 1)
    return count_cores(cpus, Path("/"))


def count_cores(cpus: Iterable[int], root: Path) -> int:
    """Cores of these CPUs, at most the quota, whole cores only; `root` holds proc and sys."""
    num_cores = len({_core_of(cpu, root) for cpu in cpus})
    return max(1, min([num_cores, *(int(quota) for quota in _quotas(root))]))


def _core_of(cpu: int, root: Path) -> tuple[str, ...]:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    core = tuple(_read(topology / name) for name in ("physical_package_id", "core_id"))
    return core if all(core) else (f"cpu {cpu}",)


def _quotas(root: Path) -> list[float]:
    """CPUs' worth of time that each cgroup this process is in allows, where it limits it."""
    groups = dict(line.split(":", 2)[1:] for line in _read(root / "proc/self/cgroup").splitlines())
    quotas = []
    for controllers, group in groups.items():
        is_v2 = controllers == ""
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if is_v2 else "cpu")
        leaf = mount / group.lstrip("/")
        # In a container the path may be the host's, while the mount shows only our own part.
        for folder in {mount, leaf, *(p for p in leaf.parents if mount in p.parents)}:
            quotas += _quota_of(folder, is_v2)
    return quotas


def _quota_of(folder: Path, is_v2: bool) -> list[float]:
    if is_v2:
        limit, _, period = _read(folder / "cpu.max").partition(" ")
    else:
        limit, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return [int(limit) / int(period)] if limit.isdigit() and period.isdigit() else []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
