"""How much JSON a field of a body may have, and how a long body is read.

Owns that what is made of many small values, which takes a hundred times as long to read as to skip,
is refused unread. Knows no endpoint: their types say the bounds (`at_most`, `few`). Invariant: of
a body that passes, each field is there once, as it was measured.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect

from ..errors import InvalidRequestError

_LONG_BYTES = 1 << 17  # a shorter document is read in no time, whatever is in it
_MAX_BYTES = "max_bytes"
_MAX_OBJECTS = "max_objects"
_ABSENT = msgspec.Raw(b"null")


class _Limit(NamedTuple):
    kind: str
    num: int


def at_most(num_bytes: int) -> msgspec.Meta:
    """Of a body's field: longer JSON is refused, unread."""
    assert num_bytes >= _LONG_BYTES, "it would not be looked at in shorter documents"
    return msgspec.Meta(extra={_MAX_BYTES: num_bytes})


def few(num_objects: int) -> msgspec.Meta:
    """Of a body's field that is text or a list of objects, which hold long texts: a list with more
    opening braces, its texts' included, is refused, unread."""
    assert num_objects > _LONG_BYTES // 3, "it would not be looked at in shorter documents"
    return msgspec.Meta(extra={_MAX_OBJECTS: num_objects})


def bounded(data: bytes | str, kind: Any) -> bytes | str:
    """The document, with each known field once, if none of them exceeds its limit."""
    limits = _limits(kind) if len(data) > _LONG_BYTES else {}
    if not any(limits.values()):
        return data
    fields = fields_decoder(tuple(limits)).decode(data)
    for name, limit in limits.items():
        if limit is not None:
            _check(name, getattr(fields, name), limit)
    return msgspec.json.encode(fields)  # one that is sent twice was measured once


def _check(name: str, value: msgspec.Raw, limit: _Limit) -> None:
    if limit.kind == _MAX_BYTES:
        size, unit = len(value), "bytes of JSON"
    else:
        data = bytes(value)
        size, unit = data.count(b"{") * data.startswith(b"["), "objects (and braces in texts)"
    if size > limit.num:
        raise InvalidRequestError(
            f"{name}: expected at most {limit.num} {unit}, got {size}; send less", param=name
        )


@functools.cache
def _limits(kind: Any) -> Mapping[str, _Limit | None]:
    """The fields of a Struct, and how much they may have. Other types have no fields."""
    found = msgspec.inspect.type_info(kind)
    if not isinstance(found, msgspec.inspect.StructType):
        return {}
    tag: dict[str, _Limit | None] = {found.tag_field: None} if found.tag_field is not None else {}
    return tag | {field.encode_name: _limit(field.type) for field in found.fields}


def _limit(kind: msgspec.inspect.Type) -> _Limit | None:
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    extras = (one.extra or {} for one in kinds if isinstance(one, msgspec.inspect.Metadata))
    pairs = (pair for extra in extras for pair in extra.items())
    return next((_Limit(*pair) for pair in pairs if pair[0] in (_MAX_BYTES, _MAX_OBJECTS)), None)


@functools.cache
def fields_decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[msgspec.Struct]:
    """Finds these fields of an object, as they are, and skips all others."""
    fields = [(name, msgspec.Raw, _ABSENT) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, omit_defaults=True))


@contextmanager
def uncollected(num_bytes: int) -> Iterator[None]:
    """Without garbage collection while a long document is read, which makes thousands of objects
    and no garbage: to look for some takes ten times as long as the reading."""
    if num_bytes <= _LONG_BYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
