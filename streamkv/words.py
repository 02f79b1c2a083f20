"""Numbers as logs, messages and tables have them: sizes with a unit, counts with a noun."""

from __future__ import annotations


def format_bytes(num_bytes: int) -> str:
    """With a unit in which the number has at least one digit before the point."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1023.5:  # more is shown as 1,024
            break
        size, unit = size / 1024, larger
    if unit == "bytes":
        return counted(num_bytes, "byte")
    return f"{size:,.0f} {unit}" if size >= 99.95 else f"{size:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
