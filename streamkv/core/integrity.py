"""IntegrityError: the scheduling core contradicts itself.

Raised by `check_integrity()` and by the few places that would otherwise spread the damage. It
always means a bug in this package or in a runner, never a bad request; the message begins with
the number of the violated invariant (listed in `scheduler.py`).
"""

from __future__ import annotations


class IntegrityError(AssertionError):
    """An invariant of the scheduling core does not hold."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant
