"""Recorded programs, run by a numpy interpreter in the places they were given."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

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
from streamkv.models import CausalLM, build_model, read_config
from streamkv.models.layers import plain_parameter
from streamkv.ops import AttentionShape, Batch, Parameter, Rope
from streamkv.runner.eager import Eager
from streamkv.runner.inputs import resolve_inputs
from streamkv.runner.program import (
    ALIGNMENT,
    INPUT,
    NO_BUFFER,
    Buffer,
    Extent,
    HeadRmsNorm,
    Linear,
    LinearSiluMul,
    PagedAttention,
    ProgramSpec,
    Quantize,
    RmsNorm,
    Rotary,
    SelectRows,
    buffers_of,
    row_bytes,
)
from streamkv.runner.recorder import Recorder, build_program

NUM_BLOCKS, BLOCK_SIZE = 60, 4
MAX_MODEL_LEN = 64

VARIANTS = {
    "tied": {},
    "untied-biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "one-layer": {"num_hidden_layers": 1},
    "odd-widths": {"hidden_size": 36, "head_dim": 10, "intermediate_size": 50},
    "head-norms": {"architecture": "Qwen3ForCausalLM"},
    "narrow-mlp": {"intermediate_size": 16, "num_key_value_heads": 4, "num_hidden_layers": 3},
}


@pytest.fixture
def numpy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension is the one in numpy."""
    monkeypatch.setitem(sys.modules, "streamkv._cpu", numpy_cpu.MODULE)
    monkeypatch.setattr(streamkv, "_cpu", numpy_cpu.MODULE, raising=False)


# What products take, by a part of their weights' names; the first that fits.
TAKEN = {
    "float32": {"": "float32"},
    "bfloat16": {"": "bfloat16"},
    "int8": {"": "int8"},
    "int8 but for MLPs": {"gate_up": "bfloat16", "": "int8"},
    "int8 MLPs": {"mlp": "int8", "": "float32"},
    "each its own": {"qkv": "int8", "o_proj": "bfloat16", "down": "float32", "": "int8"},
}


def takes(dtypes: str, name: str) -> str:
    return next(dtype for part, dtype in TAKEN[dtypes].items() if part in name)


def load(folder: Path, dtypes: str) -> tuple[CausalLM, dict, numpy_cpu.KvCache]:
    """The model of a folder, its weights and an empty cache. Matrices take inputs of TAKEN."""
    model = build_model(read_config(json.loads((folder / "config.json").read_text())))
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for parameter in model.parameters():
        values = np.concatenate([tensors[name] for name, _ in parameter.parts])
        if len(parameter.shape) == 2:
            values = matrix(values, takes(dtypes, parameter.name), parameter.is_paired)
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


def matrix(values: np.ndarray, dtype: str, is_paired: bool = False) -> numpy_cpu.PackedWeight:
    if dtype == "int8":
        return numpy_cpu.QuantizedWeight(values, is_paired=is_paired)
    return numpy_cpu.PackedWeight(values, is_paired=is_paired, input_dtype=dtype)


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
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("dtypes", TAKEN)
@pytest.mark.usefixtures("numpy_module")
def test_eager_has_the_bits_of_the_program_whatever_products_take(tmp_path, dtypes, head_dim):
    wish = {"architecture": "Qwen3ForCausalLM", "head_dim": head_dim, "intermediate_size": 70}
    folder = save_tiny_checkpoint(tmp_path, **wish)
    model, weights, cache = load(folder, dtypes)
    _, _, own_cache = load(folder, dtypes)
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
    config = read_config(fields | changes)
    return Recorder(max_model_len=100).record(build_model(config))


def test_the_residual_stream_and_heads_stay_where_they_are():
    spec = llama_spec(architectures=["Qwen3ForCausalLM"], head_dim=64)
    assert any(isinstance(op, HeadRmsNorm) for op in spec.ops)
    stream = spec.ops[0].out
    for op in spec.ops:
        if isinstance(op, Linear) and op.residual != NO_BUFFER:
            assert op.residual == op.out
        if isinstance(op, (HeadRmsNorm, Rotary)):
            assert op.x == op.out
    selected = [op for op in spec.ops if isinstance(op, SelectRows)]
    assert [op.x for op in selected] == [stream]


def resolved(spec: ProgramSpec, dtype: str) -> ProgramSpec:
    """With products that all take the same."""
    names = {op.weight.name for op in spec.ops if isinstance(op, (Linear, LinearSiluMul))}
    return resolve_inputs(spec, dict.fromkeys(names, Takes(dtype)))


class Takes(NamedTuple):
    input_dtype: str


DTYPES = ("float32", "bfloat16", "int8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate_size", [64, 1536])
def test_a_model_takes_no_more_memory_than_one_layer_needs(dtype, intermediate_size):
    """The stream, an input of a product, and what it gives: gates, or heads where they are wider,
    or logits. (Widths are of whole cache lines, but for int8's.)"""
    spec = resolved(llama_spec(intermediate_size=intermediate_size, vocab_size=960), dtype)
    layout = spec.layout()
    stream, norm = 4 * 576, aligned(row_bytes(dtype, 576))
    gates, heads, logits = aligned(row_bytes(dtype, intermediate_size)), 4 * 15 * 64, 4 * 960
    assert layout.bytes_per_token == stream + norm + max(gates, heads)
    assert layout.bytes_per_logit_row == stream + norm + max(gates, logits)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def test_more_layers_take_more_ops_but_no_more_memory():
    few, many = llama_spec(num_hidden_layers=2), llama_spec(num_hidden_layers=90)
    assert len(many.ops) - len(few.ops) == 88 * 9
    sizes = [resolved(spec, "float32").layout().bytes_per_token for spec in (few, many)]
    assert sizes[0] == sizes[1]


def byte_ranges(spec: ProgramSpec, num_tokens: int, num_logit_rows: int) -> list[tuple[int, int]]:
    """(start, end) of each buffer in a step, as program.h says."""
    layout = spec.layout()
    found = []
    for index, buffer in enumerate(spec.buffers):
        rows = num_tokens if buffer.extent is Extent.TOKENS else num_logit_rows
        start = -(-layout.places[index] * rows // ALIGNMENT) * ALIGNMENT
        found.append((start, start + layout.row_bytes[index] * rows))
    return found


def assert_nothing_overlaps(spec: ProgramSpec, num_tokens: int, num_logit_rows: int) -> None:
    ranges = byte_ranges(spec, num_tokens, num_logit_rows)
    layout = spec.layout()
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
                ["norm", "linear", "linear", "gated", "heads", "rotary", "attend", "select"]
            )
            width = x.buffer.width
            out_width = choose.choice([8, 16, width, 100])
            is_input = x.buffer.dtype == INPUT
            if kind == "norm" and not is_input:
                values.append(ops.rms_norm(x, plain_parameter("n", (width,)), 1e-5))
            elif kind == "linear" and is_input:
                extent = x.buffer.extent
                fitting = [v for v in values if v.buffer == Buffer(extent, out_width, "float32")]
                residual = choose.choice([None, *fitting])
                weight = plain_parameter("l", (out_width, width))
                values.append(ops.linear(x, weight, residual=residual))
            elif kind == "gated" and is_input:
                weight = Parameter("g", (2 * out_width, width), (), is_paired=True)
                values.append(ops.linear_silu_mul(x, weight))
            elif kind == "select" and x.buffer == Buffer(Extent.TOKENS, width, "float32"):
                values.append(ops.select_rows(x, batch.logit_rows))
            elif x.buffer == Buffer(Extent.TOKENS, shape.qkv_width, "float32"):
                if kind == "heads":
                    norm = plain_parameter("h", (2,))
                    values.append(ops.head_rms_norm(x, norm, norm, 1e-5, shape))
                elif kind == "rotary":
                    rope = Rope((1.0,), 1.0, 9)
                    values.append(ops.rotary(x, batch.positions, rope, shape))
                elif kind == "attend":
                    ops.store_kv(x, batch, 0, shape)
                    values.append(ops.paged_attention(x, batch, 0, shape, 1.0))
        return choose.choice([v for v in values if v.buffer.dtype != INPUT])

    def logits(self, ops, hidden):
        return hidden


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    num_ops=st.integers(0, 40),
    num_tokens=st.integers(1, 5000),
    num_logit_rows=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
)
def test_no_two_buffers_that_live_at_once_overlap_in_a_step_of_any_size(
    seed, num_ops, num_tokens, num_logit_rows, dtype
):
    spec = resolved(Recorder(max_model_len=9).record(RandomModel(seed, num_ops)), dtype)
    assert_nothing_overlaps(spec, num_tokens, num_logit_rows)
    assert_nothing_overlaps(spec, 1, 1)


@pytest.mark.parametrize("variant", [{}, {"hidden_size": 90, "head_dim": 10}])
def test_no_two_live_buffers_of_a_llama_overlap(variant):
    for dtype in DTYPES:
        spec = resolved(llama_spec(num_hidden_layers=4, **variant), dtype)
        for num_tokens, num_logit_rows in ((1, 0), (1, 1), (3, 2), (17, 17), (513, 1)):
            assert_nothing_overlaps(spec, num_tokens, num_logit_rows)


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
HEAD = plain_parameter("head", (2,))
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
    assert_nothing_overlaps(resolved(spec, "bfloat16"), 5, 5)


def test_a_recorder_records_one_model_after_another():
    recorder = Recorder(max_model_len=100)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2}
    config |= {"vocab_size": 9, "intermediate_size": 16, "num_hidden_layers": 1}
    model = build_model(read_config(config))
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
    "head_rms_norm: qkv": lambda ops, b: ops.head_rms_norm(normed(ops, b), HEAD, HEAD, 1e-5, SHAPE),
    "head_rms_norm: q_weight": lambda ops, b: ops.head_rms_norm(
        embedded(ops, b), NORM, HEAD, 1e-5, SHAPE
    ),
    "head_rms_norm: k_weight": lambda ops, b: ops.head_rms_norm(
        embedded(ops, b), HEAD, SQUARE, 1e-5, SHAPE
    ),
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


# --- what products take -------------------------------------------------------------------------


def test_each_buffer_of_inputs_has_the_dtype_that_its_product_takes():
    spec = llama_spec(num_hidden_layers=1)
    taken = {"qkv_proj": "bfloat16", "gate_up_proj": "float32"}
    weights = {
        op.weight.name: Takes(taken.get(op.weight.name.split(".")[-2], "int8"))
        for op in spec.ops
        if isinstance(op, (Linear, LinearSiluMul))
    }
    found = resolve_inputs(spec, weights)
    for op in found.ops:
        if isinstance(op, (Linear, LinearSiluMul)):
            assert found.buffers[op.x].dtype == weights[op.weight.name].input_dtype
    assert not any(buffer.dtype == INPUT for buffer in found.buffers)
    assert found.logits == spec.logits and found.buffers[found.logits].dtype == "float32"
    assert resolve_inputs(found, weights) == found


@pytest.mark.parametrize(
    ("head_dim", "gates_take", "quantized"),
    [
        (64, "int8", []),
        (80, "int8", ["paged_attention"]),  # a group of 32 would be of two heads
        (64, "bfloat16", ["linear_silu_mul"]),
        (16, "float32", ["paged_attention", "linear_silu_mul"]),
    ],
)
def test_inputs_are_quantized_after_ops_that_cannot_make_them(head_dim, gates_take, quantized):
    spec = llama_spec(num_hidden_layers=1, head_dim=head_dim)
    weights = {
        op.weight.name: Takes(gates_take if isinstance(op, LinearSiluMul) else "int8")
        for op in spec.ops
        if isinstance(op, (Linear, LinearSiluMul))
    }
    found = resolve_inputs(spec, weights)
    after = [
        (before, op)
        for before, op in zip(found.ops, found.ops[1:], strict=False)
        if isinstance(op, Quantize)
    ]
    assert [before.name for before, _ in after] == quantized
    for before, op in after:
        assert op.x == before.out
        made, given_ = found.buffers[op.out], found.buffers[op.x]
        assert (given_.dtype, made.dtype) == ("float32", "int8")
        assert (given_.extent, given_.width) == (made.extent, made.width)
        readers = [one for one in found.ops if getattr(one, "x", None) == op.out]
        assert [type(one) for one in readers] == [Linear]
    without = [op for op in found.ops if not isinstance(op, Quantize)]
    assert [op.name for op in without] == [op.name for op in spec.ops]
    assert resolve_inputs(found, weights) == found
    attention = next(op for op in found.ops if isinstance(op, PagedAttention))
    is_split = "paged_attention" in quantized
    assert found.buffers[attention.out].dtype == ("float32" if is_split else "int8")


def test_products_that_read_the_same_inputs_must_take_the_same():
    def forward(ops, batch):
        normed = ops.rms_norm(embedded(ops, batch), NORM, 1e-5)
        first = ops.linear(normed, SQUARE)
        return ops.linear(normed, plain_parameter("other", (8, 8)), residual=first)

    spec = Recorder(max_model_len=8).record(Written(forward))
    weights = {"square": Takes("bfloat16"), "other": Takes("bfloat16")}
    assert resolve_inputs(spec, weights).buffers[spec.ops[1].out].dtype == "bfloat16"
    weights["other"] = Takes("int8")
    with pytest.raises(ValueError, match="linear: other expected to take bfloat16 .* takes int8"):
        resolve_inputs(spec, weights)


def test_a_program_of_other_weights_is_not_taken_for_theirs():
    spec = resolved(llama_spec(num_hidden_layers=1), "int8")
    with pytest.raises(ValueError, match="expected to take int8 inputs .* takes float32"):
        resolved(spec, "float32")


def test_inputs_that_nobody_reads_are_float32():
    def forward(ops, batch):
        x = embedded(ops, batch)
        ops.rms_norm(x, NORM, 1e-5)
        return x

    spec = Recorder(max_model_len=8).record(Written(forward))
    assert resolve_inputs(spec, {}).buffers[spec.ops[1].out].dtype == "float32"


def test_a_program_whose_inputs_are_not_resolved_has_no_places():
    with pytest.raises(ValueError, match="got 'input': resolve inputs first"):
        llama_spec(num_hidden_layers=1).layout()


@pytest.mark.parametrize(
    ("dtype", "width", "num_bytes"),
    [("float32", 33, 132), ("bfloat16", 33, 66), ("int8", 32, 44), ("int8", 33, 88)],
)
def test_rows_of_int8_are_whole_groups(dtype, width, num_bytes):
    assert row_bytes(dtype, width) == num_bytes


def test_ops_name_their_buffers():
    spec = llama_spec(num_hidden_layers=1)
    used = {buffer for op in spec.ops for buffer in buffers_of(op)}
    assert used == set(range(len(spec.buffers)))
    norm = next(op for op in spec.ops if isinstance(op, RmsNorm))
    assert list(buffers_of(norm)) == [norm.x, norm.out]
