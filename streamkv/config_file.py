"""A TOML file with the options that flags also set: `max-num-seqs = 8` is --max-num-seqs 8.

Owns its keys: the names of flags, with - or _, all at the top. Which there are is the caller's to
say. Invariant: what was read has its field's type and range; every error names file and key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError
from .fields import Field

Check = Callable[[Mapping[str, Any]], None]


class ConfigFile(NamedTuple):
    """What a file asks for."""

    path: str
    values: Mapping[str, Any]  # by the field's name


def read_config_file(
    path: str, fields: Iterable[Field], others: Iterable[str] = (), check: Check | None = None
) -> ConfigFile:
    """The file's values of these fields. Values of `others`, names without a field, are only
    checked, by `check`. ConfigError."""
    known = {field.name: field for field in fields}
    names = {*known, *others}
    values: dict[str, Any] = {}
    unused: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(f"{path}: {_unknown(key, known)}")
        if name in values or name in unused:
            raise ConfigError(f"{path}: {key} is set twice, with - and with _; keep one of them")
        if name in known:
            values[name] = known[name].parse(value, f"{path}: {key}")
        else:
            unused[name] = value
    if check is not None:
        try:
            check(unused)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from None
    return ConfigFile(path, values)


def _read(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with Path(path).expanduser().open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; expected a TOML file") from None
    except RuntimeError as error:  # ~nobody
        raise ConfigError(f"--config {path}: {error}; expected a TOML file") from None
    except ValueError as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(f"{path}: expected TOML, lines like max-num-seqs = 8: {reason}") from None


def _unknown(key: str, known: Mapping[str, Field]) -> str:
    from difflib import get_close_matches

    keys = [field.key for field in known.values()]
    near = get_close_matches(key.replace("_", "-"), keys, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/flags.md lists them"
    return f"expected names of serve's flags without --, in no section, got {key}: {hint}"
