"""GGUF's tensor types: how a block of values is stored, and what the values are.

Owns the layout of each type in `BLOCKS` and its dequantization; knows no file. Invariant: a value
is bit for bit what the `gguf` package makes of it.

Dequantization is bound by numpy's loops, so they run over whole arrays: eight bytes as one 64-bit
word, scales repeated rather than broadcast (an inner loop of 32 costs more than it does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Blocks = NDArray[Any]
Words = NDArray[np.uint64]

LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
LOW_BITS = np.uint64(0x0101010101010101)
LOW_PAIRS = np.uint64(0x0303030303030303)
NIBBLE = np.uint64(4)


class BlockType(NamedTuple):
    """How a tensor type is stored: `size` values in one item of `dtype`."""

    dtype: np.dtype[Any]
    size: int
    dequantize: Callable[[Blocks, Floats], None]  # [n] blocks -> float32 [n, size]


def _dequantize_plain(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks


def _dequantize_bf16(blocks: Blocks, out: Floats) -> None:
    out.view(np.uint32)[:, 0] = blocks.astype(np.uint32) << 16


def _dequantize_q8_0(blocks: Blocks, out: Floats) -> None:
    """32 int8 times one float16 scale."""
    out[:] = blocks["q"]
    _flat(out)[:] *= _each(blocks["d"], 32)


def _dequantize_q4_0(blocks: Blocks, out: Floats) -> None:
    """32 values (0 .. 15) - 8, low nibbles first, times one float16 scale."""
    _scale(_nibbles(blocks["q"]), out, offset=8, scales=_each(blocks["d"], 32))


def _dequantize_q4_1(blocks: Blocks, out: Floats) -> None:
    """32 values 0 .. 15, low nibbles first, times a float16 scale, plus a float16 minimum."""
    _scale(_nibbles(blocks["q"]), out, offset=0, scales=_each(blocks["d"], 32))
    _flat(out)[:] += _each(blocks["m"], 32)


def _dequantize_q5_0(blocks: Blocks, out: Floats) -> None:
    """As Q4_0 with a fifth bit, (0 .. 31) - 16: bit i of a word is value i's."""
    _scale(_five_bits(blocks), out, offset=16, scales=_each(blocks["d"], 32))


def _dequantize_q5_1(blocks: Blocks, out: Floats) -> None:
    """As Q4_1 with the fifth bits of Q5_0."""
    _scale(_five_bits(blocks), out, offset=0, scales=_each(blocks["d"], 32))
    _flat(out)[:] += _each(blocks["m"], 32)


def _dequantize_q4_k(blocks: Blocks, out: Floats) -> None:
    """Eight groups of 32 values 0 .. 15, a scale and a minimum to subtract for each; of every two
    groups the first has the low nibbles."""
    _scale_groups(blocks, _nibbles(blocks["q"]), out)


def _dequantize_q5_k(blocks: Blocks, out: Floats) -> None:
    """As Q4_K with a fifth bit: bit g of byte i belongs to value i of group g."""
    words = _nibbles(blocks["q"]).reshape(-1, 8, 4)
    for group in range(8):
        words[:, group] |= (blocks["h"] >> np.uint64(group) & LOW_BITS) << NIBBLE
    _scale_groups(blocks, words, out)


def _dequantize_q6_k(blocks: Blocks, out: Floats) -> None:
    """Sixteen groups of 16 values (0 .. 63) - 32, an int8 times one float16 for each. In both
    halves of a block the four lower bits are 64 low nibbles, then 64 high ones, and the upper two
    of value i are in byte i % 32, at bit i // 32 * 2."""
    words = _nibbles(blocks["q"]).reshape(-1, 2, 4, 4)
    for part in range(4):
        words[:, :, part] |= (blocks["h"] >> np.uint64(2 * part) & LOW_PAIRS) << NIBBLE
    scales = blocks["d"].astype(np.float32)[:, None] * blocks["s"]
    _scale(words, out, offset=32, scales=np.repeat(scales, 16))


def _nibbles(words: Words) -> Words:
    """[n, 2] or [n, runs, words] of packed bytes -> twice the words: low nibbles of a run, then
    its high ones."""
    nibbles = np.empty((*words.shape[:-1], 2, words.shape[-1]), np.uint64)
    np.bitwise_and(words, LOW_NIBBLES, out=nibbles[..., 0, :])
    np.bitwise_and(words >> NIBBLE, LOW_NIBBLES, out=nibbles[..., 1, :])
    return nibbles


def _five_bits(blocks: Blocks) -> Words:
    """[n, 32] values of a byte."""
    values = _nibbles(blocks["q"]).view(np.uint8).reshape(-1)
    high = np.ascontiguousarray(blocks["h"]).view(np.uint8)
    values |= np.unpackbits(high, bitorder="little") << np.uint8(4)
    return values.view(np.uint64)


def _scale(words: Words, out: Floats, *, offset: int, scales: Floats) -> None:
    """Bytes in words -> `out`, (byte - offset) * its scale."""
    flat = _flat(out)
    np.copyto(flat, words.view(np.uint8).reshape(-1))
    if offset:
        flat -= np.float32(offset)
    flat *= scales


def _scale_groups(blocks: Blocks, words: Words, out: Floats) -> None:
    """By the scales and minima of Q4_K and Q5_K: six bits each, of eight groups, in twelve bytes.
    The first four groups' are in the first eight bytes, whose upper two bits belong to the last
    four's, and so do the nibbles of the last four bytes."""
    packed = blocks["s"]
    first, last = packed[:, :8] & 0x3F, packed[:, :8] >> 2 & 0x30
    last[:, :4] |= packed[:, 8:] & 0x0F
    last[:, 4:] |= packed[:, 8:] >> 4
    # [n, 8]: four scales and four minima in each
    scales = np.concatenate((first[:, :4], last[:, :4]), axis=1)
    minima = np.concatenate((first[:, 4:], last[:, 4:]), axis=1)
    scale = blocks["d"].astype(np.float32)[:, None] * scales
    minimum = blocks["m"].astype(np.float32)[:, None] * minima
    _scale(words, out, offset=0, scales=np.repeat(scale, 32))
    _flat(out)[:] -= np.repeat(minimum, 32)


def _flat(out: Floats) -> Floats:
    return out.reshape(-1)


def _each(scales: NDArray[np.float16], num_values: int) -> Floats:
    """A block's scale for each of its values."""
    return np.repeat(scales.astype(np.float32), num_values)


def _block(size: int, dequantize: Callable[[Blocks, Floats], None], **fields: str) -> BlockType:
    """Fields by name, one after the other."""
    return BlockType(np.dtype([*fields.items()]), size, dequantize)


BLOCKS = {
    "F32": BlockType(np.dtype("<f4"), 1, _dequantize_plain),
    "F16": BlockType(np.dtype("<f2"), 1, _dequantize_plain),
    "BF16": BlockType(np.dtype("<u2"), 1, _dequantize_bf16),
    "Q4_0": _block(32, _dequantize_q4_0, d="<f2", q="(2,)<u8"),
    "Q4_1": _block(32, _dequantize_q4_1, d="<f2", m="<f2", q="(2,)<u8"),
    "Q5_0": _block(32, _dequantize_q5_0, d="<f2", h="<u4", q="(2,)<u8"),
    "Q5_1": _block(32, _dequantize_q5_1, d="<f2", m="<f2", h="<u4", q="(2,)<u8"),
    "Q8_0": _block(32, _dequantize_q8_0, d="<f2", q="(32,)i1"),
    "Q4_K": _block(256, _dequantize_q4_k, d="<f2", m="<f2", s="(12,)u1", q="(4,4)<u8"),
    "Q5_K": _block(256, _dequantize_q5_k, d="<f2", m="<f2", s="(12,)u1", h="(4,)<u8", q="(4,4)<u8"),
    "Q6_K": _block(256, _dequantize_q6_k, q="(2,8)<u8", h="(2,4)<u8", s="(16,)i1", d="<f2"),
}
