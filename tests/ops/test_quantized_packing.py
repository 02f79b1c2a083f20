"""Quantized weights go in as a file has them and come out as the gguf package reads them."""

from __future__ import annotations

import numpy as np
import pytest
from ops.quantized import FORMATS, Array, block_depth, dequantize, pack_blocks, random_blocks

from streamkv import _cpu
from streamkv._cpu import ops

pytestmark = pytest.mark.usefixtures("isa")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def assert_same_bits(actual: Array, expected: Array) -> None:
    """Equal, and zeros of the same sign."""
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_packed_comes_out_as_the_file_means_it(
    format: str, rng: np.random.Generator
) -> None:
    for num_outputs, num_blocks in [(1, 1), (31, 2), (32, 9), (100, 3)]:
        depth = num_blocks * block_depth(format)
        source = random_blocks(format, num_outputs, depth, rng)
        assert source.shape[1] == _cpu.row_bytes(format, depth)
        weight = pack_blocks([format], [source], depth)
        assert_same_bits(weight.unpack(0, num_outputs), dequantize(format, source))


@pytest.mark.parametrize("depth", [1, 31, 33, 100, 576])
def test_int8_takes_any_depth(depth: int, rng: np.random.Generator) -> None:
    source = random_blocks("int8", 40, depth, rng)
    weight = pack_blocks(["int8"], [source], depth)
    assert_same_bits(weight.unpack(0, 40), dequantize("int8", source))


@pytest.mark.parametrize("format", FORMATS)
def test_panels_may_come_in_any_pieces_and_order_from_any_address(
    format: str, rng: np.random.Generator
) -> None:
    source = random_blocks(format, 210, 256, rng)
    weight = _cpu.QuantizedWeight([format], [210], 256)
    team = _cpu.Team(3)
    for first, end in [(192, 210), (32, 64), (64, 192), (0, 32)]:
        room = np.zeros(source[first:end].size + 1, np.uint8)[1:]
        room[:] = source[first:end].reshape(-1)
        weight.pack(room.reshape(end - first, -1), 0, first, team)
    expected = dequantize(format, source)
    assert_same_bits(weight.unpack(0, 210), expected)
    assert_same_bits(weight.unpack(101, 8), expected[101:109])


@pytest.mark.parametrize("format", FORMATS)
def test_packing_again_changes_no_other_panel(format: str, rng: np.random.Generator) -> None:
    source = random_blocks(format, 100, 256, rng)
    weight = pack_blocks([format], [source], 256)
    source[32:64] = source[64:96]
    weight.pack(source[32:64], 0, 32)
    assert_same_bits(weight.unpack(0, 100), dequantize(format, source))


def test_parts_of_a_weight_follow_one_another_whatever_their_formats(
    rng: np.random.Generator,
) -> None:
    formats, outputs = ["Q4_K", "Q8_0", "Q6_K", "int8"], [40, 1, 96, 33]
    parts = [random_blocks(*shape, 512, rng) for shape in zip(formats, outputs, strict=True)]
    weight = pack_blocks(formats, parts, 512)
    assert (weight.formats, weight.outputs) == (formats, outputs)
    assert (weight.num_outputs, weight.depth, weight.input_dtype) == (170, 512, "int8")
    expected = np.concatenate([dequantize(*part) for part in zip(formats, parts, strict=True)])
    assert_same_bits(weight.unpack(0, 170), expected)
    assert_same_bits(weight.unpack(38, 100), expected[38:138])


@pytest.mark.parametrize("formats", [["Q4_1", "Q4_1"], ["Q5_0", "Q6_K"]], ids=str)
def test_a_paired_weight_has_its_gates_first(formats: list[str], rng: np.random.Generator) -> None:
    parts = [random_blocks(format, 70, 256, rng) for format in formats]
    weight = pack_blocks(formats, parts, 256, is_paired=True)
    assert weight.is_paired
    expected = np.concatenate([dequantize(*part) for part in zip(formats, parts, strict=True)])
    assert_same_bits(weight.unpack(0, 140), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_the_bytes_of_a_weight_make_another_one(format: str, rng: np.random.Generator) -> None:
    source = random_blocks(format, 50, 256, rng)
    packed = pack_blocks([format], [source], 256)
    other = _cpu.QuantizedWeight([format], [50], 256)
    for to, of in zip(other.buffers(), packed.buffers(), strict=True):
        to[:] = of
    assert_same_bits(other.unpack(0, 50), dequantize(format, source))


def test_every_float16_scale_is_exact() -> None:
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    blocks = np.ones((65536, 34), np.uint8)
    blocks[:, :2] = halves.view(np.uint8).reshape(-1, 2)
    weight = pack_blocks(["Q8_0"], [blocks.reshape(64, -1)], 32 * 1024)
    values = weight.unpack(0, 64).reshape(65536, 32)
    expected = np.repeat(halves.view(np.float16).astype(np.float32)[:, None], 32, axis=1)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_takes_rows_of_a_quantized_weight(
    format: str, team: _cpu.Team, rng: np.random.Generator
) -> None:
    source = random_blocks(format, 90, 512, rng)
    weight = pack_blocks([format], [source], 512)
    table = dequantize(format, source)
    for num_tokens in (0, 1, 5, 90):
        ids = rng.integers(0, 90, num_tokens).astype(np.int32)
        assert_same_bits(ops.embedding(team, ids, weight), table[ids])
