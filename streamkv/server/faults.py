"""What is wrong with a body's JSON, in the words that all errors here have.

Owns how msgspec's errors become InvalidRequestErrors: the path of the field at fault as `param`,
what was expected there (of a choice: all of it), what came. Knows no endpoint. Invariant: to say
what came, no more is read than a short document, however long the body is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

from ..errors import InvalidRequestError

_MAX_READ_BYTES = 1 << 14  # of a longer document it isn't said what came
_MAX_SHOWN_CHARS = 100

_PATH = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")
_NOT_CHOSEN = re.compile(r"Invalid (?:enum )?value .+", re.DOTALL)
_LIMIT = re.compile(r"Expected `(?:int|float)` ([<>]=) (\S+)")
_LENGTH = re.compile(r"Expected `(str|array|object)` of length ([<>]=) (\d+)")
_PATTERN = re.compile(r"Expected `str` matching regex .+", re.DOTALL)
_KIND = re.compile(r"Expected `(.+)`, got `(.+)`")

_type_info = functools.cache(inspect.type_info)

_BOUNDS = {"<=": "at most", ">=": "at least"}
_PLURALS = {"str": "characters", "array": "items", "object": "keys"}
_KINDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}


def validation_error(message: str, data: bytes | str, kind: Any) -> InvalidRequestError:
    """The error for a document that is no `kind`, of what msgspec says."""
    found = _PATH.search(message)
    param, reason = (found["path"], message[: found.start()]) if found else ("", message)
    steps = [name or index for name, index in _STEP.findall(param)]
    if (missing := _MISSING.fullmatch(reason)) is not None:
        param = f"{param}.{missing[1]}".lstrip(".")
        words = "required field is missing"
    elif (unknown := _UNKNOWN.fullmatch(reason)) is not None:
        param = f"{param}.{unknown[1]}".lstrip(".")
        words = f"expected one of {', '.join(_field_names(kind, steps))}, got {unknown[1]!r:.100}"
    else:
        is_key = found is not None and found["key"] is not None
        words = _expected(reason, kind, steps, is_key=is_key)
        if ", got " not in words and not is_key:
            words += _got(data, steps, is_length=_LENGTH.fullmatch(reason) is not None)
    return InvalidRequestError(f"{param or 'body'}: {words}", param=param or None)


def _expected(reason: str, kind: Any, steps: Sequence[str], *, is_key: bool) -> str:
    if _NOT_CHOSEN.fullmatch(reason) is not None:
        choices = _choices(kind, steps)
        if choices:
            return f"expected {'one of ' * (len(choices) > 1)}{', '.join(map(repr, choices))}"
    if (limit := _LIMIT.fullmatch(reason)) is not None:
        return f"expected {_BOUNDS[limit[1]]} {limit[2]}"
    if (length := _LENGTH.fullmatch(reason)) is not None:
        num = int(length[3])
        noun = _PLURALS[length[1]] if num != 1 else _PLURALS[length[1]].removesuffix("s")
        return f"expected {_BOUNDS[length[2]]} {num} {noun}"
    if _PATTERN.fullmatch(reason) is not None:
        return f"expected {_description(kind, steps)}"
    if (kinds := _KIND.fullmatch(reason)) is not None:
        names = [_KINDS.get(name, name) for name in kinds[1].split(" | ") if name != "null"]
        of_keys = " as each key" if is_key else ""
        return f"expected {' or '.join(names)}{of_keys}, got {_KINDS.get(kinds[2], kinds[2])}"
    return f"expected another value; {reason[:1].lower()}{reason[1:]}".replace("`", "")


# --- what came --------------------------------------------------------------------------------


def _got(data: bytes | str, steps: Sequence[str], *, is_length: bool) -> str:
    """ ", got …", where the value is found in a short document."""
    if len(data) > _MAX_READ_BYTES:
        return ""
    try:
        value = msgspec.json.decode(data)
        for step in steps:
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
        return ""
    if is_length:
        return f", got {len(value)}"
    if isinstance(value, list | dict):
        return f", got {_KINDS['array' if isinstance(value, list) else 'object']}"
    shown = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f", got {shown:.{_MAX_SHOWN_CHARS}}"


# --- what was expected ------------------------------------------------------------------------


def _kinds_at(kind: Any, steps: Sequence[str]) -> list[inspect.Type]:
    """What may stand at the end of this path."""
    kinds = _flat([_type_info(kind)])
    for step in steps:
        kinds = _flat([inner for one in kinds for inner in _inner(one, step)])
    return kinds


def _flat(kinds: Sequence[inspect.Type]) -> list[inspect.Type]:
    flat: list[inspect.Type] = []
    for one in kinds:
        while isinstance(one, inspect.Metadata):
            one = one.type
        flat += _flat(one.types) if isinstance(one, inspect.UnionType) else [one]
    return flat


def _inner(kind: inspect.Type, step: str) -> list[inspect.Type]:
    if isinstance(kind, inspect.StructType) and step == kind.tag_field:
        return [inspect.LiteralType((kind.tag,))]
    if isinstance(kind, inspect.StructType | inspect.TypedDictType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    return [kind.item_type] if isinstance(kind, inspect.ListType) else []


def _choices(kind: Any, steps: Sequence[str]) -> list[Any]:
    """The values that may stand there."""
    found: list[Any] = []
    for one in _kinds_at(kind, steps):
        if isinstance(one, inspect.LiteralType):
            found += one.values
        elif isinstance(one, inspect.EnumType):
            found += [member.value for member in one.cls]
    return found


def _description(kind: Any, steps: Sequence[str]) -> str:
    """Of a pattern, what its `description` says it is."""
    return next(iter(_described(_type_info(kind), steps)), "another text")


def _described(kind: inspect.Type, steps: Sequence[str]) -> list[str]:
    if isinstance(kind, inspect.UnionType):
        return [words for one in kind.types for words in _described(one, steps)]
    if isinstance(kind, inspect.Metadata):
        own = (kind.extra_json_schema or {}).get("description")
        return [own] if own and not steps else _described(kind.type, steps)
    if not steps:
        return []
    return [words for one in _inner(kind, steps[0]) for words in _described(one, steps[1:])]


def _field_names(kind: Any, steps: Sequence[str]) -> list[str]:
    return [
        field.encode_name
        for one in _kinds_at(kind, steps)
        if isinstance(one, inspect.StructType)
        for field in one.fields
    ]
