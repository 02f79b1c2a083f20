"""Strange JSON: values that fields don't expect, and documents that are none.

Owns how a body is written, so that it can hold what `json.dumps` never writes. Knows no endpoint.
Invariant: everything follows from the `random.Random` that is given.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

NUM_DEEP = 3000


class Raw(bytes):
    """A value as it is to stand in the document, JSON or not."""


def nested(opening: bytes, closing: bytes, depth: int) -> Raw:
    return Raw(opening * depth + closing * depth)


NOT_JSON: Sequence[Raw] = (
    *map(Raw, (b"NaN", b"-Infinity", b"1e999", b"0x10", b"01", b"1.", b".5", b"+1", b"tru", b"")),
    *map(Raw, (b"'a'", b'"a', b'"\\x"', b'"a\nb"', b'"\x00"', b'"\xff"', b'"\xc0\x80"')),
    *map(Raw, (b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xf0\x9f\x98"', b'"\\u12"', b"[1,]")),
    *map(
        Raw, (b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\u0041"', b'{"a":}', b"{1:2}", b"/**/")
    ),
    Raw(b"[" * NUM_DEEP),
    Raw(b'{"a":' * NUM_DEEP),
)
ODD_JSON: Sequence[Raw] = (
    *map(Raw, (b"-0", b"-0.0", b"1e5", b"1E+2", b"1.0", b"1e-400", b"4e-324", b"1e308")),
    *map(Raw, (b'"\\u0000"', b'"\\ud83d\\ude00"', b'"\\u0061"', b'"\\/"', b'"\\u2028"')),
    Raw(b"9" * 400),
    Raw(b"9" * 5000),
    Raw(b"0." + b"3" * 5000),
    nested(b"[", b"]", 200),
    nested(b"[", b"]", NUM_DEEP),
    Raw(b'{"a":' * 100 + b"1" + b"}" * 100),
    Raw(b'{"a": 1, "a": 2}'),
    Raw(b'{"": ""}'),
    Raw(b"[" + b"1," * 9999 + b"1]"),
    Raw(b'"' + b"a" * 70_000 + b'"'),
)
STRANGE: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 7, 100, 129, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64, -(2**63) - 1, 0.5, -0.5, 1.5, 2.1, -1e308, 1e-320),
    *("", " ", "a", "0", "1", "null", "true", "auto", "none", "required", "user", "\0", "\x7f"),
    *("\ud7ff\uffff", "😀" * 9, "e\u0301\u0327", "\u202e", "<|im_end|>", "{{ 7 * 7 }}", "../../x"),
    *([], [[]], [None], [""], ["a"], [1], [1, "a"], [[1], "a"], [2**40], [-1], [0.5], [True]),
    *([{}], {}, {"a": 1}, {"1": 1}, {"-1": 1}, {"1": "a"}, {"type": "text"}, {"type": 7}),
    *({"type": None}, {"role": "user"}, {"9" * 5000: 1}, {"include_usage": True}, {"$ref": "#"}),
)


def strange(rng: random.Random) -> Any:
    """Any of them; those that are no JSON less often, since they hide all else in a document."""
    return rng.choice(rng.choices((STRANGE, ODD_JSON, NOT_JSON), (12, 4, 1))[0])


def altered(rng: random.Random, value: Any) -> Any:
    """Something near `value`: of another type, off by a little, too many or too few of it."""
    if isinstance(value, bool) or value is None:
        return rng.choice((int(value or 0), str(value), [value], not value))
    near: Sequence[Any] = ()
    if isinstance(value, int | float):
        near = (value + 1, value - 1, -value, value * 1e6, str(value), [value], float(value))
    elif isinstance(value, str):
        near = (value + "x", value[:-1], value.upper(), [value], value * 300, value + "\0", None)
    elif isinstance(value, list):
        near = (value * 2, value * 40, value[:-1], [value], [*value, strange(rng)], {"0": value})
    if near:
        return rng.choice(near)
    if isinstance(value, dict) and value:
        return _altered_object(rng, value)
    return strange(rng)


def _altered_object(rng: random.Random, value: dict[str, Any]) -> Any:
    name = rng.choice(sorted(value))
    match rng.randrange(5):
        case 0:
            return {key: one for key, one in value.items() if key != name}
        case 1:
            return {**value, name: strange(rng)}
        case 2:
            return {**value, f"{name}_": 1, "\0": None}
        case 3:
            return [value]
    return {**value, name: altered(rng, value[name])}


# --- documents --------------------------------------------------------------------------------


def dump(value: Any, *, twice: str = "") -> bytes:
    """A JSON document, with each Raw as it is. The member `twice` stands there two times."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, dict):
        members = [json.dumps(key).encode() + b":" + dump(one) for key, one in value.items()]
        if twice in value:
            members.append(json.dumps(twice).encode() + b":" + dump(value[twice]))
        return b"{" + b",".join(members) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(dump, value)) + b"]"
    return json.dumps(value, ensure_ascii=False).encode()


def _at(rng: random.Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1)


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: _at(rng, data)]


def _drop(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return data[:at] + data[at + 1 :]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    new = rng.choice(
        (b"\x00", b"\xff", b'"', b"\\", b",", b"{", b"]", b"\n", b"\xef\xbb\xbf", b"\xed")
    )
    return data[:at] + new + data[at:]


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return (
        data[:at]
        + bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at : at + 1])
        + data[at + 1 :]
    )


def _repeat(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return data[:at] + data[at : at + 30] * 2 + data[at + 30 :]


DAMAGES: Sequence[Callable[[random.Random, bytes], bytes]] = (
    *(_truncate, _drop, _insert, _flip, _repeat),
    lambda rng, data: b"\xef\xbb\xbf" + data,
    lambda rng, data: data.decode(errors="replace").encode("utf-16"),
    lambda rng, data: data + rng.choice((b" ", b"x", b"{}", b"\x00", b"\n\n")),
    lambda rng, data: b"[" + data + b"]",
    lambda rng, data: b" " * 9000 + data,
    lambda rng, data: rng.choice(
        (b"", b"null", b"1", b'""', b"[]", b"{}", b"\x00", b"\x1f\x8b\x08")
    ),
    lambda rng, data: rng.randbytes(rng.randrange(1, 60)),
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The document, broken in one way; by chance it may still be one."""
    return rng.choice(DAMAGES)(rng, data)
