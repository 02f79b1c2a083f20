"""Numbers and arrays of numpy, torch and pandas, as Python's own.

Knows none of these libraries: what comes from them has `tolist`. Invariant: everything else is
left as it is.
"""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """A number, or a list of numbers or texts (of lists of those), where one of theirs came."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()
