"""Values of a client's parameters, checked: of the right kind, in range, not too many.

Knows no parameter. Invariant: what is returned is Python's own, also where numpy's came; what is
wrong is an InvalidRequestError that names the parameter. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from .errors import InvalidRequestError
from .plain import plain


def truth(name: str, value: Any, others: str = "") -> bool:
    """Whether it is true; None is false."""
    value = plain(value)
    if value not in (None, True, False) or isinstance(value, float):
        raise InvalidRequestError(
            f"{name}: expected true or false{others}, got {value!r:.100}", param=name
        )
    return bool(value)


def number(
    name: str,
    value: Any,
    low: float,
    high: float,
    what: str = "a number",
    *,
    above: bool = False,
) -> Any:
    """The number, if low <= value <= high (low < value with `above`); NaN never is."""
    if type(value) not in (int, float):
        value = plain(value)
    is_number = not isinstance(value, bool) and isinstance(value, (int, float))
    # NaN is in no range. A comparison takes integers that no float can hold.
    if not is_number or not (low <= value <= high) or (above and value == low):
        bracket = "(" if above else "["
        raise InvalidRequestError(
            f"{name}: expected {what} in {bracket}{low}, {high}], got {value!r:.100}", param=name
        )
    return value


def whole(name: str, value: Any, low: int, high: int, what: str = "a number") -> int:
    """The number, if it is an int from low to high."""
    found = number(name, value, low, high, what)
    if not isinstance(found, int):
        raise InvalidRequestError(f"{name}: expected a whole number, got {found!r}", param=name)
    return found


def few(name: str, items: Any, limit: int, what: str) -> tuple[Any, ...]:
    """The items, at most `limit`: they are looked at one by one, while others wait."""
    if items is None:
        return ()
    if not isinstance(items, (tuple, list, dict)):
        items = plain(items)
        if not isinstance(items, Iterable) or isinstance(items, (str, bytes)):
            raise InvalidRequestError(
                f"{name}: expected a list of {what}, got {items!r:.100}", param=name
            )
        items = tuple(itertools.islice(items, limit + 1))
    if len(items) > limit:
        raise InvalidRequestError(f"{name}: expected at most {limit} {what}, got more", param=name)
    return tuple(items)


def token_ids(name: str, items: Any, limit: int) -> tuple[int, ...]:
    """At most `limit` token ids, of whatever vocabulary."""
    return tuple(whole(name, item, 0, 2**31 - 1) for item in few(name, items, limit, "tokens"))


def texts(name: str, items: Any, limit: int, max_chars: int | None = None) -> tuple[str, ...]:
    """At most `limit` texts, none of them empty; `max_chars` characters together."""
    found = few(name, items, limit, "strings")
    if any(not isinstance(text, str) or not text for text in found):
        raise InvalidRequestError(f"{name}: expected non-empty strings", param=name)
    num_chars = sum(map(len, found))
    if max_chars is not None and num_chars > max_chars:
        raise InvalidRequestError(
            f"{name}: expected at most {max_chars} characters together, got {num_chars}",
            param=name,
        )
    return found
