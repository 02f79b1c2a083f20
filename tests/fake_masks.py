"""FakeMaskBoard: a board of masks in plain Python. FakeMatcher: a grammar of a few lines.

The grammar depends on the tokens it has seen, so a matcher that missed one, or saw one twice, goes
other ways than the oracle's. Now and then it leaves no choice for some tokens.
"""

from __future__ import annotations

import functools
import struct
import threading
import time
import zlib
from array import array

from streamkv.protocol import NO_MORE_MASKS

WORD_BITS = 32
UNPUBLISHED = -1


class _Slot:
    def __init__(self, num_words: int) -> None:
        self.words = array("i", bytes(4 * num_words))
        self.position = UNPUBLISHED
        self.published = b""  # what the words were then


class FakeMaskBoard:
    """Implements protocol.MaskBoard. `violations` lists what the protocol forbids."""

    def __init__(self, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // WORD_BITS)
        self.vocab_size = vocab_size
        self.violations: list[str] = []
        self._slots: dict[int, _Slot] = {}
        self._changed = threading.Condition()

    @property
    def num_slots(self) -> int:
        """That are taken."""
        return len(self._slots)

    # --- protocol.MaskBoard ------------------------------------------------------------------

    def add(self) -> int:
        with self._changed:
            slot = next(number for number in range(len(self._slots) + 1) if number not in self)
            self._slots[slot] = _Slot(self.num_words)
            return slot

    def remove(self, slot: int) -> None:
        with self._changed:
            if self._slots.pop(slot, None) is None:
                self.violations.append(f"slot {slot} is removed but not there")

    def words(self, slot: int) -> memoryview:
        return memoryview(self._slots[slot].words)

    def publish(self, slot: int, position: int) -> None:
        with self._changed:
            one = self._slots[slot]
            if one.position == NO_MORE_MASKS:
                return
            if position <= one.position:
                self.violations.append(
                    f"slot {slot} has a mask for {position} after that for {one.position}"
                )
            one.position, one.published = position, one.words.tobytes()
            self._changed.notify_all()

    # --- for the runner ----------------------------------------------------------------------

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def wait(self, slot: int, position: int, deadline_s: float) -> frozenset[int] | None:
        """The tokens allowed at that position, once they are known; None at the deadline, by
        time.monotonic(), or if the mask is another one already."""
        with self._changed:
            one = self._slots[slot]
            while one.position < position:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            if one.position > position:
                return None
            words = one.words.tobytes()
            if words != one.published:
                self.violations.append(f"slot {slot} was written while its mask was to be read")
            return tokens_of(words, self.vocab_size)


class FakeMatcher:
    """Follows one sequence. `allowed` is what may come next, all of `forced` is what must."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_consumed = 0
        self.forced: list[int] = []
        self.allowed: frozenset[int] = frozenset()
        self._crc = zlib.crc32(struct.pack("=q", seed))
        self._derive()

    def consume(self, token_id: int) -> None:
        assert token_id in self.allowed, f"{token_id} came, allowed were {sorted(self.allowed)}"
        self.num_consumed += 1
        self._crc = zlib.crc32(struct.pack("=i", token_id), self._crc)
        if self.forced:
            del self.forced[0]
        self._derive()

    def _derive(self) -> None:
        if not self.forced and self._crc % 4 == 0:
            num = 1 + (self._crc >> 8) % 6
            self.forced = [self._hash(number) % self.vocab_size for number in range(num)]
        if self.forced:
            self.allowed = frozenset(self.forced[:1])
        else:
            self.allowed = _pattern(self._crc % 8, self.vocab_size)

    def _hash(self, number: int) -> int:
        return zlib.crc32(struct.pack("=i", number), self._crc)

    def publish(self, board: FakeMaskBoard, slot: int, position: int) -> None:
        """Its mask, for the token at that position."""
        board.words(slot)[:] = mask_words(self.allowed, board.num_words)
        board.publish(slot, position)


@functools.cache
def _pattern(number: int, vocab_size: int) -> frozenset[int]:
    """About half of the tokens."""
    tokens = {
        token_id for token_id in range(vocab_size) if zlib.crc32(b"%d" % token_id, number) & 1
    }
    return frozenset({number % vocab_size, *tokens})


@functools.cache
def mask_words(token_ids: frozenset[int], num_words: int) -> array[int]:
    bits = 0
    for token_id in token_ids:
        bits |= 1 << token_id
    return array("i", bits.to_bytes(4 * num_words, "little"))


@functools.cache
def tokens_of(words: bytes, vocab_size: int) -> frozenset[int]:
    """The inverse."""
    bits = int.from_bytes(words, "little")
    return frozenset(token_id for token_id in range(vocab_size) if bits >> token_id & 1)
