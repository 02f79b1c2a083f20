"""What a scenario found: a table for people, a dict for programs.

Owns the difference between a missed target, which is said, and a wrong answer, which fails the
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..stream import rounded

ONE_ROUND = "one round: other work of the machine may be in these times"


@dataclass
class Row:
    what: str
    value: float
    unit: str = ""  # "%": the value is a share
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_met(self) -> bool:
        """A row without a target always is."""
        below = self.at_most is None or self.value <= self.at_most
        return below and (self.at_least is None or self.value >= self.at_least)

    def shown(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        text = f"{value:.2f}" if abs(value) < 100 and value != int(value) else f"{value:,.0f}"
        return f"{text} {self.unit}".rstrip()

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"<= {self.shown(self.at_most)}"
        return "" if self.at_least is None else f">= {self.shown(self.at_least)}"


@dataclass
class Report:
    """One scenario."""

    name: str
    what: str  # one line: the load
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_compared: int = 0

    def add(self, what: str, value: float, unit: str = "", **target: float) -> None:
        self.rows.append(Row(what, value, unit, **target))

    def compare(self, what: str, answers: Sequence[Any], expected: Sequence[Any]) -> None:
        """Answers that must be equal, one by one."""
        for number, (answer, right) in enumerate(zip(answers, expected, strict=True)):
            self.num_compared += 1
            if answer != right:
                self.wrong.append(
                    f"{what}, answer {number}: expected {right!s:.90}, got {answer!s:.90}"
                )

    @property
    def num_missed(self) -> int:
        return sum(not row.is_met for row in self.rows)

    def text(self) -> str:
        head = [f"{self.name}: {self.what}", "measured", "target", ""]
        lines = [
            [
                f"  {row.what}",
                row.shown(row.value),
                row.target,
                "" if not row.target else "met" if row.is_met else "MISSED",
            ]
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)] if lines else []
        said = f"  {self.num_compared} answers compared, "
        said += f"{len(self.wrong)} WRONG" if self.wrong else "all right"
        return "\n".join(
            [
                head[0],
                *(
                    f"{line[0].ljust(widths[0])}  {line[1].rjust(widths[1])}  "
                    f"{line[2].ljust(widths[2])}  {line[3]}".rstrip()
                    for line in lines
                ),
                *(f"  {note}" for note in self.notes),
                said,
                *(f"  WRONG: {one}" for one in self.wrong[:10]),
            ]
        )

    def document(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "rows": [rounded({**vars(row), "met": row.is_met}) for row in self.rows],
            "notes": self.notes,
            "num_compared": self.num_compared,
            "wrong": self.wrong,
        }
