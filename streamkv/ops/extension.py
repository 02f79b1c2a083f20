"""The C++ extension `streamkv._cpu`: importing it and choosing its instruction set.

Knows nothing of what is computed with it. Invariant: whoever has the module from here has one whose
kernels run on this CPU; the choice holds for the whole process and is the same each time.
"""

from __future__ import annotations

import os
from types import ModuleType

from ..errors import ConfigError


def load_extension() -> ModuleType:
    """The module with the best instruction set here, or the one STREAMKV_CPU_ISA names.

    Raises ConfigError where the extension isn't built, or for an instruction set that is unknown
    or that this CPU lacks.
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
    try:
        cpu.set_isa(os.environ.get("STREAMKV_CPU_ISA") or isas[0])
    except ValueError as error:
        raise ConfigError(f"STREAMKV_CPU_ISA: {error}") from error
    return cpu
