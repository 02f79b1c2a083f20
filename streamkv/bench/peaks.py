"""What the machine can do: the limits that kernels are measured against.

Owns which limits there are. They are measured in the same run as what they limit, since clocks and
neighbours change from hour to hour. Invariant: other load only ever lowers what is measured, so the
peak is the best of several measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

MIB = 1 << 20
MEMORY_BYTES = 512 * MIB  # more than any cache holds
SHARED_CACHE_BYTES = 16 * MIB
OWN_CACHE_BYTES = MIB // 2  # of each thread


class Peaks(NamedTuple):
    """Of all threads together: operations (a multiply-add is two) or bytes per second."""

    fma: float
    bf16_dot: float  # 0: the kernels have no instruction
    int8_dot: float  # of bytes, by the instructions that the kernels use
    memory: float
    shared_cache: float
    own_cache: float


def measure_peaks(cpu: ModuleType, team: Any, seconds: float = 0.02) -> Peaks:
    """Takes about 6 * `seconds` and the time to fill the memory."""
    read = cpu.peaks.read
    own_bytes = OWN_CACHE_BYTES * team.num_threads
    return Peaks(
        fma=cpu.peaks.fma(team, seconds),
        bf16_dot=cpu.peaks.bf16_dot(team, seconds),
        int8_dot=cpu.peaks.int8_dot(team, seconds),
        memory=read(team, MEMORY_BYTES, MIB, 1, seconds),
        shared_cache=read(team, SHARED_CACHE_BYTES, MIB // 4, 1, seconds),
        own_cache=read(team, own_bytes, OWN_CACHE_BYTES, 32, seconds),
    )


def best_of(measured: Sequence[Peaks]) -> Peaks:
    """Of each limit."""
    return Peaks(*map(max, zip(*measured, strict=True)))


def shown(peaks: Peaks) -> dict[str, float]:
    """In billions per second; without what the kernels have no instruction for."""
    units = {"fma": "GFLOP/s", "bf16_dot": "GFLOP/s", "int8_dot": "GOP/s"}
    return {
        f"{name} {units.get(name, 'GB/s')}": value / 1e9
        for name, value in peaks._asdict().items()
        if value
    }
