"""What of a JSON Schema is seen to before llguidance reads it.

Owns which numbers it would change, which formats mean nothing, and which objects are closed. Knows
no grammars. Invariants: a number that the library's grammar admits is within the schema's bounds,
and is the one that `const` or `enum` names; what is changed here admits no answer that the schema
doesn't.

- The library reads a number as a double, and as a 64-bit integer where integers are bounded. A
  bound beyond is taken for the nearest there is. That makes some narrower, which does no harm
  (`maximum` of an unsigned 64-bit integer), and others wider: those are refused.
- A format that JSON Schema doesn't know restricts nothing (2020-12, Validation, 7.2.3).
- An object whose schema names `properties` may have others by JSON Schema, and a small model goes
  on to invent some. It has none here, unless `additionalProperties` says so, or schemas are
  combined, so that one doesn't know the properties of the other.
"""

from __future__ import annotations

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


# What may name, ask for or forbid properties.
_OF_OBJECTS = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "$ref", "$dynamicRef"),
)
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef")
_CONDITIONS = (
    *("not", "if", "then", "else", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "dependentRequired"),
)


def follow(schema: Any) -> bool:
    """Change it into the schema to follow; False if there is nothing to change."""
    schemas = [one for one in _schemas(schema) if isinstance(one, dict)]
    hinted = [one for one in schemas if _is_hinted(one)]
    are_whole = not any(map(_is_combined, schemas))
    opened = [one for one in schemas if are_whole and _is_open(one)]
    for one in hinted:
        del one["format"]
    for one in opened:
        one["additionalProperties"] = False
    return bool(hinted or opened)


def _is_hinted(schema: Mapping[str, Any]) -> bool:
    value = schema.get("format")
    return isinstance(value, str) and value not in _FORMATS


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Whether its object must obey several schemas at once."""
    found = [key for key in _OF_OBJECTS if key in schema]
    parts = schema.get("allOf")
    return (
        any(key in schema for key in _CONDITIONS)
        or (len(found) > 1 and any(key in _COMBINING for key in found))
        or (isinstance(parts, list) and len(parts) > 1)
    )


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether it could do without properties that it doesn't name."""
    properties, required = schema.get("properties"), schema.get("required", ())
    return (
        isinstance(properties, Mapping)
        and not any(key in schema for key in ("additionalProperties", "patternProperties"))
        and "minProperties" not in schema
        and isinstance(required, list | tuple)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def check_numbers(schema: Any) -> None:
    """ValueError for one that can't be followed. Integers are ints in it, other numbers Decimals or
    floats."""
    for one in _schemas(schema):
        _check_bounds(one)
        for number in _numbers_in([one.get(key) for key in ("const", "enum")]):
            if abs(number) > EXACT and (abs(number) >= _INT64 or int(float(number)) != number):
                raise ValueError(
                    f"const, enum: expected integers between -{EXACT} and {EXACT}, as others can't "
                    f"be followed exactly, got {number!s:.100}"
                )


def _numbers_in(values: list[Any]) -> Iterator[int]:
    while values:
        one = values.pop()
        if isinstance(one, list):
            values += one
        elif isinstance(one, Mapping):
            values += one.values()
        elif isinstance(one, int) and not isinstance(one, bool):
            yield one


def _check_bounds(schema: Mapping[str, Any]) -> None:
    for keyword in _BOUNDS:
        value = schema.get(keyword)
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
