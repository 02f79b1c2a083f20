"""Attention over a scattered cache, under each instruction set, against torch's dense attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.paged import (
    LAYER,
    NUM_LAYERS,
    Array,
    PagedContext,
    Shape,
    int32,
    random_context,
    rounded,
)

from streamkv import _cpu

SHAPES = [
    Shape(num_heads=9, num_kv_heads=3, head_dim=64),
    Shape(num_heads=4, num_kv_heads=4, head_dim=16),
    Shape(num_heads=7, num_kv_heads=1, head_dim=80),
    Shape(num_heads=32, num_kv_heads=4, head_dim=64),
    Shape(num_heads=8, num_kv_heads=2, head_dim=128),
    Shape(num_heads=2, num_kv_heads=1, head_dim=256),
]
MANY_HEADS = Shape(num_heads=200, num_kv_heads=2, head_dim=16)  # more than a tile has rows
Queries = list[tuple[int, int, int]]


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Of caches."""
    return str(request.param)


def attend_densely(row: Array, shape: Shape, dtype: str) -> Array:
    """All queries of one row, in float64, without pages: [context_len, num_heads * head_dim].
    Queries are rounded too where keys are whole numbers."""
    heads = row.reshape(len(row), -1, shape.head_dim).transpose(1, 0, 2)
    queries, keys, values = np.split(heads, np.cumsum([shape.num_heads, shape.num_kv_heads]))
    if dtype == "int8":
        queries = rounded(queries, dtype)
    attended = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(queries.astype(np.float64))[None],
        torch.from_numpy(rounded(keys, dtype).astype(np.float64))[None],
        torch.from_numpy(rounded(values, dtype).astype(np.float64))[None],
        is_causal=True,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1).flatten(1).numpy()


def assert_attends(team: _cpu.Team, context: PagedContext, *batches: Queries) -> None:
    exact = [attend_densely(row, context.shape, context.cache.dtype) for row in context.rows]
    for queries in batches:
        expected = np.concatenate([exact[row][start:end] for row, start, end in queries])
        actual = context.attend(team, queries)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("block_size", [1, 5, 16, 80])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_prompts_and_chunks_of_every_boundary_length_in_one_batch(
    isa: str, team: _cpu.Team, dtype: str, shape: Shape, block_size: int
) -> None:
    """What was never stored is NaN, so a finite answer also says that nothing else was read."""
    lengths = [1, 2, block_size, block_size + 1, 31, 63, 64, 65, 128, 129, 200]
    context = random_context(team, lengths, shape, dtype, block_size=block_size)
    decodes = [(row, length - 1, length) for row, length in enumerate(lengths)]
    prompts = [(row, 0, length) for row, length in enumerate(lengths)]
    chunks = [(row, length // 2, length) for row, length in enumerate(lengths)]
    assert_attends(team, context, decodes, prompts + decodes + chunks)


def test_more_heads_of_a_kv_head_than_a_tile_has_rows(
    isa: str, team: _cpu.Team, dtype: str
) -> None:
    context = random_context(team, [5, 130], MANY_HEADS, dtype)
    assert_attends(team, context, [(0, 0, 5), (1, 100, 130), (1, 129, 130)])


@pytest.mark.parametrize("num_threads", [1, 4, 16])
def test_one_long_context_is_split_among_threads(isa: str, dtype: str, num_threads: int) -> None:
    team = _cpu.Team(num_threads)
    context = random_context(team, [1500], SHAPES[0], dtype)
    assert_attends(team, context, [(0, 1499, 1500)], [(0, 1490, 1500)], [(0, 700, 701)])


@pytest.mark.parametrize("num_threads", [1, 8])
def test_rows_that_share_blocks_read_them_together(isa: str, dtype: str, num_threads: int) -> None:
    """A tree of prefixes, cut by partitions of 64 in all ways."""
    team = _cpu.Team(num_threads)
    prefixes = {1: (0, 320), 2: (0, 320), 3: (2, 500), 4: (2, 500), 5: (0, 48), 6: (0, 64)}
    lengths = [700, 400, 600, 510, 520, 90, 65, 70]
    context = random_context(team, lengths, SHAPES[0], dtype, prefixes=prefixes)
    decodes = [(row, length - 1, length) for row, length in enumerate(lengths)]
    verifying = [(row, length - 3, length) for row, length in enumerate(lengths)]
    assert_attends(team, context, decodes, verifying + decodes, decodes * 5)


def test_no_rows_and_rows_without_queries_give_no_tokens(
    isa: str, team: _cpu.Team, dtype: str
) -> None:
    context = random_context(team, [20, 30], SHAPES[0], dtype)
    assert context.attend(team, []).shape == (0, 9 * 64)
    assert context.attend(team, [(0, 20, 20), (1, 0, 0)]).shape == (0, 9 * 64)
    assert_attends(team, context, [(0, 19, 20), (1, 30, 30), (1, 29, 30)])


def test_one_dominant_key_far_back_is_found(isa: str, team: _cpu.Team, dtype: str) -> None:
    """Partitions after it add weights of exactly zero, before it they are scaled away."""
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=16)
    context = random_context(team, [300], shape, dtype)
    row = context.rows[0]
    row[:, :16], row[:, 16:32] = 1.0, -1.0
    row[100, 16:32] = 100.0
    context.store(team, 0, 0, 300)
    attended = context.attend(team, [(0, 299, 300)])
    assert np.array_equal(attended, rounded(row[100:101, 32:], dtype))


def test_equal_keys_average_the_values(isa: str, team: _cpu.Team, dtype: str) -> None:
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
    context = random_context(team, [130], shape, dtype)
    row = context.rows[0]
    row[:, 32:48] = 0.5
    context.store(team, 0, 0, 130)
    mean = np.tile(rounded(row[:, 48:], dtype).astype(np.float64).mean(axis=0), 2)
    attended = context.attend(team, [(0, 129, 130)])[0]
    np.testing.assert_allclose(attended, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_results_are_the_float32_ones_rounded(
    isa: str, team: _cpu.Team, dtype: str, shape: Shape
) -> None:
    context = random_context(team, [100], shape, dtype)
    exact = context.attend(team, [(0, 20, 100)])
    bits = context.attend(team, [(0, 20, 100)], "bfloat16")
    expected = torch.from_numpy(exact).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert bits.dtype == np.uint16
    assert np.array_equal(bits, expected)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.head_dim % 32 == 0], ids=str)
def test_int8_results_are_the_float32_ones_in_groups(
    isa: str, team: _cpu.Team, dtype: str, shape: Shape
) -> None:
    context = random_context(team, [100], shape, dtype)
    exact = context.attend(team, [(0, 20, 100)])
    groups = context.attend(team, [(0, 20, 100)], "int8")
    assert groups.dtype == np.uint8
    assert np.array_equal(groups, _cpu.ops.quantize(team, exact))


def test_whole_numbers_lose_little(isa: str, team: _cpu.Team) -> None:
    """Of what exact arithmetic makes of the numbers before they were rounded."""
    context = random_context(team, [200], SHAPES[0], "int8")
    exact = attend_densely(context.rows[0], SHAPES[0], "float32")
    np.testing.assert_allclose(context.attend(team, [(0, 0, 200)]), exact, atol=0.03)


def test_a_head_of_zeros_or_of_tiny_numbers_is_stored(isa: str, team: _cpu.Team) -> None:
    """Their scale's inverse is infinite, or nearly."""
    cache = _cpu.KvCache("int8", 1, NUM_LAYERS, 1, 16, 16)
    sizes = np.float32([0, 1e-45, 1e-38, 1e-30, 1e-3, 1e38])
    qkv = np.ones((6, 48), np.float32) * sizes[:, None]
    _cpu.ops.store_kv(team, qkv, cache, int32(range(6)), LAYER, 1)
    for stored in cache.read(0, LAYER):
        np.testing.assert_allclose(stored[0, :6], qkv[:, :16], rtol=1e-6, atol=2e-36)


def test_a_row_of_broken_numbers_breaks_no_other(isa: str, team: _cpu.Team, dtype: str) -> None:
    """Not even those that share its prefix and are computed in its tile."""
    prefixes = {1: (0, 128), 2: (0, 128)}
    context = random_context(team, [200, 210, 220, 50], SHAPES[0], dtype, prefixes=prefixes)
    queries = [(0, 199, 200), (1, 209, 210), (2, 219, 220), (3, 49, 50)]
    before = context.attend(team, queries)
    context.rows[1][150:] = np.nan
    context.store(team, 1, 150, 210)
    after = context.attend(team, queries)
    assert np.isnan(after[1]).all()
    assert np.array_equal(np.delete(after, 1, 0), np.delete(before, 1, 0))


# Storing.


@pytest.mark.parametrize("block_size", [1, 5, 16, 48])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stored_keys_and_values_are_read_back_rounded_once(
    isa: str, team: _cpu.Team, dtype: str, shape: Shape, block_size: int
) -> None:
    num_blocks = -(-100 // block_size)
    heads, head_dim = shape.num_kv_heads, shape.head_dim
    cache = _cpu.KvCache(dtype, num_blocks, NUM_LAYERS, heads, block_size, head_dim)
    slots = np.random.default_rng(1).permutation(num_blocks * block_size)[:77].astype(np.int32)
    qkv = np.random.default_rng(2).standard_normal((77, shape.qkv_width), np.float32)
    qkv[3, -1], qkv[4, -1], qkv[5, -1] = np.inf, -0.0, 1e-40
    _cpu.ops.store_kv(team, qkv, cache, slots, LAYER, shape.num_heads)
    kv = rounded(qkv.reshape(77, -1, head_dim)[:, shape.num_heads :], dtype)
    expected = np.zeros((num_blocks, 2, heads, block_size, head_dim), np.float32)
    for token, slot in enumerate(slots):
        block, offset = divmod(slot, block_size)
        expected[block, :, :, offset] = kv[token].reshape(2, heads, head_dim)
    for block in range(num_blocks):
        stored = np.stack(cache.read(block, LAYER))
        if dtype == "int8":  # which has no minus zero, and makes what isn't finite NaN
            assert np.array_equal(stored, expected[block], equal_nan=True)
        else:
            assert np.array_equal(stored.view(np.uint32), expected[block].view(np.uint32))
        assert not np.stack(cache.read(block, 1 - LAYER)).any()


def test_copied_blocks_hold_all_layers(team: _cpu.Team, dtype: str) -> None:
    shape = SHAPES[0]
    cache = _cpu.KvCache(dtype, 3, NUM_LAYERS, shape.num_kv_heads, 16, shape.head_dim)
    for layer in range(NUM_LAYERS):
        qkv = np.random.default_rng(layer).standard_normal((16, shape.qkv_width), np.float32)
        _cpu.ops.store_kv(team, qkv, cache, int32(range(16)), layer, shape.num_heads)
    cache.copy_block(0, 2)
    for layer in range(NUM_LAYERS):
        source, target = cache.read(0, layer), cache.read(2, layer)
        assert np.array_equal(source, target)
        assert np.abs(source).max(axis=-1).min() > 0
        assert not np.stack(cache.read(1, layer)).any()


def test_sizes_of_a_cache(dtype: str) -> None:
    cache = _cpu.KvCache(dtype, 10, 2, 3, 16, 64)
    token = {"float32": 64 * 4, "bfloat16": 64 * 2, "int8": 64 + 4}[dtype]
    assert cache.block_bytes == 2 * 2 * 3 * 16 * token
    assert cache.num_bytes == 10 * cache.block_bytes
    assert (cache.dtype, cache.num_blocks, cache.block_size) == (dtype, 10, 16)


# Arguments.


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2, 3, 16, 64), "num_blocks"),
        ((1 << 30, 2, 3, 16, 64), "num_blocks"),
        ((10, 0, 3, 16, 64), "num_layers"),
        ((10, 2, 0, 16, 64), "num_kv_heads"),
        ((10, 2, 3, 0, 64), "block_size"),
        ((10, 2, 3, 2000, 64), "block_size"),
        ((10, 2, 3, 16, 72), "head_dim"),
        ((10, 2, 3, 16, 512), "head_dim"),
    ],
)
def test_a_cache_that_kernels_cannot_serve_is_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"KvCache: {message} must be .*, got"):
        _cpu.KvCache("float32", *sizes)


def test_what_lies_outside_the_cache_is_refused(team: _cpu.Team) -> None:
    shape = SHAPES[0]
    context = random_context(team, [40], shape, "float32")
    qkv = context.rows[0][:1].copy()
    last = context.cache.num_blocks * 16
    for slot in (-1, last):
        expected = rf"store_kv: slots: .*to {last - 1}, got {slot} at 0"
        with pytest.raises(ValueError, match=expected):
            _cpu.ops.store_kv(team, qkv, context.cache, int32([slot]), LAYER, 9)
    with pytest.raises(ValueError, match=r"store_kv: layer: expected 0 to 1, got 2"):
        _cpu.ops.store_kv(team, qkv, context.cache, int32([0]), 2, 9)
    with pytest.raises(ValueError, match=r"store_kv: qkv: expected float32 \[1, 1152\]"):
        _cpu.ops.store_kv(team, qkv, context.cache, int32([0]), LAYER, 12)
    with pytest.raises(ValueError, match=r"num_heads: .* multiple of 3 KV heads .*, got 10"):
        _cpu.ops.store_kv(team, qkv, context.cache, int32([0]), LAYER, 10)
    context.block_tables[0][1] = 99
    with pytest.raises(ValueError, match=r"paged_attention: block_tables: .*, got 99 for row 0"):
        context.attend(team, [(0, 39, 40)])
    with pytest.raises(ValueError, match=r"block_tables: expected 3 blocks for row 0, got 1"):
        attend_with(context, team, context_lens=[40])


def attend_with(context: PagedContext, team: _cpu.Team, **changed: list[int]) -> Array:
    arrays = {
        "token_ids": [0],
        "positions": [0],
        "slots": [0],
        "query_start": [0, 1],
        "context_lens": [1],
        "logit_rows": [0],
    } | changed
    batch = _cpu.Batch(
        block_tables=int32([[0]]), **{name: int32(values) for name, values in arrays.items()}
    )
    qkv = context.rows[0][:1].copy()
    return np.asarray(
        _cpu.ops.paged_attention(team, qkv, context.cache, batch, LAYER, 9, 0.125, "float32")
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": [0, 1]}, r"positions: expected int32 \[1\], got int32 \[2\]"),
        ({"slots": [-1]}, r"slots: expected numbers from 0"),
        ({"query_start": [0, 2]}, r"query_start: expected numbers from 0 to 1, got 0 to 2"),
        ({"query_start": [0]}, r"query_start: expected int32 \[2\]"),
        ({"context_lens": [0]}, r"context_lens: expected at least the row's 1 tokens, got 0"),
        ({"logit_rows": [1]}, r"logit_rows: expected numbers from 0 to 0, got 1 at 0"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(
    team: _cpu.Team, changed: dict[str, list[int]], message: str
) -> None:
    context = random_context(team, [40], SHAPES[0], "float32")
    assert attend_with(context, team).shape == (1, 9 * 64)
    with pytest.raises(ValueError, match=f"Batch: {message}"):
        attend_with(context, team, **changed)


def test_a_batch_gives_its_arrays_back(team: _cpu.Team) -> None:
    context = random_context(team, [40, 20], SHAPES[0], "float32")
    batch = context.batch([(0, 37, 40), (1, 19, 20)])
    assert (batch.num_tokens, batch.num_rows, batch.num_logit_rows) == (4, 2, 0)
    assert batch.positions.tolist() == [37, 38, 39, 19]
    assert batch.slots.tolist() == [*context.slots(0, 37, 40), *context.slots(1, 19, 20)]
    assert batch.query_start.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [40, 20]
    assert batch.block_tables.tolist() == [context.block_tables[0], [*context.block_tables[1], 0]]
    assert batch.logit_rows.dtype == np.int32
