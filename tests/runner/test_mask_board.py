"""The mask board in the extension: slots, positions, and two threads that meet there."""

from __future__ import annotations

import ctypes
import gc
import queue
import threading
import time

import numpy as np
import pytest

from streamkv._cpu import MaskBoard

LONG = 60.0  # nothing here waits so long, unless it fails


def address(board: MaskBoard, slot: int) -> int:
    return ctypes.addressof(ctypes.c_int32.from_buffer(board.words(slot)))


def test_a_slot_has_words_that_stay_where_they_are_whatever_else_is_added():
    board = MaskBoard(70)
    assert board.num_words == 3
    slots = [board.add()]
    first = address(board, slots[0])
    words = board.words(slots[0])
    words[:] = memoryview(np.array([1, -2, 3], np.int32))
    slots += [board.add() for _ in range(1000)]
    assert slots == [*range(1001)]
    assert address(board, 0) == first
    assert board.words(0).tolist() == [1, -2, 3]
    assert len({address(board, slot) for slot in slots}) == 1001


def test_what_was_removed_is_given_out_again_with_nothing_published():
    board = MaskBoard(32)
    for _ in range(4):
        board.add()
    board.publish(2, 9)
    assert board.find([2, 2, 1], [9, 8, 9], 0.0) == [True, False, False]
    board.remove(2)
    board.remove(1)
    assert not board.has(2) and board.has(3) and not board.has(-1) and not board.has(4)
    assert board.find([2], [9], 0.0) == [False]
    assert sorted((board.add(), board.add(), board.add())) == [1, 2, 4]
    assert board.find([2], [9], 0.0) == [False]


def test_words_outlive_the_board_that_they_are_of():
    board = MaskBoard(4096)
    words = board.words(board.add())
    del board
    gc.collect()
    words[:] = memoryview(np.arange(128, dtype=np.int32))
    assert words.tolist() == [*range(128)]


@pytest.mark.parametrize("slot", [-1, 1, 2, 3, 2**40])
def test_a_slot_that_nobody_has_is_an_error(slot):
    board = MaskBoard(32)
    for _ in range(2):
        board.add()
    board.remove(1)
    for wrong in (board.words, board.remove, lambda slot: board.publish(slot, 0)):
        with pytest.raises(ValueError, match=f"slot: expected one that was added, got {slot}"):
            wrong(slot)


def test_other_wrong_numbers_are_errors():
    board = MaskBoard(32)
    board.add()
    for position in (-1, 2**31):
        with pytest.raises(ValueError, match=f"position: expected 0 to .*, got {position}"):
            board.publish(0, position)
    for vocab_size in (0, -5, 2**31):
        with pytest.raises(ValueError, match=f"vocab_size: expected 1 to .*, got {vocab_size}"):
            MaskBoard(vocab_size)
    with pytest.raises(ValueError, match="positions: expected 2, one for each slot, got 1"):
        board.find([0, 0], [1], 0.0)


def test_the_last_mask_that_is_missing_ends_the_wait():
    board = MaskBoard(32)
    slots = [board.add() for _ in range(5)]
    board.publish(1, 7)

    def publish() -> None:
        for slot, position in ((0, 6), (0, 7), (3, 7), (4, 7), (2, 1), (2, 7)):
            board.publish(slot, position)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    assert board.find(slots, [7] * 5, LONG) == [True] * 5
    thread.join()


def test_nobody_waits_for_a_slot_that_is_gone_nor_longer_than_was_said():
    board = MaskBoard(32)
    slots = [board.add() for _ in range(3)]
    board.publish(0, 1)
    started = time.monotonic()
    assert board.find(slots, [1, 1, 1], 0.02) == [True, False, False]
    assert time.monotonic() - started >= 0.02
    board.remove(2)
    assert board.find([0, 2], [1, 1], LONG) == [True, False]
    assert board.find([0], [1], LONG) == [True], "the next wait has nothing to wait for"


def test_nobody_waits_for_a_mask_that_has_been_passed():
    board, both = MaskBoard(32), threading.Barrier(2)
    slots = [board.add() for _ in range(50)]

    def pass_by() -> None:
        for slot in slots:
            both.wait()
            board.publish(slot, 8)

    thread = threading.Thread(target=pass_by, daemon=True)
    thread.start()
    started = time.monotonic()
    for slot in slots:
        both.wait()
        assert board.find([slot], [7], LONG) == [False]  # before or after it was passed
        board.publish(slot, 7)
        assert board.find([slot], [7], LONG) == [False], "positions only grow"
        assert board.find([slot], [8], LONG) == [True]
    assert time.monotonic() - started < LONG
    thread.join()


def test_a_slot_that_is_removed_while_it_is_waited_for_ends_the_wait():
    board, both = MaskBoard(32), threading.Barrier(2)
    kept, slots = board.add(), [board.add() for _ in range(50)]
    board.publish(kept, 1)

    def remove() -> None:
        for slot in slots:
            both.wait()
            board.remove(slot)

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    for slot in slots:
        both.wait()
        started = time.monotonic()
        assert board.find([kept, slot], [1, 1], LONG) == [True, False]
        assert time.monotonic() - started < LONG
    thread.join()


def test_what_was_written_before_it_was_published_is_what_the_other_thread_reads():
    """As an engine does it: a mask is written when the token before it has been chosen."""
    board, num_slots, num_tokens = MaskBoard(49152), 4, 400
    slots = [board.add() for _ in range(num_slots)]
    words = [np.frombuffer(board.words(slot), np.int32) for slot in slots]
    chosen: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def match() -> None:
        for _ in range(num_slots * num_tokens):
            slot, position = chosen.get()
            words[slot][:] = position * num_slots + slot
            board.publish(slot, position)

    matcher = threading.Thread(target=match, daemon=True)
    matcher.start()
    for position in range(num_tokens):
        for slot in slots:
            chosen.put((slot, position))
        assert board.find(slots, [position] * num_slots, LONG) == [True] * num_slots
        for slot in slots:
            assert (words[slot] == position * num_slots + slot).all()
    matcher.join()
