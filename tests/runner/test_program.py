"""A recorded program computes what its ops compute one by one, for steps of any shape."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from ops.arrays import Array

from streamkv import _cpu
from streamkv.runner.program import row_bytes

VOCAB, HIDDEN, INNER, POSITIONS = 50, 48, 80, 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 12, 8, 2
EPS, SCALE = 1e-5, 0.25
MAX_TOKENS, MAX_LOGIT_ROWS = 40, 6


def int32(values: Any) -> Array:
    return np.array(values, np.int32)


Weight = _cpu.PackedWeight | _cpu.QuantizedWeight


class Layer(NamedTuple):
    norm: Array
    qkv: Weight
    qkv_bias: Array
    q_norm: Array
    k_norm: Array
    out: Weight
    mlp_norm: Array
    gate_up: Weight
    down: Weight


FORMATS = ["float32", "bfloat16", "int8"]  # of weights and keys and values


class Model:
    """A small transformer's weights; two forwards over them: a program's, and the ops' own."""

    def __init__(self, dtype: str, kv_dtype: str = "") -> None:
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self._random = np.random.default_rng(3)
        self.embedding = self._matrix(VOCAB, HIDDEN)
        self.layers = [
            Layer(
                self._vector(HIDDEN),
                self._matrix(QKV, HIDDEN),
                self._vector(QKV),
                self._vector(HEAD_DIM),
                self._vector(HEAD_DIM),
                self._matrix(HIDDEN, HEADS * HEAD_DIM),
                self._vector(HIDDEN),
                self._matrix(2 * INNER, HIDDEN, is_paired=True),
                self._matrix(HIDDEN, INNER),
            )
            for _ in range(NUM_LAYERS)
        ]
        self.norm = self._vector(HIDDEN)
        angles = np.arange(POSITIONS)[:, None] / 10 ** np.arange(0, 2, 4 / HEAD_DIM)
        self.cos_sin = np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    @property
    def input_dtype(self) -> str:
        return str(self.embedding.input_dtype)

    def cache(self) -> _cpu.KvCache:
        return _cpu.KvCache(self.kv_dtype, NUM_BLOCKS, NUM_LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)

    def program(self, cache: _cpu.KvCache) -> tuple[_cpu.Program, int]:
        """And the buffer of its logits."""
        program, dtype = _cpu.Program(cache), self.input_dtype
        hidden = program.add_buffer("tokens", HIDDEN * 4, 0)
        inputs = program.add_buffer("tokens", row_bytes(dtype, HIDDEN), 192)
        qkv = program.add_buffer("tokens", QKV * 4, 384)
        attended = program.add_buffer("tokens", row_bytes(dtype, HEADS * HEAD_DIM), 896)
        as_floats = program.add_buffer("tokens", HEADS * HEAD_DIM * 4, 1152)
        inner = program.add_buffer("tokens", row_bytes(dtype, INNER), 384)  # QKV are done with
        last = program.add_buffer("logit_rows", HIDDEN * 4, 0)
        normed = program.add_buffer("logit_rows", row_bytes(dtype, HIDDEN), 192)
        logits = program.add_buffer("logit_rows", VOCAB * 4, 384)
        program.add_embedding(self.embedding, hidden)
        for index, layer in enumerate(self.layers):
            program.add_rms_norm(hidden, layer.norm, EPS, inputs, dtype)
            program.add_linear(inputs, layer.qkv, layer.qkv_bias, out=qkv)
            norms = (layer.q_norm, layer.k_norm)
            program.add_head_rms_norm(qkv, *norms, EPS, HEADS, KV_HEADS, qkv)
            program.add_rotary(qkv, self.cos_sin, HEADS, KV_HEADS, qkv)
            program.add_store_kv(qkv, index, HEADS)
            if dtype == "int8":  # heads are shorter than groups
                program.add_paged_attention(qkv, index, HEADS, SCALE, as_floats, "float32")
                program.add_quantize(as_floats, HEADS * HEAD_DIM, attended)
            else:
                program.add_paged_attention(qkv, index, HEADS, SCALE, attended, dtype)
            program.add_linear(attended, layer.out, None, hidden, out=hidden)
            program.add_rms_norm(hidden, layer.mlp_norm, EPS, inputs, dtype)
            program.add_linear_silu_mul(inputs, layer.gate_up, None, inner, dtype)
            program.add_linear(inner, layer.down, None, hidden, out=hidden)
        program.add_select_rows(hidden, last)
        program.add_rms_norm(last, self.norm, EPS, normed, dtype)
        program.add_linear(normed, self.embedding, None, out=logits)
        program.reserve(MAX_TOKENS, MAX_LOGIT_ROWS)
        return program, logits

    def forward(self, cache: _cpu.KvCache, batch: _cpu.Batch, team: _cpu.Team) -> Array:
        ops, dtype = _cpu.ops, self.input_dtype
        hidden = ops.embedding(team, batch.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            x = ops.rms_norm(team, hidden, layer.norm, EPS, dtype)
            qkv = ops.linear(team, x, layer.qkv, layer.qkv_bias)
            norms = (layer.q_norm, layer.k_norm)
            qkv = ops.head_rms_norm(team, qkv, *norms, EPS, HEADS, KV_HEADS)
            qkv = ops.rotary(team, qkv, batch.positions, self.cos_sin, HEADS, KV_HEADS)
            ops.store_kv(team, qkv, cache, batch.slots, index, HEADS)
            attended = "float32" if dtype == "int8" else dtype
            x = ops.paged_attention(team, qkv, cache, batch, index, HEADS, SCALE, attended)
            if dtype == "int8":
                x = ops.quantize(team, x)
            hidden = ops.linear(team, x, layer.out, None, hidden)
            x = ops.rms_norm(team, hidden, layer.mlp_norm, EPS, dtype)
            x = ops.linear_silu_mul(team, x, layer.gate_up)
            hidden = ops.linear(team, x, layer.down, None, hidden)
        last = ops.select_rows(team, hidden, batch.logit_rows)
        x = ops.rms_norm(team, last, self.norm, EPS, dtype)
        return np.asarray(ops.linear(team, x, self.embedding))

    def _vector(self, size: int) -> Array:
        return self._random.standard_normal(size, np.float32)

    def _matrix(self, num_outputs: int, depth: int, is_paired: bool = False) -> Weight:
        values = self._random.standard_normal((num_outputs, depth), np.float32) / 8
        if self.dtype != "int8":
            packed = _cpu.PackedWeight(self.dtype, num_outputs, depth, is_paired)
            packed.pack(values, 0)
            return packed
        parts = np.split(_cpu.quantize(values, "int8"), 1 + is_paired)
        quantized = _cpu.QuantizedWeight(
            ["int8"] * len(parts), [len(part) for part in parts], depth, is_paired
        )
        for index, part in enumerate(parts):
            quantized.pack(part, index, 0)
        return quantized


def make_batch(rows: Sequence[tuple[int, int, int]], asking: Sequence[int] = ()) -> _cpu.Batch:
    """Rows (first block, start, end); row r has blocks r's first, and the two after it."""
    positions = [p for _, start, end in rows for p in range(start, end)]
    slots = [block * BLOCK_SIZE + p for block, start, end in rows for p in range(start, end)]
    return _cpu.Batch(
        token_ids=int32([(7 * slot + 3) % VOCAB for slot in slots]),
        positions=int32(positions),
        slots=int32(slots),
        query_start=np.cumsum([0] + [end - start for _, start, end in rows], dtype=np.int32),
        context_lens=int32([end for _, _, end in rows]),
        block_tables=int32([[block, block + 1, block + 2] for block, _, _ in rows]).reshape(-1, 3),
        logit_rows=int32(asking),
    )


# Prompts whole and in parts, single tokens, both at once, nobody asking, nothing at all.
STEPS = [
    make_batch([(0, 0, 20)], [19]),
    make_batch([(3, 0, 9), (6, 0, 1)], [8, 9]),
    make_batch([(0, 20, 21), (3, 9, 24), (6, 1, 2)], [0, 16]),
    make_batch([(0, 21, 22), (6, 2, 12)]),
    make_batch([]),
    make_batch([(0, 22, 23), (6, 12, 13)], [1, 0]),
]


@pytest.fixture(params=FORMATS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("isa", _cpu.available_isas())
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [*((one, one) for one in FORMATS), ("int8", "bfloat16")]
)
def test_a_program_computes_what_its_ops_compute(
    isa: str, dtype: str, kv_dtype: str, num_threads: int
):
    _cpu.set_isa(isa)
    try:
        model, team = Model(dtype, kv_dtype), _cpu.Team(num_threads)
        cache, other_cache = model.cache(), model.cache()
        program, logits = model.program(cache)
        num_layer_ops = 11 if dtype == "int8" else 10
        assert program.num_ops == 1 + num_layer_ops * NUM_LAYERS + 3
        for batch in STEPS:
            program.run(batch, team)
            got = program.read(logits).view(np.float32)
            expected = model.forward(other_cache, batch, _cpu.Team(1))
            assert got.shape == (batch.num_logit_rows, VOCAB)
            assert np.isfinite(got).all()
            np.testing.assert_array_equal(got, expected)
        for block in range(NUM_BLOCKS):
            for layer in range(NUM_LAYERS):
                for stored, wanted in zip(
                    cache.read(block, layer), other_cache.read(block, layer), strict=True
                ):
                    np.testing.assert_array_equal(stored, wanted)
    finally:
        _cpu.set_isa(_cpu.available_isas()[0])


def test_a_step_may_be_run_in_parts(model: Model):
    team, batch = _cpu.Team(2), STEPS[1]
    program, logits = model.program(model.cache())
    program.run(batch, team)
    expected = program.read(logits)
    other, _ = model.program(model.cache())
    for first in range(other.num_ops):
        other.run(batch, team, first, first + 1)
    np.testing.assert_array_equal(other.read(logits), expected)


def test_what_was_written_to_a_buffer_is_what_ops_read():
    random = np.random.default_rng(0)
    weight = random.standard_normal((6, 8), np.float32)
    packed = _cpu.PackedWeight("float32", 6, 8)
    packed.pack(weight, 0)
    program = _cpu.Program(Model("float32").cache())
    x = program.add_buffer("tokens", 32, 0)
    out = program.add_buffer("tokens", 24, 64)
    program.add_linear(x, packed, None, out=out)
    program.reserve(5, 0)
    rows = random.standard_normal((3, 8), np.float32)
    program.write(x, rows.view(np.uint8), 3)
    np.testing.assert_array_equal(program.read(x), rows.view(np.uint8))
    program.run(make_batch([(0, 0, 3)]), _cpu.Team(2))
    got = program.read(out).view(np.float32)
    np.testing.assert_allclose(got, rows @ weight.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"rows: expected uint8 \[3, 32\], got uint8 \[3, 16\]"):
        program.write(x, np.zeros((3, 16), np.uint8), 3)
    with pytest.raises(ValueError, match="tokens: expected at most the 5 that were reserved"):
        program.write(x, np.zeros((6, 32), np.uint8), 6)


def test_a_program_keeps_what_it_was_given():
    team = _cpu.Team(2)
    model = Model("float32")
    expected = model.forward(model.cache(), STEPS[0], team)
    program, logits = model.program(model.cache())
    del model
    gc.collect()
    for _ in range(20):  # what was freed would be taken by these
        np.full(100_000, np.nan, np.float32)
        Model("float32")
    program.run(STEPS[0], team)
    np.testing.assert_array_equal(program.read(logits).view(np.float32), expected)


def test_the_profile_counts_each_op(model: Model):
    program, _ = model.program(model.cache())
    team = _cpu.Team(2)
    program.run(STEPS[0], team)
    assert program.op_ns == []
    program.profile(True)
    program.run(STEPS[0], team)
    first = program.op_ns
    assert len(first) == program.num_ops and all(ns > 0 for ns in first)
    program.run(STEPS[2], team)
    assert program.num_profiled_runs == 2
    assert all(now > before for now, before in zip(program.op_ns, first, strict=True))
    program.profile(False)
    counted = program.op_ns
    program.run(STEPS[2], team)
    assert program.op_ns == counted and program.num_profiled_runs == 2
    program.profile(True)
    assert program.op_ns == [0] * program.num_ops and program.num_profiled_runs == 0


# --- errors -------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Buffers of a program in float32, and weights that fit some of them."""

    program: _cpu.Program
    x: int  # 16 floats for each token, like `beside` and `over`
    beside: int
    over: int  # begins in the middle of x
    qkv: int
    last: int  # 16 floats for each logit row
    plain: _cpu.PackedWeight  # [16, 16]
    paired: _cpu.PackedWeight  # [16, 16]
    quantized: _cpu.QuantizedWeight  # [16, 16]
    groups: int  # 16 int8 inputs for each token: 44 bytes


def make_parts() -> Parts:
    program = _cpu.Program(_cpu.KvCache("float32", 4, 2, KV_HEADS, 4, HEAD_DIM))
    return Parts(
        program,
        program.add_buffer("tokens", 64, 64),
        program.add_buffer("tokens", 64, 128),
        program.add_buffer("tokens", 64, 64),
        program.add_buffer("tokens", QKV * 4, 192),
        program.add_buffer("logit_rows", 64, 0),
        _cpu.PackedWeight("float32", 16, 16),
        _cpu.PackedWeight("float32", 16, 16, True),
        _cpu.QuantizedWeight(["int8"], [16], 16),
        program.add_buffer("tokens", 44, 704),
    )


ONES = np.ones(16, np.float32)
TABLE = np.ones((8, HEAD_DIM), np.float32)

WRONG: dict[str, tuple[Callable[[Parts], object], str]] = {
    "extent": (
        lambda p: p.program.add_buffer("rows", 4, 0),
        "add_buffer: extent: expected 'tokens' or 'logit_rows', got 'rows'",
    ),
    "row_bytes": (lambda p: p.program.add_buffer("tokens", 0, 0), "row_bytes: expected 1 to"),
    "place": (lambda p: p.program.add_buffer("tokens", 4, 8), "place: expected a multiple of 64"),
    "unknown buffer": (
        lambda p: p.program.add_rms_norm(9, ONES, EPS, p.x, "float32"),
        "rms_norm: x: expected one of the 6 buffers, got 9",
    ),
    "width": (
        lambda p: p.program.add_rms_norm(p.x, ONES[:8].copy(), EPS, p.beside, "float32"),
        "rms_norm: x: expected 32 bytes for each of the tokens, got 64 bytes for each of the tok",
    ),
    "rows": (
        lambda p: p.program.add_rms_norm(p.x, ONES, EPS, p.last, "float32"),
        "rms_norm: out: expected 64 bytes for each of the tokens, got 64 bytes for each of the log",
    ),
    "overlap": (
        lambda p: p.program.add_rms_norm(p.x, ONES, EPS, p.over, "float32"),
        "rms_norm: out: expected a place beside what is read, got one over buffer 0",
    ),
    "dtype": (
        lambda p: p.program.add_rms_norm(p.x, ONES.astype(np.float64), EPS, p.beside, "float32"),
        r"rms_norm: weight: expected float32 \[any\], got float64 \[16\]",
    ),
    "embedding": (
        lambda p: p.program.add_embedding(p.plain, p.last),
        "embedding: out: expected 64 bytes for each of the tokens",
    ),
    "paired": (
        lambda p: p.program.add_linear(p.x, p.paired, None, out=p.beside),
        "linear: weight: expected one that is not paired",
    ),
    "not paired": (
        lambda p: p.program.add_linear_silu_mul(p.x, p.plain, None, p.beside, "float32"),
        "linear_silu_mul: weight: expected a paired one",
    ),
    "half as wide": (
        lambda p: p.program.add_linear_silu_mul(p.x, p.paired, None, p.beside, "float32"),
        "linear_silu_mul: out: expected 32 bytes",
    ),
    "floats for a quantized weight": (
        lambda p: p.program.add_linear(p.x, p.quantized, None, out=p.beside),
        "linear: x: expected 44 bytes for each of the tokens, got 64 bytes",
    ),
    "int8 for a float weight": (
        lambda p: p.program.add_linear(p.groups, p.plain, None, out=p.beside),
        "linear: x: expected 64 bytes for each of the tokens, got 44 bytes",
    ),
    "int8 of floats": (
        lambda p: p.program.add_linear_silu_mul(p.x, p.paired, None, p.groups, "int8"),
        "linear_silu_mul: out_dtype: expected float32 or bfloat16 of a float weight, got int8",
    ),
    "int8 of short heads": (
        lambda p: p.program.add_paged_attention(p.qkv, 0, HEADS, SCALE, p.beside, "int8"),
        "paged_attention: out_dtype: expected float32 or bfloat16 of heads of 16, got int8",
    ),
    "int8 in a place for floats": (
        lambda p: p.program.add_rms_norm(p.x, ONES, EPS, p.beside, "int8"),
        "rms_norm: out: expected 44 bytes for each of the tokens, got 64 bytes",
    ),
    "an unknown dtype": (
        lambda p: p.program.add_rms_norm(p.x, ONES, EPS, p.beside, "int4"),
        "rms_norm: out_dtype: expected .*int8.*, got 'int4'",
    ),
    "quantizing another width": (
        lambda p: p.program.add_quantize(p.x, 17, p.groups),
        "quantize: x: expected 68 bytes for each of the tokens, got 64 bytes",
    ),
    "quantizing into floats": (
        lambda p: p.program.add_quantize(p.x, 16, p.beside),
        "quantize: out: expected 44 bytes for each of the tokens, got 64 bytes",
    ),
    "bias": (
        lambda p: p.program.add_linear(p.x, p.plain, ONES[:3].copy(), out=p.beside),
        r"linear: bias: expected float32 \[16\], got float32 \[3\]",
    ),
    "residual": (
        lambda p: p.program.add_linear(p.x, p.plain, None, p.last, out=p.beside),
        "linear: residual: expected 64 bytes for each of the tokens",
    ),
    "product over its input": (
        lambda p: p.program.add_linear(p.x, p.plain, None, out=p.x),
        "linear: out: expected a place beside what is read",
    ),
    "heads": (
        lambda p: p.program.add_store_kv(p.qkv, 0, 3),
        "store_kv: num_heads: expected a multiple of the 2 KV heads up to 1048576, got 3",
    ),
    "very many heads": (  # 64 bytes each: so many more are none in 64 bits
        lambda p: p.program.add_store_kv(p.qkv, 0, HEADS + 2**58),
        "store_kv: num_heads: expected a multiple of the 2 KV heads up to",
    ),
    "layer": (lambda p: p.program.add_store_kv(p.qkv, 2, HEADS), "layer: expected 0 to 1, got 2"),
    "qkv": (lambda p: p.program.add_store_kv(p.x, 0, HEADS), "store_kv: qkv: expected 512 bytes"),
    "KV heads to norm": (
        lambda p: p.program.add_head_rms_norm(p.qkv, ONES, ONES, EPS, HEADS, 1, p.qkv),
        "head_rms_norm: num_kv_heads: expected 2 as the cache has, got 1",
    ),
    "very many heads to norm": (
        lambda p: p.program.add_head_rms_norm(p.qkv, ONES, ONES, EPS, 2**58, KV_HEADS, p.qkv),
        "head_rms_norm: num_heads: expected a multiple of the 2 KV heads up to",
    ),
    "norm of Q": (
        lambda p: p.program.add_head_rms_norm(p.qkv, ONES[:8], ONES, EPS, HEADS, KV_HEADS, p.qkv),
        r"head_rms_norm: q_weight: expected float32 \[16\], got float32 \[8\]",
    ),
    "norm of K": (
        lambda p: p.program.add_head_rms_norm(p.qkv, ONES, ONES[:8], EPS, HEADS, KV_HEADS, p.qkv),
        r"head_rms_norm: k_weight: expected float32 \[16\], got float32 \[8\]",
    ),
    "heads to norm": (
        lambda p: p.program.add_head_rms_norm(p.x, ONES, ONES, EPS, HEADS, KV_HEADS, p.qkv),
        "head_rms_norm: qkv: expected 512 bytes for each of the tokens, got 64 bytes",
    ),
    "normed heads": (
        lambda p: p.program.add_head_rms_norm(p.qkv, ONES, ONES, EPS, HEADS, KV_HEADS, p.x),
        "head_rms_norm: out: expected 512 bytes for each of the tokens, got 64 bytes",
    ),
    "normed heads over others": (
        lambda p: p.program.add_head_rms_norm(
            p.qkv, ONES, ONES, EPS, HEADS, KV_HEADS, p.program.add_buffer("tokens", QKV * 4, 256)
        ),
        "head_rms_norm: out: expected a place beside what is read, got one over buffer 3",
    ),
    "KV heads": (
        lambda p: p.program.add_rotary(p.qkv, TABLE, HEADS, 1, p.qkv),
        "rotary: num_kv_heads: expected 2 as the cache has, got 1",
    ),
    "table": (
        lambda p: p.program.add_rotary(p.qkv, TABLE[:, :8], HEADS, KV_HEADS, p.qkv),
        r"rotary: cos_sin: expected float32 \[any, 16\], got float32 \[8, 8\]",
    ),
    "attention": (
        lambda p: p.program.add_paged_attention(p.qkv, 0, HEADS, SCALE, p.x, "float32"),
        "paged_attention: out: expected 256 bytes",
    ),
    "selection": (
        lambda p: p.program.add_select_rows(p.x, p.beside),
        "select_rows: out: expected 64 bytes for each of the logit rows",
    ),
    "selected": (
        lambda p: p.program.add_select_rows(p.last, p.last),
        "select_rows: x: expected 64 bytes for each of the tokens",
    ),
    "read": (lambda p: p.program.read(-1), "expected one of the 6 buffers, got -1"),
    "reserve": (lambda p: p.program.reserve(-1, 0), "max_tokens: expected 0 to"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_recorded_is_refused(name: str):
    wrong, message = WRONG[name]
    parts = make_parts()
    with pytest.raises(ValueError, match=message):
        wrong(parts)
    assert parts.program.num_ops == 0


def test_weights_of_another_instruction_set_are_refused():
    parts, isas = make_parts(), _cpu.available_isas()
    if len(isas) == 1:
        pytest.skip("there is but one")
    _cpu.set_isa(isas[1])
    try:
        with pytest.raises(ValueError, match=f"linear: weight: expected one packed for {isas[1]}"):
            parts.program.add_linear(parts.x, parts.plain, None, out=parts.beside)
    finally:
        _cpu.set_isa(isas[0])


def test_buffers_are_added_before_the_arena_is_taken():
    parts = make_parts()
    parts.program.reserve(1, 1)
    with pytest.raises(ValueError, match="all buffers before reserve"):
        parts.program.add_buffer("tokens", 4, 0)


def test_buffers_are_added_before_rows_are_reserved_even_if_there_are_none_yet():
    """Such a buffer would have rows and no memory."""
    program = _cpu.Program(Model("float32").cache())
    program.reserve(8, 8)
    with pytest.raises(ValueError, match="all buffers before reserve"):
        program.add_buffer("tokens", 4, 0)


LIMITS = {"num_rows": 4, "max_model_len": POSITIONS, "vocab_size": VOCAB, "max_tokens": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": POSITIONS + 1}, "max_model_len: expected at most the program's 64 pos"),
        ({"vocab_size": VOCAB + 1}, "vocab_size: expected at most the program's 50 tokens, got 51"),
        ({"vocab_size": VOCAB - 1}, "vocab_size: expected the logits' 50, got 49"),
    ],
)
def test_a_runner_has_its_programs_sizes(changes: dict[str, int], message: str):
    model = Model("float32")
    cache, other = model.cache(), model.cache()
    program, logits = model.program(cache)
    _cpu.Runner(program, _cpu.Team(1), cache, logits, **LIMITS)
    with pytest.raises(ValueError, match=f"Runner: {message}"):
        _cpu.Runner(program, _cpu.Team(1), cache, logits, **(LIMITS | changes))
    with pytest.raises(ValueError, match="Runner: cache: expected the program's"):
        _cpu.Runner(program, _cpu.Team(1), other, logits, **LIMITS)


def changed(**changes: Any) -> _cpu.Batch:
    """A step of two tokens and one row, but for what is changed."""
    batch = STEPS[0].__class__(
        **{
            "token_ids": int32([1, 2]),
            "positions": int32([0, 1]),
            "slots": int32([0, 1]),
            "query_start": int32([0, 2]),
            "context_lens": int32([2]),
            "block_tables": int32([[0]]),
            "logit_rows": int32([]),
            **changes,
        }
    )
    return batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed(token_ids=int32([1, VOCAB])), "token_ids: expected numbers from 0 to 49, got 50 "),
        (changed(positions=int32([POSITIONS, 0])), "positions: expected numbers from 0 to 63"),
        (changed(slots=int32([0, 96])), "slots: expected numbers from 0 to 95, got 96"),
        (changed(block_tables=int32([[NUM_BLOCKS]])), "block_tables: expected blocks from 0 to 11"),
        (changed(context_lens=int32([9])), "block_tables: expected 2 blocks for row 0, got 1"),
        (make_batch([(0, 0, 24), (3, 0, 17)]), "tokens: expected at most the 40 .* got 41"),
        (make_batch([(0, 0, 8)], range(7)), "logit rows: expected at most the 6 .* got 7"),
    ],
)
def test_steps_outside_the_tables_are_refused(batch: _cpu.Batch, message: str):
    program, _ = Model("float32").program(Model("float32").cache())
    with pytest.raises(ValueError, match=message):
        program.run(batch, _cpu.Team(1))


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 2), (0, 25)])
def test_ops_outside_the_program_are_refused(first: int, last: int):
    program, _ = Model("float32").program(Model("float32").cache())
    with pytest.raises(ValueError, match="first, last: expected ascending numbers up to 24"):
        program.run(STEPS[0], _cpu.Team(1), first, last)
