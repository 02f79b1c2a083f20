"""Philox4x32-10 against the published vectors, and the uniforms made of it."""

from __future__ import annotations

import numpy as np
import pytest

from streamkv.runner.philox import philox4x32, uniforms


# Counter, key and result from Random123's kat_vectors.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    lanes = [np.array([word, 0], np.uint64) for word in (*counter, *key)]
    result = philox4x32(tuple(lanes[:4]), tuple(lanes[4:]))
    assert tuple(int(word[0]) for word in result) == expected


def draw(seed, position, choice=0):
    arrays = (np.array(seed, np.int64), np.array(position, np.int32), np.array(choice, np.int32))
    return uniforms(*np.broadcast_arrays(*np.atleast_1d(*arrays)))


def test_uniforms_fill_the_unit_interval_evenly():
    values = draw(7, np.arange(20000))
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 49 + 5 * np.sqrt(2 * 49)


def test_seed_choice_and_position_each_matter_and_lanes_do_not():
    base = draw(1, 5, 2)
    assert base != draw(2, 5, 2) and base != draw(1, 6, 2) and base != draw(1, 5, 3)
    assert draw(1 << 32, 5, 2) != draw(0, 5, 2), "the seed's high half counts"
    assert draw(-1, 5, 2) == draw(-1, 5, 2), "negative seeds are seeds"
    many = draw([9, 1, -4], [3, 5, 8], [0, 2, 1])
    assert many[1] == base
