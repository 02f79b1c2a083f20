"""What of a JSON Schema is seen to before llguidance reads it.

Owns which bounds of numbers it would widen, and which formats mean nothing. Knows no grammars.
Invariants: with the bounds that pass, a number that the library's grammar admits is within the
schema's own; a format that JSON Schema doesn't know restricts nothing (2020-12, Validation, 7.2.3),
and one that it knows stays.

The library reads a bound as a double, and as a 64-bit integer where integers are bounded: one
beyond is taken for the nearest there is. That makes some bounds narrower, which does no harm
(`maximum` of an unsigned 64-bit integer), and others wider.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

EXACT = 1 << 53  # up to here each integer is a double
_INT64 = 1 << 63

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")


# Of all versions. Others are hints for programs: "binary", "password", "int32", …
_FORMATS = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uuid "
    "uri uri-reference iri iri-reference uri-template json-pointer relative-json-pointer regex "
    "ip-address host-name color phone style utc-millisec".split()
)


def without_hints(schema: Any) -> Any:
    """Without formats that JSON Schema doesn't know: itself, if it has none."""
    if not any(map(_is_hinted, _schemas(schema))):
        return schema
    schema = copy.deepcopy(schema)
    for one in _schemas(schema):
        if isinstance(one, dict) and _is_hinted(one):
            del one["format"]
    return schema


def _is_hinted(schema: Mapping[str, Any]) -> bool:
    value = schema.get("format")
    return isinstance(value, str) and value not in _FORMATS


def check_bounds(schema: Any) -> None:
    """ValueError for a bound that can't be followed. Integers are ints in it, other numbers
    Decimals or floats."""
    for one in _schemas(schema):
        for keyword in _BOUNDS:
            value = one.get(keyword)
            if isinstance(value, int | float | Decimal) and _is_widened(keyword, value):
                raise ValueError(
                    f"{keyword}: expected a number between -{EXACT} and {EXACT}, as others can't "
                    f"be followed exactly, got {value!s:.100}"
                )


def _is_widened(keyword: str, value: int | float | Decimal) -> bool:
    value = Decimal(value)
    if keyword in ("minimum", "exclusiveMinimum"):  # as an upper bound on the other side of zero
        value = -value
    if keyword.startswith("exclusive"):  # the next integer is taken, which may be no double
        return abs(value) >= EXACT and value < _INT64
    if -EXACT < value < EXACT - 1 or value >= _INT64 - 1:
        return False
    return value <= -_INT64 or Decimal(float(value)) > value


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All of them in one another, and other objects that aren't values."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, Mapping):
            yield one
            for key, value in one.items():
                if key in _NAMED and isinstance(value, Mapping):
                    waiting += value.values()
                elif key not in _VALUES:
                    waiting.append(value)
