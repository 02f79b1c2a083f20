"""Products with quantized weights against float64 sums of the same numbers, alone and in a program:
the same bits however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
from ops.quantized import FORMATS, INPUT_GROUP, Array, random_blocks

from streamkv import _cpu
from streamkv._cpu import ops

NUM_ROWS = [0, 1, 2, 3, 5, 8, 12, 13, 40, 130]
DEPTH = 256


def make_weight(
    formats: list[str], outputs: list[int], depth: int = DEPTH, *, is_paired: bool = False
) -> _cpu.QuantizedWeight:
    random = np.random.default_rng(1)
    weight = _cpu.QuantizedWeight(formats, outputs, depth, is_paired)
    for part, (name, num_outputs) in enumerate(zip(formats, outputs, strict=True)):
        if name in ("int8", "Q4_0", "Q4_1", "Q8_0"):
            rows = random.normal(size=(num_outputs, depth)).astype(np.float32)
            weight.pack(_cpu.quantize(rows, name), part, 0)
        else:
            weight.pack(random_blocks(name, num_outputs, depth, random), part, 0)
    return weight


def make_inputs(team: _cpu.Team, num_rows: int, depth: int = DEPTH) -> tuple[Array, Array]:
    """As products take them, and the numbers they are, float64."""
    x = np.random.default_rng(2).normal(size=(num_rows, depth)).astype(np.float32)
    inputs = ops.quantize(team, x)
    groups = inputs.view(INPUT_GROUP)
    values = groups["values"].astype(np.float64) * groups["scale"][:, :, None].astype(np.float64)
    return inputs, values.reshape(num_rows, groups.shape[1] * 32)[:, :depth]


def assert_close_to_product(actual: Array, x: Array, weight: _cpu.QuantizedWeight) -> None:
    """Within what float32 sums of groups may be off at the very most."""
    matrix = weight.unpack(0, weight.num_outputs).astype(np.float64)
    # K formats' minima may be far greater than what is left of their sum with the levels.
    largest = np.abs(matrix).reshape(len(matrix), -1).max(axis=1)
    bound = np.abs(x).sum(axis=1, keepdims=True) * largest * (x.shape[1] / 8 + 40) * 2.0**-24
    assert actual.dtype == np.float32
    assert np.all(np.abs(actual - x @ matrix.T) <= bound + 1e-30)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_is_x_times_the_transposed_weight(isa: str, team: _cpu.Team, name: str) -> None:
    weight = make_weight([name, name], [70, 33])
    for num_rows in NUM_ROWS:
        inputs, x = make_inputs(team, num_rows)
        assert_close_to_product(ops.linear(team, inputs, weight), x, weight)


@pytest.mark.parametrize("depth", [1, 31, 33, 100])
def test_int8_takes_depths_that_fill_no_group(isa: str, team: _cpu.Team, depth: int) -> None:
    weight = make_weight(["int8"], [45], depth)
    inputs, x = make_inputs(team, 7, depth)
    assert_close_to_product(ops.linear(team, inputs, weight), x, weight)


def test_parts_may_differ_in_format_and_a_row_has_the_same_bits_alone(
    isa: str, team: _cpu.Team
) -> None:
    weight = make_weight(["Q4_K", "Q6_K", "Q4_1", "int8"], [70, 33, 64, 5])
    random = np.random.default_rng(3)
    inputs, x = make_inputs(team, 40)
    residual = random.normal(size=(40, 172)).astype(np.float32)
    bias = random.normal(size=172).astype(np.float32)
    plain = ops.linear(team, inputs, weight)
    assert_close_to_product(plain, x, weight)
    out = ops.linear(team, inputs, weight, bias, residual)
    np.testing.assert_array_equal(out, plain + bias + residual)
    for row in range(0, 40, 7):
        alone = ops.linear(_cpu.Team(1), inputs[row : row + 1], weight, bias, residual[row][None])
        np.testing.assert_array_equal(alone, out[row : row + 1])


@pytest.mark.parametrize("formats", [["Q4_1", "Q4_1"], ["Q4_K", "Q8_0"]], ids=str)
def test_linear_silu_mul_gates_and_makes_any_inputs(
    isa: str, team: _cpu.Team, formats: list[str]
) -> None:
    paired = make_weight(formats, [100, 100], is_paired=True)
    plain = make_weight(formats, [100, 100])
    inputs, _ = make_inputs(team, 13)
    gate, up = np.split(ops.linear(team, inputs, plain).astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    out = ops.linear_silu_mul(team, inputs, paired, None, "float32")
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-30)
    groups = ops.linear_silu_mul(team, inputs, paired)
    np.testing.assert_array_equal(groups, ops.quantize(team, out))
    narrow = ops.linear_silu_mul(team, inputs, paired, None, "bfloat16")
    widened = (narrow.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(widened, out, rtol=2**-8)


def test_a_value_that_is_not_finite_spoils_its_row_alone(isa: str, team: _cpu.Team) -> None:
    weight = make_weight(["Q4_0"], [64])
    x = np.random.default_rng(4).normal(size=(14, DEPTH)).astype(np.float32)
    good = ops.linear(team, ops.quantize(team, x), weight)
    x[5, 100] = np.inf
    bad = ops.linear(team, ops.quantize(team, x), weight)
    assert np.isnan(bad[5]).all()
    np.testing.assert_array_equal(np.delete(bad, 5, axis=0), np.delete(good, 5, axis=0))


def run_program(team: _cpu.Team, token_ids: Array) -> tuple[Array, Array]:
    """embedding, rms_norm, gate, residual and head of quantized weights: the logits in a program,
    and op by op."""
    table = make_weight(["Q8_0"], [64])
    gate_up = make_weight(["Q4_1", "Q4_1"], [96, 96], is_paired=True)
    down, norm = make_weight(["Q5_0"], [DEPTH], 96), np.full(DEPTH, 0.5, np.float32)
    num_tokens, floats, groups = len(token_ids), DEPTH * 4, DEPTH // 32 * 44
    cache = _cpu.KvCache("float32", 4, 1, 1, 16, 16)
    program = _cpu.Program(cache)
    sizes = [floats, groups, 96 // 32 * 44, floats, groups, 64 * 4]
    places = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes[:-1])])
    hidden, normed, gated, grown, last, logits = (
        program.add_buffer("tokens", size, int(place))
        for size, place in zip(sizes, places, strict=True)
    )
    program.add_embedding(table, hidden)
    program.add_rms_norm(hidden, norm, 1e-5, normed, "int8")
    program.add_linear_silu_mul(normed, gate_up, None, gated, "int8")
    program.add_linear(gated, down, None, hidden, out=grown)
    program.add_quantize(grown, DEPTH, last)
    program.add_linear(last, table, None, out=logits)
    program.reserve(num_tokens, 0)
    zeros = np.arange(num_tokens, dtype=np.int32)
    batch = _cpu.Batch(
        token_ids,
        zeros,
        zeros,
        np.array([0, num_tokens], np.int32),
        np.array([num_tokens], np.int32),
        np.arange(4, dtype=np.int32)[None],
        np.array([], np.int32),
    )
    program.run(batch, team)

    x = ops.embedding(team, token_ids, table)
    y = ops.linear_silu_mul(team, ops.rms_norm(team, x, norm, 1e-5, "int8"), gate_up)
    y = ops.quantize(team, ops.linear(team, y, down, None, x))
    return program.read(logits).view(np.float32), ops.linear(team, y, table)


@pytest.mark.parametrize("num_tokens", [1, 3, 33])
def test_a_program_has_the_bits_of_its_ops(isa: str, team: _cpu.Team, num_tokens: int) -> None:
    token_ids = np.random.default_rng(5).integers(0, 64, num_tokens).astype(np.int32)
    recorded, eager = run_program(team, token_ids)
    assert np.isfinite(eager).all() and np.abs(eager).max() > 0
    np.testing.assert_array_equal(recorded, eager)


@pytest.mark.parametrize(
    ("row_bytes", "out_dtype", "message"),
    [
        (DEPTH * 4, "int8", "out: expected 352 bytes .*, got 1024 bytes"),
        (352, "bfloat16", "out: expected 512 bytes .*, got 352 bytes"),
        (352, "float16", "out_dtype: expected 'float32', 'bfloat16' or 'int8', got 'float16'"),
    ],
)
def test_a_buffer_must_have_room_for_just_what_is_made(
    row_bytes: int, out_dtype: str, message: str
) -> None:
    program = _cpu.Program(_cpu.KvCache("float32", 4, 1, 1, 16, 16))
    x = program.add_buffer("tokens", DEPTH * 4, 0)
    out = program.add_buffer("tokens", row_bytes, DEPTH * 4)
    with pytest.raises(ValueError, match=f"^rms_norm: {message}"):
        program.add_rms_norm(x, np.ones(DEPTH, np.float32), 1e-5, out, out_dtype)


def test_a_float_weight_makes_no_int8_inputs_and_heads_must_be_whole_groups() -> None:
    program = _cpu.Program(_cpu.KvCache("float32", 4, 1, 1, 16, 16))
    weight = _cpu.PackedWeight("float32", 64, 32, True)
    x = program.add_buffer("tokens", 32 * 4, 0)
    out = program.add_buffer("tokens", 44, 128)
    with pytest.raises(ValueError, match="^linear_silu_mul: out_dtype: .* float weight, got int8"):
        program.add_linear_silu_mul(x, weight, None, out, "int8")
    qkv = program.add_buffer("tokens", 4 * 16 * 4, 192)
    with pytest.raises(ValueError, match="^paged_attention: out_dtype: .* heads of 16, got int8"):
        program.add_paged_attention(qkv, 0, 2, 1.0, out, "int8")
