"""How far a long task is, for whoever looks at it."""

from __future__ import annotations

from collections.abc import Callable

Watch = Callable[[str, float], None]  # told a stage in words, and its fraction done; may raise


def unwatched(stage: str, fraction: float) -> None:
    """Progress that nobody looks at."""
