"""Philox4x32-10: a counter-based random generator (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011).

Owns the function and nothing else: no state. Invariant: the same key and counter give the same
number everywhere, so what is drawn for a token can't depend on the batch it was computed in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio, sqrt(3) - 1
LOW = np.uint64(0xFFFFFFFF)
HIGH = np.uint64(32)

Words = NDArray[np.uint64]  # 32-bit words, each in 64 bits so that products don't overflow


def philox4x32(counter: tuple[Words, ...], key: tuple[Words, ...]) -> tuple[Words, ...]:
    """Four random words per lane from four counter words and two key words, arrays [n] each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> HIGH) ^ c1 ^ k0,
            product1 & LOW,
            (product0 >> HIGH) ^ c3 ^ k1,
            product0 & LOW,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: NDArray[np.int64], positions: NDArray[np.int32], choices: NDArray[np.int32]
) -> NDArray[np.float64]:
    """One number in [0, 1) per lane, of 53 bits: key = seed, counter = (position, choice)."""
    keys = seeds.view(np.uint64)
    zero = np.zeros(len(seeds), np.uint64)
    first, second, _, _ = philox4x32(
        (positions.astype(np.uint64), choices.astype(np.uint64), zero, zero),
        (keys & LOW, keys >> HIGH),
    )
    bits = (first >> np.uint64(5)) << np.uint64(26) | second >> np.uint64(6)
    return bits.astype(np.float64) * 2.0**-53
