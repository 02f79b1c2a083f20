"""What the keys and values of a prefix depend on besides its tokens, as one digest.

Owns how it is made: of facts, and of all bytes of all weights as the kernels read them. Knows
neither kernels nor files. Invariant: two runners with the same fingerprint compute the same bits
for the same tokens and lay them out alike, as far as those who name the facts know; whoever changes
what a kernel computes raises KERNEL_REVISION (cuda_ext/include/streamkv/kernels.h).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

PIECE_BYTES = 4 << 20  # hashed by one thread
DIGEST_BYTES = 32


def kv_fingerprint(
    facts: Mapping[str, Any], weights: Mapping[str, Sequence[memoryview]], num_threads: int
) -> str:
    """Hexadecimal. `facts` are anything that JSON can say; weights are bytes, by name.

    The threads leave the interpreter free. RuntimeError if they can't be started.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(msgspec.json.encode(facts, order="deterministic"))
    names = sorted(weights)
    sizes = [[buffer.nbytes for buffer in weights[name]] for name in names]
    digest.update(msgspec.json.encode([names, sizes]))
    pieces = (
        buffer[start : start + PIECE_BYTES]
        for name in names
        for buffer in weights[name]
        for start in range(0, buffer.nbytes, PIECE_BYTES)
    )
    with ThreadPoolExecutor(num_threads) as threads:
        for piece_digest in threads.map(_digest, pieces):
            digest.update(piece_digest)
    return digest.hexdigest()


def _digest(piece: memoryview) -> bytes:
    return hashlib.blake2b(piece, digest_size=DIGEST_BYTES).digest()
