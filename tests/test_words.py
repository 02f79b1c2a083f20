"""Numbers with their units."""

from __future__ import annotations

import pytest

from streamkv.words import counted, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        ((1 << 30) - (1 << 10), "1.0 GiB"),
        (3 << 29, "1.5 GiB"),
        ((100 << 20) - 1, "100 MiB"),
        (200 << 20, "200 MiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_sizes_are_shown_in_units_that_fit(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_one_of_them_is_no_plural():
    assert [counted(number, "row") for number in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
