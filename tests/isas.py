"""The instruction sets that long tests run under."""

from __future__ import annotations

from streamkv import _cpu


def distinct_isas() -> list[str]:
    """Those whose tables differ in width and in more than products of integers or bfloat16, the
    one that is used here first. Every one that this CPU runs is `_cpu.available_isas()`."""
    best, *others = _cpu.available_isas()
    return [best, *(isa for isa in others if isa in ("avx2", "baseline", "neon"))]
