"""A TOML file with the options that flags also set: `max-num-seqs = 8` is --max-num-seqs 8.

Owns its keys: the names of flags, with - or _, all at the top. Which there are is the caller's to
say. Invariant: what was read has its field's type and range; every error names file and key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .errors import ConfigError
from .fields import Field, by_all_names, guess

MAX_BYTES = 1 << 20  # whatever has more is no list of options, and may never end

Check = Callable[[Mapping[str, Any]], None]


class ConfigFile(NamedTuple):
    """What a file asks for."""

    path: str
    values: Mapping[str, Any]  # by the field's name


def read_config_file(
    path: str,
    config_types: Iterable[type[msgspec.Struct]],
    others: Iterable[str],
    check: Check,
) -> ConfigFile:
    """The file's values of these Structs' fields. Values of `others`, names without a field, are
    only checked, by `check`. ConfigError."""
    known: dict[str, Field] = {}
    for one in config_types:
        known |= by_all_names(one)
    names = {*known, *others}
    values: dict[str, Any] = {}
    unused: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(f"{path}: {_unknown(key, value, known)}")
        name = known[name].name if name in known else name
        if name in values or name in unused:
            raise ConfigError(f"{path}: {key} is set twice, under two names; keep one of them")
        if name in known:
            values[name] = known[name].parse(value, f"{path}: {key}")
        else:
            unused[name] = value
    try:
        check(unused)
        for one in config_types:  # what a Struct says of its values together
            one(**{name: values[name] for name in one.__struct_fields__ if name in values})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    return ConfigFile(path, values)


def _read(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: expected a TOML file of at most 1 MiB, got more")
        return tomllib.loads(content.decode("utf-8-sig"))  # without the mark of some editors
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; expected a TOML file") from None
    except RuntimeError as error:  # ~nobody
        raise ConfigError(f"--config {path}: {error}; expected a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(f"{path}: expected TOML, lines like max-num-seqs = 8: {reason}") from None


def _unknown(key: str, value: Any, known: Mapping[str, Field]) -> str:
    if isinstance(value, dict):
        return f"expected keys in no section, got [{key}]: take that line away"
    keys = [field.key for field in known.values()]
    hint = guess(key.replace("_", "-"), keys) or "docs/flags.md lists them"
    return f"expected names of serve's flags without --, got {key}: {hint}"
