import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.core.integrity import IntegrityError
from streamkv.core.kv.block_pool import BlockPool


def test_all_blocks_can_be_taken_once():
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert (pool.num_free, pool.num_held) == (0, 3)
    with pytest.raises(IntegrityError, match="I1.*empty pool"):
        pool.take()


def test_a_released_block_is_taken_last_unless_its_contents_are_worthless():
    pool = BlockPool(4)
    first, second = pool.take(), pool.take()
    pool.release(first, reuse_first=False)
    pool.release(second, reuse_first=True)
    assert pool.free_blocks() == [second, 2, 3, first]


def test_a_free_block_is_revived_from_the_middle_of_the_list():
    pool = BlockPool(4)
    pool.acquire(2)
    assert pool.free_blocks() == [0, 1, 3]
    assert pool.num_free == 3
    pool.acquire(2)
    pool.release(2, reuse_first=False)
    assert pool.free_blocks() == [0, 1, 3]
    pool.release(2, reuse_first=False)
    assert pool.free_blocks() == [0, 1, 3, 2]


def test_pinned_blocks_are_taken_when_nothing_else_is_left():
    pool = BlockPool(3)
    for block_id in range(3):
        pool.acquire(block_id)
    pool.release(2, pinned=True)
    pool.release(0, pinned=True)
    pool.release(1)
    assert (pool.num_free, pool.num_pinned) == (3, 2)
    assert [pool.take() for _ in range(3)] == [1, 2, 0]
    assert pool.num_pinned == 0


def test_a_free_block_is_touched_and_a_referenced_one_stays():
    pool = BlockPool(3)
    pool.touch(0)
    pool.touch(1, pinned=True)
    assert (pool.free_blocks(), pool.free_blocks(pinned=True)) == ([2, 0], [1])
    pool.touch(1)
    assert (pool.free_blocks(), pool.num_pinned) == ([2, 0, 1], 0)
    pool.acquire(0)
    pool.touch(0)
    assert pool.free_blocks() == [2, 1]


def test_blocks_that_are_gone_are_not_taken_and_referenced_ones_retire():
    pool = BlockPool(4)
    pool.acquire(3)
    assert pool.resize(2) == [2]
    assert (pool.num_free, pool.num_held) == (2, 1)
    pool.check_integrity()
    pool.release(3)
    assert (pool.free_blocks(), pool.num_held) == ([0, 1], 0)
    pool.check_integrity()


def test_a_pool_grows_and_gets_a_block_back_before_it_retired():
    pool = BlockPool(3)
    pool.acquire(2)
    pool.resize(1)
    pool.resize(5)
    assert pool.free_blocks() == [1, 3, 4, 0]
    pool.release(2)
    assert pool.free_blocks() == [1, 3, 4, 0, 2]
    pool.check_integrity()


def test_a_block_released_too_often_is_an_error():
    pool = BlockPool(2)
    block_id = pool.take()
    pool.release(block_id, reuse_first=False)
    with pytest.raises(IntegrityError, match=f"block {block_id} was released more often"):
        pool.release(block_id, reuse_first=False)


def test_check_integrity_sees_a_block_that_is_referenced_and_free_or_neither():
    pool = BlockPool(3)
    pool.check_integrity()
    pool.ref_counts[1] = 1
    with pytest.raises(IntegrityError, match="I1: 2 blocks are unreferenced, 3 are counted"):
        pool.check_integrity()
    pool.take()
    pool.ref_counts[0] = 0
    with pytest.raises(IntegrityError, match="I1: a referenced or retired block"):
        pool.check_integrity()


COMMANDS = st.lists(st.tuples(st.sampled_from("tarmg"), st.integers(0, 11)), max_size=40)


@given(st.integers(1, 6), COMMANDS)
def test_the_pool_behaves_like_two_lists(num_blocks, commands):
    pool = BlockPool(num_blocks)
    free, pinned, counts = list(range(num_blocks)), [], [0] * num_blocks
    for command, number in commands:
        block_id = number % num_blocks
        reuse_first, is_pinned = number % 2 == 0, number % 3 == 0
        target = pinned if is_pinned else free
        if command == "t" and free + pinned:
            expected = (free or pinned).pop(0)
            assert pool.take() == expected
            counts[expected] = 1
        elif command == "a" and (counts[block_id] or block_id in free + pinned):
            pool.acquire(block_id)
            counts[block_id] += 1
            for blocks in (free, pinned):
                if block_id in blocks:
                    blocks.remove(block_id)
        elif command == "r" and counts[block_id]:
            pool.release(block_id, reuse_first, is_pinned)
            counts[block_id] -= 1
            if counts[block_id] == 0 and block_id < pool.num_blocks:
                target.insert(0 if reuse_first else len(target), block_id)
        elif command == "m" and block_id in free + pinned:
            pool.touch(block_id, reuse_first, is_pinned)
            (free if block_id in free else pinned).remove(block_id)
            target.insert(0 if reuse_first else len(target), block_id)
        elif command == "g":
            size, old = number + 1, pool.num_blocks
            gone = [b for b in range(size, old) if counts[b] == 0]
            assert pool.resize(size) == gone
            counts += [0] * (size - len(counts))
            free[:] = [b for b in range(old, size) if counts[b] == 0] + [
                b for b in free if b < size
            ]
            pinned[:] = [b for b in pinned if b < size]
            num_blocks = min(num_blocks, size)
        assert (pool.free_blocks(), pool.free_blocks(pinned=True)) == (free, pinned)
        assert list(pool.ref_counts) == counts
        pool.check_integrity()
