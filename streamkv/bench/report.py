"""How a benchmark's figures are shown: a table for people, and JSON for programs.

Owns the layout. Invariant: the JSON document is one line, and the last.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..ops.tuning import cpu_name

Figures = dict[str, float]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure over the rounds, which all have the same ones."""
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def table(title: str, rows: Sequence[tuple[str, Figures]]) -> str:
    """A line for each row; columns are the figures' names."""
    columns = list(dict.fromkeys(key for _, figures in rows for key in figures))
    cells = [
        [name, *(number(figures[key]) if key in figures else "" for key in columns)]
        for name, figures in rows
    ]
    return aligned([[title, *columns], *cells])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells under each other: the first of a line to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])],
        ).rstrip()
        for line in lines
    )


def number(value: float) -> str:
    """Three digits or more, and no more decimals than that takes."""
    decimals = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{decimals}f}"


def print_report(
    benchmark: str, title: str, rows: Sequence[tuple[str, Figures]], details: Mapping[str, Any]
) -> None:
    """The table, then the document."""
    print(table(title, rows))
    document = {
        "benchmark": benchmark,
        "machine": machine(),
        **details,
    }
    print(json.dumps(rounded(document)), flush=True)


def rounded(value: Any) -> Any:
    """The same with numbers of no more digits than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
