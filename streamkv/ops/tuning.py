"""What suits this machine best in who computes what of a product and what is fetched when.

Owns the numbers' file in the cache folder, what they are called and whose they are; which there are
and their ranges are the extension's, how they are measured is bench/tune.py's. Invariant: no bit of
a result depends on them, and a file that can't be used costs a line in the log, never a start.
"""

from __future__ import annotations

import logging
import os
import platform
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import msgspec

from ..cache import cache_dir
from ..errors import ConfigError

VARIABLE = "STREAMKV_TUNING"
FILE = "tuning.json"
DEFAULTS = "defaults"

Values = dict[str, int]  # by the names that _cpu.tuning() gives

logger = logging.getLogger(__name__)


class Tuning(NamedTuple):
    """Numbers, and why they are these."""

    values: Values
    changed: Values  # those that aren't the defaults
    source: str  # DEFAULTS, or where they come from

    def describe(self) -> str:
        words = ", ".join(_words(name, value) for name, value in self.changed.items()) or DEFAULTS
        return words if self.source == DEFAULTS else f"{words} ({self.source})"


class Measured(msgspec.Struct, frozen=True):
    """What was found best on machines of a class, and on which day."""

    values: Values
    date: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal[1]
    machines: dict[str, Measured]  # by class


def apply_tuning(cpu: ModuleType, num_threads: int) -> Tuning:
    """Set what the environment or else the file wants for this machine; ConfigError for what is
    wrong in the environment."""
    cpu.set_tuning({})
    wish = os.environ.get(VARIABLE, "")
    if wish == "off":
        return Tuning(cpu.tuning(), {}, DEFAULTS)
    if wish:
        try:
            cpu.set_tuning(_parse(wish))
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from error
        return _in_use(cpu, VARIABLE)
    measured = _measured_before(cpu, num_threads)
    if measured is None:
        return Tuning(cpu.tuning(), {}, DEFAULTS)
    return _in_use(cpu, f"measured here on {measured.date}")


def keep_tuning(machine: str, measured: Measured) -> Path:
    """Into the file, in one step, beside what it has of other classes; returns its path. OSError
    where that fails."""
    path = cache_dir() / FILE
    try:
        file = _read(path)
    except (OSError, msgspec.DecodeError):
        file = None  # it is of no use to anybody
    machines = {**(file.machines if file else {}), machine: measured}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(_File(1, machines)), indent=2)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="tuning-") as folder:
        written = Path(folder) / FILE
        written.write_bytes(content + b"\n")
        os.replace(written, path)
    return path


def machine_class(cpu: ModuleType, num_threads: int) -> str:
    """Machines for which the same numbers are best."""
    return f"{cpu_name()}, {cpu.isa()}, {num_threads} threads"


def cpu_name() -> str:
    """The model as the system has it: on Arm numbers of its maker and of the core."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(reversed([_field(line) for line in lines]))  # of the first CPU
    maker, core = fields.get("CPU implementer"), fields.get("CPU part")
    arm = f"Arm core {core} by {maker}" if maker and core else platform.processor()
    return fields.get("model name") or arm


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _in_use(cpu: ModuleType, source: str) -> Tuning:
    values, defaults = cpu.tuning(), cpu.default_tuning()
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    return Tuning(values, changed, source)


def _measured_before(cpu: ModuleType, num_threads: int) -> Measured | None:
    """What the file has for this machine, set; None where it is of no use."""
    try:
        path = cache_dir() / FILE
        file = _read(path)
        measured = file.machines.get(machine_class(cpu, num_threads)) if file else None
        if measured:
            cpu.set_tuning(measured.values)
    except ConfigError:  # nobody knows where home is
        return None
    except (OSError, msgspec.DecodeError, ValueError) as error:
        logger.warning(
            "%s: not used, the kernels keep their defaults: %s; "
            "`streamkv bench kernels --tune` writes it anew",
            path,
            error,
        )
        return None
    return measured


def _read(path: Path) -> _File | None:
    """None if there is none."""
    if not path.exists():
        return None
    if not path.is_file():  # reading a pipe would wait
        raise OSError("expected a file, got something else")
    return msgspec.json.decode(path.read_bytes(), type=_File)


def _parse(wish: str) -> Values:
    """`item_kib=64,ahead=2048`. ValueError; names and ranges are checked by the extension."""
    values: Values = {}
    for part in wish.split(","):
        name, _, number = part.partition("=")
        if not number.strip().isdecimal():
            raise ValueError(
                f"expected 'off' or names with numbers such as item_kib=64,ahead=2048, got {part!r}"
            )
        values[name.strip()] = int(number)
    return values


def _words(name: str, value: int) -> str:
    """`float_item_kib`, 64 → `float item 64 KiB`."""
    *words, last = name.split("_")
    unit = {"kib": "KiB", "tiles": "tiles"}.get(last)
    return " ".join([*words, str(value), unit] if unit else [*words, last, str(value), "bytes"])
