"""Values out of a config.json: read one key, check it, or say what is wrong with it.

Knows nothing of what the keys mean. Invariant: every error names the key, what was expected and
what came, in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelLoadError

MAX_SIZE = 2**31 - 1


def read_size(
    config: Mapping[str, Any],
    key: str,
    *,
    default: int | None = None,
    least: int = 1,
    most: int = MAX_SIZE,
) -> int:
    """A whole number in [least, most]; `default` stands for a missing key or null."""
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise unexpected(key, f"a whole number from {least} to {most}", value)
    return value


def read_number(
    config: Mapping[str, Any], key: str, *, default: float | None = None, least: float = 0.0
) -> float:
    """A finite number above 0 and not below `least`; `default` is for a missing key or null."""
    value = config.get(key)
    if value is None and default is not None:
        value = default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or not is_number or not max(0.0, least) <= value < 1e30 or value == 0:
        expected = f"a number of at least {least}" if least else "a positive number"
        raise unexpected(key, expected, value)
    return float(value)


def read_switch(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """true or false; `default` is for a missing key."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise unexpected(key, "true or false", value)
    return value


def unexpected(key: str, expected: str, got: object) -> ModelLoadError:
    """The error for one key of a config."""
    return ModelLoadError(f"model config: expected {key} to be {expected}, got {got!r:.100}")
