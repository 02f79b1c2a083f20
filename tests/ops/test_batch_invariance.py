"""A row's attention doesn't depend on its neighbours, its chunks, its blocks or the threads: not a
bit of it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from isas import distinct_isas
from ops.paged import Array, PagedContext, Shape, random_context

from streamkv import _cpu

SHAPE = Shape(num_heads=9, num_kv_heads=3, head_dim=64)
SHAPES = [
    SHAPE,
    Shape(num_heads=4, num_kv_heads=4, head_dim=80),
    Shape(num_heads=10, num_kv_heads=2, head_dim=128),
    Shape(num_heads=32, num_kv_heads=4, head_dim=64),
]
NUM_THREADS = [1, 2, 3, 16]


@pytest.fixture(params=distinct_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use. Schedules of whole models are compared on the others, too."""
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(_cpu.available_isas()[0])


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Of caches."""
    return str(request.param)


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_alone_equals_the_row_in_a_batch(
    isa: str, team: _cpu.Team, dtype: str, shape: Shape
) -> None:
    lengths = [1, 40, 64, 65, 150, 300]
    context = random_context(team, lengths, shape, dtype)
    queries = [(row, max(0, length - 23), length) for row, length in enumerate(lengths)]
    together = context.attend(team, queries)
    alone = [context.attend(team, [query]) for query in queries]
    assert same(np.concatenate(alone), together)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_or_token_by_token_equal_the_whole_prompt(
    isa: str, team: _cpu.Team, dtype: str, shape: Shape
) -> None:
    context = random_context(team, [200], shape, dtype)
    whole = context.attend(team, [(0, 0, 200)])
    for bounds in ([0, 1, 64, 128, 200], [0, 63, 130, 147, 199, 200], list(range(201))):
        chunks = [
            context.attend(team, [(0, start, end)])
            for start, end in zip(bounds, bounds[1:], strict=False)
        ]
        assert same(np.concatenate(chunks), whole), bounds[:4]


def test_a_prompt_depends_on_no_later_token(isa: str, team: _cpu.Team, dtype: str) -> None:
    context = random_context(team, [150], SHAPE, dtype)
    longer = context.attend(team, [(0, 0, 150)])
    assert same(context.attend(team, [(0, 0, 101)]), longer[:101])


def test_block_size_and_placement_do_not_matter(isa: str, team: _cpu.Team, dtype: str) -> None:
    lengths = [70, 129, 200]
    queries = [(0, 69, 70), (1, 100, 129), (2, 0, 200)]
    expected = random_context(team, lengths, SHAPE, dtype).attend(team, queries)
    for block_size in (1, 7, 64, 80, 256):
        context = random_context(team, lengths, SHAPE, dtype, block_size=block_size)
        assert same(context.attend(team, queries), expected), block_size


@pytest.mark.parametrize("block_size", [16, 24])
def test_shared_blocks_give_the_same_as_copies_of_them(
    isa: str, dtype: str, block_size: int
) -> None:
    prefixes = {1: (0, 320), 2: (0, 320), 3: (2, 480), 4: (2, 480), 5: (0, 48), 6: (0, 64)}
    lengths = [700, 400, 600, 510, 520, 90, 65, 70]
    decodes = [(row, length - 1, length) for row, length in enumerate(lengths)]
    queries = decodes + [(3, 500, 510), (0, 600, 700)] + decodes[:3]
    alone = _cpu.Team(1)
    context = random_context(
        alone, lengths, SHAPE, dtype, prefixes=prefixes, copies=True, block_size=block_size
    )
    expected = np.concatenate([context.attend(alone, [query]) for query in queries])
    for num_threads in NUM_THREADS:
        team = _cpu.Team(num_threads)
        shared = random_context(
            team, lengths, SHAPE, dtype, prefixes=prefixes, block_size=block_size
        )
        assert same(shared.attend(team, queries), expected), num_threads


@pytest.mark.parametrize("shape", [SHAPE, SHAPES[2]], ids=str)
def test_more_threads_change_no_bit(isa: str, dtype: str, shape: Shape) -> None:
    """With many threads few long contexts are split among them."""
    lengths = [300, 17, 450, 1100]
    alone = _cpu.Team(1)
    context = random_context(alone, lengths, shape, dtype)
    steps = [
        [(0, 0, 300), (1, 16, 17), (2, 430, 450)],
        [(3, 1099, 1100)],
        [(3, 1080, 1100), (0, 299, 300)],
        [(3, 650, 1100)],
    ]
    for queries in steps:
        expected = context.attend(alone, queries)
        for num_threads in NUM_THREADS:
            team = _cpu.Team(num_threads)
            for _ in range(2):
                assert same(context.attend(team, queries), expected), (queries, num_threads)


def random_step(random_: random.Random, context: PagedContext) -> list[tuple[int, int, int]]:
    step = []
    for row in random_.choices(range(len(context.rows)), k=random_.randint(1, 12)):
        end = random_.randint(1, len(context.rows[row]))
        step.append((row, max(0, end - random_.choice([1, 1, 1, 2, 5, 17, 40, 200])), end))
    return step


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_give_each_query_its_bits(isa: str, dtype: str, seed: int) -> None:
    random_ = random.Random(seed)
    shape = random_.choice(SHAPES)
    block_size = random_.choice([8, 16, 16, 32, 64, 128])
    lengths = [random_.randint(200, 900) for _ in range(8)]
    prefixes = {}
    for row in range(1, 8):
        source = random_.randrange(row)
        most = min(lengths[source], lengths[row])
        prefixes[row] = (source, random_.randrange(most) // block_size * block_size)
    alone = _cpu.Team(1)
    context = random_context(
        alone, lengths, shape, dtype, block_size=block_size, prefixes=prefixes, seed=seed
    )
    whole = [context.attend(alone, [(row, 0, len(qkv))]) for row, qkv in enumerate(context.rows)]
    for _ in range(6):
        step = random_step(random_, context)
        expected = np.concatenate([whole[row][start:end] for row, start, end in step])
        team = _cpu.Team(random_.choice(NUM_THREADS))
        assert same(context.attend(team, step), expected), step


def test_what_an_earlier_call_left_in_scratch_does_not_matter(isa: str, team: _cpu.Team) -> None:
    """Scratch is reused between calls: what a bigger tile left behind must not matter."""
    small = random_context(team, [70], Shape(2, 1, 32), "float32")
    before = small.attend(team, [(0, 60, 70)])
    big = random_context(team, [190], Shape(4, 1, 256), "float32", seed=1)
    big.rows[0][:] *= np.float32(1e30)
    assert len(big.attend(team, [(0, 0, 190)])) == 190
    assert same(small.attend(team, [(0, 60, 70)]), before)
