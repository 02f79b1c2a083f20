"""The cost model against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from streamkv.models import build_model, read_config
from streamkv.ops import Parameter
from streamkv.runner.cost import Cost, StepShape, cost_of, describe, label
from streamkv.runner.formats import Matrix, ModelFormats
from streamkv.runner.inputs import resolve_inputs
from streamkv.runner.program import (
    Embedding,
    HeadRmsNorm,
    Linear,
    LinearSiluMul,
    PagedAttention,
    ProgramSpec,
    Quantize,
    RmsNorm,
    Rotary,
    SelectRows,
    StoreKv,
)
from streamkv.runner.recorder import Recorder

STEP = StepShape(num_tokens=5, num_logit_rows=2, context_tokens=40, attended_tokens=100)


FORMATS = {"float32": 4, "bfloat16": 2}  # bytes of a number


class Case(NamedTuple):
    spec: ProgramSpec  # its inputs resolved
    formats: ModelFormats


def case(
    weights: str = "bfloat16", inputs: str = "bfloat16", kv: str = "bfloat16", **changes
) -> Case:
    """Two layers, hidden 8, heads of 2 (4 and 2 of them), MLP of 6, 10 tokens. A quantized matrix
    has 1000 bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = build_model(read_config(config | changes))
    matrices = {
        one.name: Matrix((weights,), size_of(one, weights), inputs)
        for one in model.parameters()
        if len(one.shape) == 2
    }
    spec = Recorder(max_model_len=100).record(model)
    return Case(resolve_inputs(spec, matrices), ModelFormats(matrices, kv))


def size_of(matrix: Parameter, weights: str) -> int:
    return math.prod(matrix.shape) * FORMATS[weights] if weights in FORMATS else 1000


def first(case: Case, kind: type) -> Cost:
    op = next(op for op in case.spec.ops if isinstance(op, kind))
    return cost_of(case.spec, op, STEP, case.formats)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "num_operations"),
    [
        (Embedding, 5 * 8 * (2 + 4), 0),
        (RmsNorm, 5 * 8 * (4 + 2) + 8 * 4, 4 * 5 * 8),
        # 8 -> 16 heads of QKV values
        (Linear, 16 * 8 * 2 + 5 * 8 * 2 + 5 * 16 * 4, 2 * 5 * 8 * 16),
        # Q and K: 12 values
        (Rotary, 2 * 5 * 16 * 4 + 5 * 2 * 4, 3 * 5 * 12),
        (StoreKv, 5 * 8 * (4 + 2), 0),
        (PagedAttention, 5 * 8 * 4 + 40 * 8 * 2 + 5 * 8 * 2, 2 * 2 * 100 * 8),
        (LinearSiluMul, 12 * 8 * 2 + 5 * 8 * 2 + 5 * 6 * 2, 2 * 5 * 8 * 12),
        (SelectRows, 2 * 2 * 8 * 4, 0),
    ],
)
def test_the_cost_of_an_op(kind, num_bytes, num_operations):
    assert first(case(), kind) == Cost(num_bytes, num_operations)


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        (Embedding, 5 * (1000 // 10 + 8 * 4)),
        (RmsNorm, 5 * (8 * 4 + 44) + 8 * 4),  # a group of 32 inputs takes 44 bytes
        (Linear, 1000 + 5 * 44 + 5 * 16 * 4),
        # K and V of two heads of 2, and a scale for each
        (StoreKv, 5 * (8 * 4 + 2 * 2 * (2 + 4))),
        # heads of 2 are no groups of inputs
        (PagedAttention, 5 * 8 * 4 + 40 * 2 * 2 * (2 + 4) + 5 * 8 * 4),
        (Quantize, 5 * (8 * 4 + 44)),
        (LinearSiluMul, 1000 + 5 * 44 + 5 * 44),
    ],
)
def test_the_bytes_of_quantized_numbers(kind, num_bytes):
    assert first(case("Q4_1", "int8", "int8"), kind).num_bytes == num_bytes


def test_the_cost_of_norms_of_heads():
    """Of Q and K, 12 values, by two vectors of 2."""
    found = first(case(architectures=["Qwen3ForCausalLM"], head_dim=2), HeadRmsNorm)
    assert found == Cost(2 * 5 * 16 * 4 + 2 * 2 * 4, 4 * 5 * 12)


def test_biases_and_residuals_are_read_too():
    plain, biased = first(case(), Linear), first(case(attention_bias=True), Linear)
    assert biased.num_bytes - plain.num_bytes == 16 * 4
    spec, formats = case("float32", "float32")
    down = next(op for op in spec.ops if isinstance(op, Linear) and "down" in op.weight.name)
    found = cost_of(spec, down, STEP, formats)
    assert found.num_bytes == 8 * 6 * 4 + 5 * 6 * 4 + 2 * 5 * 8 * 4


def test_a_float32_cache_is_twice_as_wide():
    wide, narrow = first(case(kv="float32"), PagedAttention), first(case(), PagedAttention)
    assert wide.num_bytes - narrow.num_bytes == 40 * 8 * 2


def test_what_no_row_wants_costs_nothing():
    spec, formats = case()
    step = STEP._replace(num_logit_rows=0)
    costs = {op: cost_of(spec, op, step, formats) for op in spec.ops}
    after = [cost for op, cost in costs.items() if label(op) in ("model.norm", "lm_head")]
    assert after == [Cost(0, 0)] * 2
    assert all(cost.num_bytes for op, cost in costs.items() if isinstance(op, StoreKv))


def test_a_step_is_counted_from_its_rows():
    """A prompt of 4, a chunk of 2 that ends at 10, and a token that sees 7."""
    step = StepShape.of_rows([(4, 4), (2, 10), (1, 7)], num_logit_rows=2)
    assert step == StepShape(7, 2, 4 + 10 + 7, (1 + 2 + 3 + 4) + (9 + 10) + 7)


def test_the_table_has_a_line_for_each_kind_of_op_and_their_sum():
    spec, formats = case("Q4_1", "int8", tie_word_embeddings=True)
    step = {"num_tokens": 4, "num_logit_rows": 4, "context": 30}
    lines = describe(spec, **step, formats=formats).splitlines()
    assert lines[0].startswith(f"{len(spec.ops)} ops, {len(spec.buffers)} buffers")
    assert "4 tokens in 4 rows with 30 tokens of context, 4 want logits, Q4_1 weig" in lines[1]
    assert lines[1].endswith("int8 inputs, bfloat16 KV:")
    titles = {" ".join(line.split()[:2]): line for line in lines[3:]}
    assert "linear_silu_mul model.layers.*.mlp.gate_up_proj" in titles
    assert "linear model.embed_tokens" in titles
    assert "paged_attention 4/2" in titles
    assert "quantize to" in titles
    times = [int(line.split()[-4]) for line in lines[3:]]
    assert sum(times[:-1]) == times[-1] == len(spec.ops)
    step = StepShape.of_rows([(1, 30)] * 4, 4)
    total = sum(cost_of(spec, op, step, formats).num_operations for op in spec.ops)
    assert lines[-1].split()[-2] == f"{total / 1e6:.3f}"


def test_the_table_is_there_for_steps_without_logits_and_tokens_spread_unevenly():
    spec, formats = case()
    silent = {"num_tokens": 7, "num_logit_rows": 0, "context": 3}
    assert "7 tokens in 1 row with" in describe(spec, **silent, formats=formats)
    uneven = {"num_tokens": 7, "num_logit_rows": 3, "context": 50}
    lines = describe(spec, **uneven, formats=formats).splitlines()
    step = StepShape.of_rows([(2, 50), (2, 50), (3, 50)], 3)
    attention = [op for op in spec.ops if isinstance(op, PagedAttention)]
    expected = sum(cost_of(spec, op, step, formats).num_operations for op in attention)
    (line,) = [line for line in lines if line.startswith("paged_attention")]
    assert line.split()[-2] == f"{expected / 1e6:.3f}"
