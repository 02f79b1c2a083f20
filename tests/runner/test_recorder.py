"""Recorded programs, run by a numpy interpreter in the places they were given."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from runner import numpy_cpu
from safetensors.numpy import load_file
from tiny import save_tiny_checkpoint

import streamkv
from streamkv.models import ModelConfig, build_model
from streamkv.models.layers import plain_parameter
from streamkv.models.llama import LlamaForCausalLM
from streamkv.ops import AttentionShape, Batch, Parameter, Rope
from streamkv.runner.eager import Eager
from streamkv.runner.program import (
    ALIGNMENT,
    NO_BUFFER,
    Buffer,
    Extent,
    Linear,
    ProgramSpec,
    RmsNorm,
    Rotary,
    SelectRows,
    buffers_of,
)
from streamkv.runner.recorder import Recorder, build_program, input_dtype

NUM_BLOCKS, BLOCK_SIZE = 60, 4
MAX_MODEL_LEN = 64

VARIANTS = {
    "tied": {},
    "untied-biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "one-layer": {"num_hidden_layers": 1},
    "odd-widths": {"hidden_size": 36, "head_dim": 10, "intermediate_size": 50},
    "narrow-mlp": {"intermediate_size": 16, "num_key_value_heads": 4, "num_hidden_layers": 3},
}


@pytest.fixture
def numpy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension is the one in numpy."""
    monkeypatch.setitem(sys.modules, "streamkv._cpu", numpy_cpu.MODULE)
    monkeypatch.setattr(streamkv, "_cpu", numpy_cpu.MODULE, raising=False)


def load(folder: Path, dtype: str) -> tuple[LlamaForCausalLM, dict, numpy_cpu.KvCache]:
    """The model of a folder, its weights and an empty cache. Matrices take inputs of `dtype`."""
    model = build_model(ModelConfig.from_dict(json.loads((folder / "config.json").read_text())))
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for parameter in model.parameters():
        values = np.concatenate([tensors[name] for name, _ in parameter.parts])
        if len(parameter.shape) == 2:
            values = numpy_cpu.PackedWeight(
                values, is_paired=parameter.is_paired, input_dtype=dtype
            )
        weights[parameter.name] = values
    config = model.config
    cache = numpy_cpu.KvCache(
        NUM_BLOCKS,
        config.num_hidden_layers,
        config.num_key_value_heads,
        BLOCK_SIZE,
        config.head_dim,
    )
    return model, weights, cache


def steps_of(sequences: list[np.ndarray], seed: int) -> list[tuple[Batch, list[tuple[int, int]]]]:
    """Random chunks of all sequences, several in a step, until all are computed. Each step with
    the (sequence, position) of each row of its logits."""
    choose = random.Random(seed)
    free = choose.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    width = MAX_MODEL_LEN // BLOCK_SIZE
    tables = [np.array([free.pop() for _ in range(width)], np.int32) for _ in sequences]
    computed = [0] * len(sequences)
    steps = []
    while remaining := [i for i, ids in enumerate(sequences) if computed[i] < len(ids)]:
        rows = choose.sample(remaining, choose.randint(1, len(remaining)))
        positions, wanted = [], []
        for row in rows:
            end = choose.randint(computed[row] + 1, len(sequences[row]))
            positions.append(np.arange(computed[row], end))
            computed[row] = end
        lengths = [len(one) for one in positions]
        where = [(row, int(p)) for row, own in zip(rows, positions, strict=True) for p in own]
        wanted = choose.sample(range(len(where)), choose.randint(0, len(where)))
        slots = [
            tables[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for row, position in where
        ]
        arrays = (
            [sequences[row][position] for row, position in where],
            np.concatenate(positions),
            slots,
            np.cumsum([0, *lengths]),
            [computed[row] for row in rows],
            [tables[row] for row in rows],
            wanted,
        )
        batch = Batch(*(np.array(array, np.int32) for array in arrays))
        steps.append((batch, [where[index] for index in wanted]))
    return steps


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("numpy_module")
def test_a_program_in_its_arena_computes_transformers_logits(tmp_path, variant):
    folder = save_tiny_checkpoint(tmp_path, **({"head_dim": 16} | VARIANTS[variant]))
    oracle = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            if name.endswith(".bias"):  # they start at zero, which would hide a missing one
                weight.copy_(torch.randn(weight.shape))
    oracle.save_pretrained(folder)
    model, weights, cache = load(folder, "float32")
    spec = Recorder(max_model_len=MAX_MODEL_LEN).record(model)
    program = build_program(spec, weights, cache)
    assert program.num_ops == len(spec.ops)

    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 339, length) for length in (37, 1, 20)]
    with torch.inference_mode():
        expected = [oracle(torch.tensor(ids)[None]).logits[0].numpy() for ids in sequences]
    for seed in range(3):
        cache.data[:] = np.nan
        for batch, where in steps_of(sequences, seed):
            program.run(numpy_cpu.Batch(*batch))
            logits = program.read(spec.logits).view(np.float32)
            assert logits.shape == (len(where), 339)
            for found, (sequence, position) in zip(logits, where, strict=True):
                np.testing.assert_allclose(
                    found, expected[sequence][position], atol=1e-4, rtol=1e-4
                )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("numpy_module")
def test_eager_has_the_bits_of_the_program_whatever_products_take(tmp_path, dtype):
    folder = save_tiny_checkpoint(tmp_path, head_dim=16)
    model, weights, cache = load(folder, dtype)
    _, _, own_cache = load(folder, dtype)
    spec = Recorder(max_model_len=MAX_MODEL_LEN).record(model)
    program = build_program(spec, weights, cache)
    eager = Eager(None, weights, own_cache, max_model_len=MAX_MODEL_LEN)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 339, length) for length in (30, 9)]
    for batch, _ in steps_of(sequences, seed=5):
        native_batch = numpy_cpu.Batch(*batch)
        program.run(native_batch)
        for one in (batch, native_batch):
            logits = model.logits(eager, model.forward(eager, one))
            assert np.array_equal(logits, program.read(spec.logits).view(np.float32))
        assert np.array_equal(cache.data, own_cache.data, equal_nan=True)


@pytest.mark.usefixtures("numpy_module")
def test_a_table_of_angles_is_made_once_and_no_longer_than_the_context(tmp_path):
    model, weights, cache = load(save_tiny_checkpoint(tmp_path, head_dim=16), "float32")
    for max_model_len, num_positions in ((50, 50), (10_000, 256)):
        spec = Recorder(max_model_len=max_model_len).record(model)
        tables = build_program(spec, weights, cache).tables
        assert len(tables) == 2 and tables[0] is tables[1]
        assert tables[0].shape == (num_positions, 16)


def llama_spec(**changes) -> ProgramSpec:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    config = ModelConfig.from_dict(fields | changes)
    return Recorder(max_model_len=100).record(build_model(config))


def test_the_residual_stream_and_rotated_heads_stay_where_they_are():
    spec = llama_spec()
    stream = spec.ops[0].out
    for op in spec.ops:
        if isinstance(op, Linear) and op.residual != NO_BUFFER:
            assert op.residual == op.out
        if isinstance(op, Rotary):
            assert op.x == op.out
    selected = [op for op in spec.ops if isinstance(op, SelectRows)]
    assert [op.x for op in selected] == [stream]


@pytest.mark.parametrize("input_bytes", [2, 4])
@pytest.mark.parametrize("intermediate_size", [64, 1536])
def test_a_model_takes_no_more_memory_than_one_layer_needs(input_bytes, intermediate_size):
    """The stream, an input of a product, and what it gives: gates, or heads where they are wider,
    or logits. (Widths are multiples of 64 bytes.)"""
    layout = llama_spec(intermediate_size=intermediate_size, vocab_size=960).layout(input_bytes)
    stream, norm = 4 * 576, input_bytes * 576
    gates, heads, logits = input_bytes * intermediate_size, 4 * 15 * 64, 4 * 960
    assert layout.bytes_per_token == stream + norm + max(gates, heads)
    assert layout.bytes_per_logit_row == stream + norm + max(gates, logits)


def test_more_layers_take_more_ops_but_no_more_memory():
    few, many = llama_spec(num_hidden_layers=2), llama_spec(num_hidden_layers=90)
    assert len(many.ops) - len(few.ops) == 88 * 9
    assert many.layout(4).bytes_per_token == few.layout(4).bytes_per_token


def byte_ranges(
    spec: ProgramSpec, input_bytes: int, num_tokens: int, num_logit_rows: int
) -> list[tuple[int, int]]:
    """(start, end) of each buffer in a step, as program.h says."""
    layout = spec.layout(input_bytes)
    found = []
    for index, buffer in enumerate(spec.buffers):
        rows = num_tokens if buffer.extent is Extent.TOKENS else num_logit_rows
        start = -(-layout.places[index] * rows // ALIGNMENT) * ALIGNMENT
        found.append((start, start + layout.row_bytes[index] * rows))
    return found


def assert_nothing_overlaps(
    spec: ProgramSpec, input_bytes: int, num_tokens: int, num_logit_rows: int
) -> None:
    ranges = byte_ranges(spec, input_bytes, num_tokens, num_logit_rows)
    layout = spec.layout(input_bytes)
    region = {
        Extent.TOKENS: layout.bytes_per_token * num_tokens,
        Extent.LOGIT_ROWS: layout.bytes_per_logit_row * num_logit_rows,
    }
    lifetimes = spec.lifetimes()
    for index, (start, end) in enumerate(ranges):
        assert start % ALIGNMENT == 0 and end <= region[spec.buffers[index].extent]
        for other in range(index):
            both_live = (
                lifetimes[index][0] <= lifetimes[other][1]
                and lifetimes[other][0] <= lifetimes[index][1]
            )
            if both_live and spec.buffers[other].extent is spec.buffers[index].extent:
                assert end <= ranges[other][0] or ranges[other][1] <= start


class RandomModel:
    """Any ops on any values that fit; then logits from any of them."""

    def __init__(self, seed: int, num_ops: int) -> None:
        self._choose = random.Random(seed)
        self._num_ops = num_ops
        self.uses: list[tuple[int, ...]] = []

    def forward(self, ops, batch):
        choose = self._choose
        width = choose.choice([6, 16, 30, 192])
        values = [ops.embedding(batch.token_ids, plain_parameter("e", (7, width)))]
        shape = AttentionShape(2, 1, 2)
        for _ in range(self._num_ops):
            x = choose.choice(values)
            kind = choose.choice(
                ["norm", "linear", "linear", "gated", "rotary", "attend", "select"]
            )
            width = x.buffer.width
            out_width = choose.choice([8, 16, width, 100])
            if kind == "norm" and not x.buffer.is_input:
                values.append(ops.rms_norm(x, plain_parameter("n", (width,)), 1e-5))
            elif kind == "linear" and x.buffer.is_input:
                extent = x.buffer.extent
                fitting = [v for v in values if v.buffer == Buffer(extent, out_width, False)]
                residual = choose.choice([None, *fitting])
                weight = plain_parameter("l", (out_width, width))
                values.append(ops.linear(x, weight, residual=residual))
            elif kind == "gated" and x.buffer.is_input:
                weight = Parameter("g", (2 * out_width, width), (), is_paired=True)
                values.append(ops.linear_silu_mul(x, weight))
            elif kind == "select" and x.buffer == Buffer(Extent.TOKENS, width, False):
                values.append(ops.select_rows(x, batch.logit_rows))
            elif x.buffer == Buffer(Extent.TOKENS, shape.qkv_width, False):
                if kind == "rotary":
                    rope = Rope((1.0,), 1.0, 9)
                    values.append(ops.rotary(x, batch.positions, rope, shape))
                elif kind == "attend":
                    ops.store_kv(x, batch, 0, shape)
                    values.append(ops.paged_attention(x, batch, 0, shape, 1.0))
        return choose.choice([v for v in values if not v.buffer.is_input])

    def logits(self, ops, hidden):
        return hidden


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    num_ops=st.integers(0, 40),
    num_tokens=st.integers(1, 5000),
    num_logit_rows=st.integers(0, 300),
    input_bytes=st.sampled_from([2, 4]),
)
def test_no_two_buffers_that_live_at_once_overlap_in_a_step_of_any_size(
    seed, num_ops, num_tokens, num_logit_rows, input_bytes
):
    spec = Recorder(max_model_len=9).record(RandomModel(seed, num_ops))
    assert_nothing_overlaps(spec, input_bytes, num_tokens, num_logit_rows)
    assert_nothing_overlaps(spec, input_bytes, 1, 1)


@pytest.mark.parametrize("variant", [{}, {"hidden_size": 90, "head_dim": 10}])
def test_no_two_live_buffers_of_a_llama_overlap(variant):
    spec = llama_spec(num_hidden_layers=4, **variant)
    for num_tokens, num_logit_rows in ((1, 0), (1, 1), (3, 2), (17, 17), (513, 1)):
        for input_bytes in (2, 4):
            assert_nothing_overlaps(spec, input_bytes, num_tokens, num_logit_rows)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9), num_ops=st.integers(1, 40))
def test_no_value_is_overwritten_before_its_last_use(seed, num_ops):
    """Each op reads, in the shared buffers, what it read when each value had its own."""
    model = RandomModel(seed, num_ops)
    recorder = Recorder(max_model_len=9)
    spec = recorder.record(model)
    single = recorder._ops  # one buffer for each value
    holds: dict[int, int] = {}  # shared buffer -> the value that is in it
    for plain, shared in zip(single, spec.ops, strict=True):
        for name in ("x", "residual"):
            if getattr(plain, name, NO_BUFFER) != NO_BUFFER:
                assert holds[getattr(shared, name)] == getattr(plain, name)
        if hasattr(plain, "out"):
            holds[shared.out] = plain.out


class Written:
    """A model out of two functions."""

    def __init__(self, forward, logits=lambda ops, hidden: hidden) -> None:
        self.forward, self.logits = forward, logits


TABLE = plain_parameter("table", (9, 8))
NORM = plain_parameter("norm", (8,))
SQUARE = plain_parameter("square", (8, 8))
SHAPE = AttentionShape(2, 1, 2)
ROPE = Rope((1.0,), 1.0, 16)


def test_a_residual_that_is_needed_later_is_not_overwritten():
    def forward(ops, batch):
        x = ops.embedding(batch.token_ids, TABLE)
        normed = ops.rms_norm(x, NORM, 1e-5)
        first = ops.linear(normed, SQUARE, residual=x)
        return ops.linear(ops.rms_norm(first, NORM, 1e-5), SQUARE, residual=x)

    spec = Recorder(max_model_len=8).record(Written(forward))
    first, second = (op for op in spec.ops if isinstance(op, Linear))
    assert first.out != first.residual
    assert second.residual == second.out == first.residual == spec.ops[0].out


def test_logits_are_not_overwritten_by_what_comes_after():
    kept = []

    def forward(ops, batch):
        x = ops.embedding(batch.token_ids, TABLE)
        kept.append(ops.linear(ops.rms_norm(x, NORM, 1e-5), SQUARE))
        ops.linear(ops.rms_norm(x, NORM, 1e-5), SQUARE, residual=kept[0])
        return x

    spec = Recorder(max_model_len=8).record(Written(forward, lambda ops, hidden: kept[0]))
    assert spec.logits not in {op.out for op in spec.ops[3:]}
    assert spec.lifetimes()[spec.logits][1] == len(spec.ops)
    assert_nothing_overlaps(spec, 2, 5, 5)


def test_a_recorder_records_one_model_after_another():
    recorder = Recorder(max_model_len=100)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2}
    config |= {"vocab_size": 9, "intermediate_size": 16, "num_hidden_layers": 1}
    model = build_model(ModelConfig.from_dict(config))
    assert recorder.record(model) == recorder.record(model)


def embedded(ops, batch):
    return ops.embedding(batch.token_ids, TABLE)


def normed(ops, batch):
    return ops.rms_norm(embedded(ops, batch), NORM, 1e-5)


PAIRED = dataclasses.replace(SQUARE, is_paired=True)
MISUSES = {
    "embedding: token_ids": lambda ops, b: ops.embedding(b.positions, TABLE),
    "rms_norm: x": lambda ops, b: ops.rms_norm(normed(ops, b), NORM, 1e-5),
    "rms_norm: x ": lambda ops, b: ops.rms_norm(
        embedded(ops, b), plain_parameter("norm", (9,)), 1e-5
    ),
    "linear: x": lambda ops, b: ops.linear(embedded(ops, b), SQUARE),
    "linear: x ": lambda ops, b: ops.linear(b.token_ids, SQUARE),
    "linear: weight": lambda ops, b: ops.linear(normed(ops, b), PAIRED),
    "linear: bias": lambda ops, b: ops.linear(normed(ops, b), SQUARE, TABLE),
    "linear: residual": lambda ops, b: ops.linear(normed(ops, b), SQUARE, residual=normed(ops, b)),
    "linear: residual ": lambda ops, b: ops.linear(
        normed(ops, b), SQUARE, residual=ops.select_rows(embedded(ops, b), b.logit_rows)
    ),
    "linear_silu_mul: weight": lambda ops, b: ops.linear_silu_mul(normed(ops, b), SQUARE),
    "rotary: qkv": lambda ops, b: ops.rotary(
        embedded(ops, b), b.positions, ROPE, AttentionShape(3, 1, 2)
    ),
    "rotary: positions": lambda ops, b: ops.rotary(embedded(ops, b), b.slots, ROPE, SHAPE),
    "rotary: rope": lambda ops, b: ops.rotary(
        embedded(ops, b), b.positions, Rope((1.0, 0.5), 1.0, 16), SHAPE
    ),
    "store_kv: qkv": lambda ops, b: ops.store_kv(normed(ops, b), b, 0, SHAPE),
    "store_kv: slots": lambda ops, b: ops.store_kv(
        embedded(ops, b), b._replace(slots=b.positions), 0, SHAPE
    ),
    "paged_attention: qkv": lambda ops, b: ops.paged_attention(
        ops.select_rows(embedded(ops, b), b.logit_rows), b, 0, SHAPE, 1.0
    ),
    "paged_attention: context_lens": lambda ops, b: ops.paged_attention(
        embedded(ops, b), b._replace(context_lens=b.query_start), 0, SHAPE, 1.0
    ),
    "select_rows: x": lambda ops, b: ops.select_rows(normed(ops, b), b.logit_rows),
    "select_rows: x ": lambda ops, b: ops.select_rows(
        ops.select_rows(embedded(ops, b), b.logit_rows), b.logit_rows
    ),
    "select_rows: logit_rows": lambda ops, b: ops.select_rows(embedded(ops, b), b.positions),
    "logits: the model": normed,
}


@pytest.mark.parametrize("message", MISUSES)
def test_an_op_given_what_it_cannot_take_is_an_error_that_names_it(message):
    with pytest.raises(ValueError, match=f"^{message.strip()} expected .*, got "):
        Recorder(max_model_len=8).record(Written(MISUSES[message]))


def test_weights_whose_products_take_different_inputs_are_an_error():
    square = np.zeros((2, 2), np.float32)
    weights = {
        "vector": np.zeros(2, np.float32),
        "narrow": numpy_cpu.PackedWeight(square, input_dtype="bfloat16"),
    }
    assert input_dtype(weights) == "bfloat16"
    weights["wide"] = numpy_cpu.PackedWeight(square)
    with pytest.raises(ValueError, match="one dtype of inputs, got .*bfloat16.*float32"):
        input_dtype(weights)


def test_ops_name_their_buffers():
    spec = llama_spec(num_hidden_layers=1)
    used = {buffer for op in spec.ops for buffer in buffers_of(op)}
    assert used == set(range(len(spec.buffers)))
    norm = next(op for op in spec.ops if isinstance(op, RmsNorm))
    assert list(buffers_of(norm)) == [norm.x, norm.out]
