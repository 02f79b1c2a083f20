"""What of a JSON Schema is seen to before llguidance reads it.

Owns which numbers it would change, which formats mean nothing, and which objects are closed. Knows
no grammars. Invariants: a number that the library's grammar admits is within the schema's bounds,
and an integer is the one that `const` or `enum` names; what is changed here admits no answer that
the schema doesn't.

- The library reads a number as a double, and as a 64-bit integer where integers are bounded. A
  bound beyond is taken for the nearest there is. That makes some narrower, which does no harm
  (`maximum` of an unsigned 64-bit integer), and others wider: those are refused.
- A format that JSON Schema doesn't know restricts nothing (2020-12, Validation, 7.2.3).
- An object whose schema names `properties` may have others by JSON Schema, and a small model goes
  on to invent some. It has none here, unless `additionalProperties` says so. Where two schemas may
  have a say in one object, here or elsewhere in the document, all objects stay as they are: one
  schema doesn't know the other's properties, and two of `oneOf` may differ by them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

EXACT = 1 << 53  # up to here each integer is a double
_INT64 = 1 << 63

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples", "example")


# Of all versions. Others are hints for programs: "binary", "password", "int32", …
_FORMATS = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uuid "
    "uri uri-reference iri iri-reference uri-template json-pointer relative-json-pointer regex "
    "ip-address host-name color phone style utc-millisec".split()
)


# What may name, ask for or forbid properties.
_OF_OBJECTS = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "allOf", "anyOf", "$ref", "$dynamicRef"),
)
_COMBINING = ("allOf", "anyOf", "$ref", "$dynamicRef")
_ALWAYS_COMBINING = (
    *("oneOf", "not", "if", "then", "else", "contains", "dependentSchemas", "dependencies"),
    *("dependentRequired", "unevaluatedProperties"),
)


def prepare(schema: Any) -> bool:
    """Change it into the schema to follow; False if there is nothing to change. ValueError for a
    number that can't be followed. Integers are ints in it, other numbers Decimals or floats."""
    schemas = [one for one in _schemas(schema) if isinstance(one, dict)]
    are_whole, hinted, objects = True, [], []
    for one in schemas:
        _check_bounds(one)
        values = [one[key] for key in ("const", "enum") if key in one]
        if values:
            are_whole = not _have_objects(values) and are_whole
        are_whole = are_whole and not _is_combined(one)
        if _is_hinted(one):
            hinted.append(one)
        if "properties" in one and _is_open(one):
            objects.append(one)
    for one in hinted:
        del one["format"]
    if not are_whole:
        objects.clear()
    for one in objects:
        one["additionalProperties"] = False
    return bool(hinted or objects)


def _is_hinted(schema: Mapping[str, Any]) -> bool:
    value = schema.get("format")
    return isinstance(value, str) and value not in _FORMATS


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Whether an object must obey several schemas at once, of which this is one."""
    if any(key in schema for key in _ALWAYS_COMBINING):
        return True
    if "properties" in schema and "patternProperties" in schema:
        return True
    if not any(key in schema for key in _COMBINING):
        return False
    parts = schema.get("allOf")
    num = sum(key in schema for key in _OF_OBJECTS)
    return num > 1 or (isinstance(parts, list) and len(parts) > 1)


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether it could do without properties that it doesn't name."""
    properties, required = schema["properties"], schema.get("required", ())
    return (
        isinstance(properties, Mapping)
        and False not in properties.values()
        and not any(key in schema for key in ("additionalProperties", "minProperties"))
        and isinstance(required, list | tuple)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def _have_objects(values: list[Any]) -> bool:
    """Whether there are any among these, at any depth. ValueError for an integer that the library
    would change."""
    found = False
    while values:
        one = values.pop()
        if isinstance(one, list):
            values += one
        elif isinstance(one, Mapping):
            found = True
            values += one.values()
        elif isinstance(one, int) and abs(one) > EXACT:
            if abs(one) >= _INT64 or int(float(one)) != one:
                raise ValueError(
                    f"const, enum: expected integers between -{EXACT} and {EXACT}, as others can't "
                    f"be followed exactly, got {one!s:.100}"
                )
    return found


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
