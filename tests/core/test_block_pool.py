import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.core.block_pool import BlockPool
from streamkv.core.integrity import IntegrityError


def test_all_blocks_can_be_taken_once():
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert pool.num_free == 0
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
    with pytest.raises(IntegrityError, match="I1: a referenced block is in the free list"):
        pool.check_integrity()


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("tar"), st.integers(0, 5))))
def test_the_pool_behaves_like_a_list(num_blocks, commands):
    pool = BlockPool(num_blocks)
    free, counts = list(range(num_blocks)), [0] * num_blocks
    for command, number in commands:
        block_id = number % num_blocks
        if command == "t" and free:
            expected = free.pop(0)
            assert pool.take() == expected
            counts[expected] = 1
        elif command == "a":
            pool.acquire(block_id)
            counts[block_id] += 1
            if block_id in free:
                free.remove(block_id)
        elif command == "r" and counts[block_id]:
            reuse_first = number % 2 == 0
            pool.release(block_id, reuse_first=reuse_first)
            counts[block_id] -= 1
            if counts[block_id] == 0:
                free.insert(0 if reuse_first else len(free), block_id)
        assert pool.free_blocks() == free
        assert list(pool.ref_counts) == counts
        pool.check_integrity()
