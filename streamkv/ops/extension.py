"""The C++ extension `streamkv._cpu`: importing it, choosing its instruction set and its tuning.

Knows nothing of what is computed with it. Owns the choice, which is made once per process, when
the module is first asked for: weights are packed for one instruction set, and the bits of all
models depend on it; the tuning (tuning.py) is that of the instruction set. Invariant: whoever has
the module from here has one whose kernels run on this CPU, and another name in STREAMKV_CPU_ISA
later is an error, never a change.
"""

from __future__ import annotations

import os
import threading
from types import ModuleType

from ..errors import ConfigError
from .cpu_count import num_usable_cores
from .tuning import Tuning, apply_tuning

_lock = threading.Lock()  # models are loaded on threads of their own
_chosen: str | None = None  # guarded by it
_tuning: Tuning | None = None  # set with it


def load_extension(num_threads: int = 0) -> ModuleType:
    """The module, with the best instruction set here or the one STREAMKV_CPU_ISA names, tuned for
    so many threads (0: one a physical core).

    Once chosen it stays: later calls change nothing, and without a name they take what is there.
    Raises ConfigError where the extension isn't built, or for an instruction set that is unknown,
    that this CPU lacks, or that isn't the one chosen before; or a wrong STREAMKV_TUNING.
    """
    try:
        from streamkv import _cpu
    except ImportError as error:
        raise ConfigError(
            f"the native kernels can't be imported ({error}); "
            "build them with `pip install .`, or use --ops reference"
        ) from error
    cpu: ModuleType = _cpu
    isas = cpu.available_isas()
    if not isas:
        raise ConfigError(
            "the native kernels expected SSE4.2, which this CPU lacks; use --ops reference"
        )
    _choose(cpu, os.environ.get("STREAMKV_CPU_ISA", ""), isas, num_threads)
    return cpu


def tuning_in_use(num_threads: int = 0) -> Tuning:
    """Of the extension, which is loaded if it isn't. ConfigError as there."""
    load_extension(num_threads)
    assert _tuning is not None
    return _tuning


def _choose(cpu: ModuleType, name: str, isas: list[str], num_threads: int) -> None:
    """Set the instruction set and the tuning unless that was done; `name` may be empty."""
    global _chosen, _tuning
    with _lock:
        if _chosen is not None and name in ("", _chosen):
            return
        if _chosen is not None and name in isas:
            raise ConfigError(
                f"STREAMKV_CPU_ISA: expected {_chosen!r}, which this process chose when its first "
                f"model was loaded, got {name!r}; it is chosen once per process: start another one"
            )
        try:
            cpu.set_isa(name or isas[0])  # raises for names that aren't in `isas`
        except ValueError as error:
            raise ConfigError(f"STREAMKV_CPU_ISA: {error}") from error
        _tuning = apply_tuning(cpu, num_threads or num_usable_cores())
        _chosen = cpu.isa()
