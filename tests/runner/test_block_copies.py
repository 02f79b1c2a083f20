"""Copies of blocks in native code, between blocks and slots of host memory, against plain lists."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from runner.native_steps import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_SLOTS,
    make_step,
    native_runner,
    small_cache,
)
from runner.support import resident_bytes

from streamkv._cpu import KvCache, Team, ops
from streamkv.protocol import CopyKind, StepOutput, unpack_ints
from streamkv.step_bytes import decode_output, encode_step

BLOCK, OUT, IN = CopyKind.BLOCK, CopyKind.OUT, CopyKind.IN


class Copied:
    """A runner, and what its blocks and slots should hold: a number for each, 0 at first."""

    def __init__(self, cache: KvCache, num_threads: int) -> None:
        self.cache = cache
        self.runner = native_runner(cache, num_threads)
        self.blocks = [0] * cache.num_blocks
        self.slots = [0] * cache.num_host_slots
        self._num_values = 0

    def fill(self, slot: int) -> None:
        """Something new, as a store does."""
        self._num_values += 1
        self.slots[slot] = self._num_values
        self.cache.host_slots()[slot] = self.bytes_of(self._num_values)

    def bytes_of(self, value: int) -> np.ndarray:
        size = self.cache.block_bytes
        if value == 0:
            return np.zeros(size, np.uint8)
        return np.random.default_rng(value).integers(0, 256, size, dtype=np.uint8)

    def run(self, copies: list[tuple[int, int, int, int]]) -> StepOutput:
        output = decode_output(self.runner.step(encode_step(make_step(0, copies=copies))))
        assert (output.error, output.copies_failed) == ("", b"")
        assert [*unpack_ints(output.copies_done)] == [number for number, *_ in copies]
        assert 0 < output.copies_s < output.duration_s
        for _, kind, source, target in copies:
            value = self.slots[source] if kind == IN else self.blocks[source]
            (self.slots if kind == OUT else self.blocks)[target] = value
        return output

    def check(self) -> None:
        """Slot 0 is used to look into blocks."""
        slots = self.cache.host_slots()
        for slot, value in enumerate(self.slots):
            assert np.array_equal(slots[slot], self.bytes_of(value)), f"slot {slot}"
        for block, value in enumerate(self.blocks):
            if value:
                self.run([(0, OUT, block, 0)])
                assert np.array_equal(slots[0], self.bytes_of(value)), f"block {block}"


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_places", [3, 12])
def test_copies_are_as_if_made_one_after_the_other(num_threads, num_places):
    """Few places make chains, overwritten sources and swaps; a block is several pieces long."""
    rng = random.Random(num_places)
    cache = KvCache("float32", num_places, 3, 2, 33, 128, num_places)
    assert cache.block_bytes > 3 * (1 << 16)
    copied = Copied(cache, num_threads)
    for _ in range(12):
        for slot in rng.sample(range(num_places), 2):
            copied.fill(slot)
        copied.run(
            [
                (
                    rng.randrange(2**31),
                    rng.choice([BLOCK, OUT, IN]),
                    rng.randrange(num_places),
                    rng.randrange(num_places),
                )
                for _ in range(rng.randrange(1, 30))
            ]
        )
    copied.check()


def test_the_copies_of_an_eviction_and_of_the_new_owner_are_told_apart():
    """Out of a block, into it, and again: through one slot and one block."""
    copied = Copied(small_cache(), 2)
    for slot in range(3):
        copied.fill(slot)
    copied.run([(0, IN, 0, 7)])
    copied.run(
        [
            (1, OUT, 7, 5),  # evicted: 7 holds what was in slot 0
            (2, IN, 1, 7),
            (3, OUT, 7, 6),
            (4, IN, 2, 7),
            (5, BLOCK, 7, 8),
            (6, IN, 5, 7),
            (7, BLOCK, 8, 8),
        ]
    )
    assert copied.blocks[7:9] == [1, 3] and copied.slots[5:7] == [1, 2]
    copied.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_block_comes_back_as_it_was(dtype):
    team, cache = Team(2), KvCache(dtype, 20, 2, 1, BLOCK_SIZE, 16, 3)
    runner = native_runner(cache)
    qkv = np.random.default_rng(0).normal(size=(8, 3 * 16)).astype(np.float32)
    slots = np.arange(8, dtype=np.int32) + 5 * BLOCK_SIZE  # blocks 5 and 6
    for layer in range(2):
        ops.store_kv(team, qkv + layer, cache, slots, layer, 1)
    before = {block: [cache.read(block, layer) for layer in range(2)] for block in (5, 6)}
    assert not np.array_equal(before[5][0][0], before[6][0][0])
    # 6 becomes 5, and what 9 then gets of 6 is 5's; 6 as it was is kept in 8, by way of a slot.
    copies = [(0, OUT, 6, 2), (1, IN, 2, 8), (2, BLOCK, 5, 6), (3, BLOCK, 6, 9)]
    assert decode_output(runner.step(encode_step(make_step(0, copies=copies)))).error == ""
    for block, was in [(5, 5), (6, 5), (8, 6), (9, 5)]:
        for layer in range(2):
            for got, expected in zip(cache.read(block, layer), before[was][layer], strict=True):
                np.testing.assert_array_equal(got, expected)


def test_a_step_with_an_error_before_its_copies_makes_none():
    copied = Copied(small_cache(), 2)
    copied.fill(1)
    step = make_step(1, removed=[99], copies=[(4, IN, 1, 0)])
    output = decode_output(copied.runner.step(encode_step(step)))
    assert "removed rows" in output.error
    step = make_step(2, copies=[(4, IN, 1, 0), (5, IN, 1, NUM_BLOCKS)])
    output = decode_output(copied.runner.step(encode_step(step)))
    assert "copy 5" in output.error
    assert (output.copies_done, output.copies_failed, output.copies_s) == (b"", b"", 0.0)
    copied.run([(6, OUT, 0, 2)])
    copied.check()


def test_a_step_with_an_error_after_its_copies_has_made_them():
    copied = Copied(small_cache(), 2)
    copied.fill(1)
    step = make_step(1, [(0, 0, 9, 1)], copies=[(4, IN, 1, 0), (9, OUT, 0, 3)])
    output = decode_output(copied.runner.step(encode_step(step)))
    assert "positions 0 to 9" in output.error
    assert [*unpack_ints(output.copies_done)] == [4, 9] and output.copies_s > 0
    copied.blocks[0] = copied.slots[3] = copied.slots[1]
    copied.check()
    output = decode_output(copied.runner.step(encode_step(make_step(2))))
    assert (output.copies_done, output.copies_s) == (b"", 0.0)


def test_slots_are_one_memory_that_outlives_the_cache():
    cache = small_cache()
    slots = cache.host_slots()
    assert slots.shape == (NUM_SLOTS, cache.block_bytes) and slots.dtype == np.uint8
    slots[3] = 7
    flat = memoryview(cache.host_slots()).cast("B")
    assert flat.nbytes == NUM_SLOTS * cache.block_bytes and not flat.readonly
    assert flat[3 * cache.block_bytes] == 7 and flat[3 * cache.block_bytes - 1] == 0
    del cache, slots
    assert flat[4 * (len(flat) // NUM_SLOTS) - 1] == 7
    assert KvCache("float32", 2, 1, 1, 4, 16).host_slots().shape == (0, 512)


@pytest.mark.parametrize("num_host_slots", [-1, 2**31])
def test_a_number_of_slots_that_cannot_be_is_refused(num_host_slots):
    with pytest.raises(ValueError, match="num_host_slots must be 0 to 2"):
        KvCache("float32", 1, 1, 1, 4, 16, num_host_slots)


def test_slots_take_no_memory_before_they_are_written():
    before = resident_bytes()
    cache = KvCache("float32", 4, 4, 4, 64, 64, 10_000)
    copied = Copied(cache, 1)
    assert cache.block_bytes * cache.num_host_slots > 4 << 30
    copied.run([(0, OUT, 3, 9_999)])
    assert resident_bytes() - before < 64 << 20


def test_a_store_may_use_slots_while_steps_copy_others():
    """Its own thread writes slots 6 .. 11; steps move 0 .. 5. Neither sees the other."""
    cache = small_cache()
    copied = Copied(cache, 2)
    for slot in range(6):
        copied.fill(slot)
    slots, wrong = cache.host_slots(), []
    is_over = threading.Event()

    def use_slots() -> None:
        value = 0
        while not is_over.is_set():
            value = (value + 1) % 251
            slots[6:] = value
            if not (slots[6:] == value).all():
                wrong.append(value)

    thread = threading.Thread(target=use_slots)
    thread.start()
    rng = random.Random(4)
    for _ in range(300):
        kinds = rng.choices([BLOCK, OUT, IN], k=8)
        copied.run([(i, kind, rng.randrange(6), rng.randrange(6)) for i, kind in enumerate(kinds)])
    is_over.set()
    thread.join(20)
    assert not wrong
    copied.slots[6:] = [0] * 6
    slots[6:] = 0
    copied.check()
