"""Whole models of quantized weights on the native kernels, against float64 in numpy on the same
numbers, and against transformers on what the blocks stand for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from drive import load_runner
from numpy.typing import NDArray
from runner import numpy_cpu
from runner.quantized import Quantized, save_quantized_checkpoint
from safetensors.numpy import load_file

from streamkv import _cpu
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.models import build_model, read_config
from streamkv.ops import Batch
from streamkv.runner.cpu_model import load_cpu_model
from streamkv.runner.eager import Eager
from streamkv.runner.kv_cache import MemoryShare, kv_token_bytes
from streamkv.runner.recorder import Recorder, build_program
from streamkv.weights.hub import Checkpoint

Array = NDArray[Any]

VOCAB_SIZE = 339
CHUNKS = (20, 1, 16)  # of one sequence
BLOCK_SIZE, NUM_BLOCKS = 16, 8
NO_CACHE = {"packed_cache_gib": 0.0, "num_gpu_blocks_override": NUM_BLOCKS}

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
NARROW = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
# Formats by a part of the tensor's name; the first that fits.
MIXES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "Q4_1": ({"embed": "Q8_0", "": "Q4_1"}, NARROW),
    "Q4_0": ({"": "Q4_0"}, {**NARROW, "head_dim": 32}),
    "Q5": ({"embed": "Q5_0", "": "Q5_1"}, {**NARROW, "tie_word_embeddings": False}),
    "Q4_K": ({"embed": "Q6_K", "v_proj": "Q6_K", "down": "Q5_K", "": "Q4_K"}, WIDE),
    "floats among them": ({"embed": "F32", "k_proj": "F32", "down": "F32", "": "Q8_0"}, NARROW),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Quantized]:
    made = {}
    for name, (formats, config) in MIXES.items():
        made[name] = save_quantized_checkpoint(
            tmp_path_factory.mktemp("model"),
            lambda tensor, formats=formats: next(
                found for part, found in formats.items() if part in tensor
            ),
            **config,
        )
    return made


TOKEN_IDS = np.random.default_rng(2).integers(3, VOCAB_SIZE, sum(CHUNKS)).astype(np.int32)


def batches() -> list[Batch]:
    """The chunks of a sequence in blocks 5, 2 and 7; each token wants logits."""
    table = np.array([5, 2, 7], np.int32)
    found, start = [], 0
    for length in CHUNKS:
        positions = np.arange(start, start + length, dtype=np.int32)
        start += length
        found.append(
            Batch(
                token_ids=TOKEN_IDS[positions],
                positions=positions,
                slots=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
                query_start=np.array([0, length], np.int32),
                context_lens=np.array([start], np.int32),
                block_tables=table[None],
                logit_rows=np.arange(length, dtype=np.int32),
            )
        )
    return found


def native_logits(checkpoint: Checkpoint, **config: Any) -> Array:
    return native_run(checkpoint, **config).logits


class Run(NamedTuple):
    logits: Array
    kv: Array  # all that was stored, float32 [block, layer, key/value, head, offset, dim]


def native_run(checkpoint: Checkpoint, **config: Any) -> Run:
    engine_config = EngineConfig(device="cpu", threads=2, **(NO_CACHE | config))
    share = MemoryShare(engine_config, None)
    loaded = load_cpu_model(engine_config, checkpoint, share, lambda stage, fraction: None)
    spec = Recorder(max_model_len=NUM_BLOCKS * BLOCK_SIZE).record(loaded.model)
    program = build_program(spec, loaded.weights, loaded.cache)
    program.reserve(max(CHUNKS), max(CHUNKS))
    logits = []
    for batch in batches():
        program.run(_cpu.Batch(*batch), loaded.team)
        logits.append(program.read(spec.logits).view(np.float32).copy())
    layers = range(loaded.model.config.num_hidden_layers)
    kv = [
        [np.stack(loaded.cache.read(block, layer)) for layer in layers]
        for block in range(NUM_BLOCKS)
    ]
    return Run(np.concatenate(logits), np.array(kv))


class Numbers(NamedTuple):
    """A model in numpy: weights by parameter name."""

    folder: Path
    weights: dict[str, Any]

    def logits(self, kv_dtype: str, given: Array | None = None) -> Array:
        """float64 [tokens, vocabulary]. Attention reads keys and values rounded to `kv_dtype`; if
        some are `given`, those instead, which have to be nearly always the same."""
        model = build_model(read_config(json.loads((self.folder / "config.json").read_text())))
        config = model.config
        cache = numpy_cpu.KvCache(
            NUM_BLOCKS,
            config.num_hidden_layers,
            config.num_key_value_heads,
            BLOCK_SIZE,
            config.head_dim,
            kv_dtype=kv_dtype,
        )
        cache.data = cache.data.astype(np.float64)
        eager = Eager(None, self.weights, cache, max_model_len=NUM_BLOCKS * BLOCK_SIZE)
        eager._cpu = numpy_cpu.MODULE
        if given is not None:
            eager._cpu = SimpleNamespace(**vars(numpy_cpu.MODULE))
            eager._cpu.ops = SimpleNamespace(
                **(vars(numpy_cpu.OPS) | {"store_kv": partial(_give, given)})
            )
        return np.concatenate(
            [model.logits(eager, model.forward(eager, batch)) for batch in batches()]
        )


def _give(given: Array, team, qkv, cache, slots, layer, num_heads) -> None:
    """Store the keys and values of `given`, having compared them to what would be stored."""
    numpy_cpu.store_kv(team, qkv, cache, slots, layer, num_heads)
    places = (slots // BLOCK_SIZE, layer, slice(None), slice(None), slots % BLOCK_SIZE)
    own, other = cache.data[places], given[places]  # [tokens, key/value, head, dim]
    off = np.linalg.norm(own - other, axis=-1) / np.linalg.norm(own, axis=-1)
    assert np.median(off) < 1e-5 and off.max() < 0.1
    cache.data[places] = other


def numbers_of(folder: Path, takes_int8: Any) -> Numbers:
    """The values of a folder in float64; products with the weights that `takes_int8` names take
    groups of int8, others floats."""
    model = build_model(read_config(json.loads((folder / "config.json").read_text())))
    tensors = load_file(folder / "model.safetensors")
    weights: dict[str, Any] = {}
    for parameter in model.parameters():
        values = np.concatenate([tensors[name] for name, _ in parameter.parts]).astype(np.float64)
        if len(parameter.shape) == 2:
            kind = numpy_cpu.PackedWeight
            if takes_int8(parameter.name):
                kind = numpy_cpu.QuantizedWeight
            values = kind(values, is_paired=parameter.is_paired)
        weights[parameter.name] = values
    return Numbers(folder, weights)


def error(found: Array, expected: Array) -> float:
    """Of the tokens' logits, the median distance, in standard deviations."""
    return float(np.median(np.linalg.norm(found - expected, axis=1))) / float(
        np.linalg.norm(expected - expected.mean(), axis=1).mean()
    )


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", [name for name in MIXES if name != "floats among them"])
def test_logits_are_those_of_float64_on_the_same_numbers(models, name, kv_dtype):
    """The distance is measured by what rounding the inputs does. A number on the edge between two
    whole ones, or two of bfloat16, may fall to either side. Of inputs that changes some tokens'
    logits, never most; of keys and values it would change those of all tokens that follow, so the
    oracle goes on with the kernels'."""
    folder = models[name].folder
    got = native_run(models[name].checkpoint, kv_cache_dtype=kv_dtype)
    expected = numbers_of(folder, lambda name: True).logits(kv_dtype, got.kv)
    of_floats = numbers_of(folder, lambda name: False).logits("float32")
    assert np.isfinite(got.logits).all()
    rounding = error(expected, of_floats)
    assert 1e-3 < rounding < 0.1
    assert error(got.logits, expected) < rounding / 5000


@pytest.mark.parametrize("name", MIXES)
def test_logits_are_near_transformers_on_what_the_blocks_stand_for(models, name):
    oracle = transformers.LlamaForCausalLM.from_pretrained(models[name].folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.from_numpy(TOKEN_IDS.astype(np.int64))[None]).logits[0].numpy()
    got = native_logits(models[name].checkpoint)
    assert error(got, expected) < 0.08
    assert (got.argmax(1) == expected.argmax(1)).mean() > 0.85
    exact = native_logits(models[name].checkpoint, dtype="float32")
    np.testing.assert_allclose(exact, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_a_checkpoint_of_floats_is_quantized_when_it_is_loaded(models, asked):
    plain = Checkpoint(models["Q4_0"].folder, "huggingface")
    expected = native_logits(plain, dtype="float32")
    got = native_logits(plain, quantization=asked, dtype="float32")
    least, most = {"int8": (1e-3, 0.1), "int4": (0.1, 0.6)}[asked]
    assert least < error(got, expected) < most


@pytest.mark.parametrize(
    ("name", "config", "formats"),
    [
        ("Q4_1", {}, "Q4_1 + Q8_0 weights, int8 inputs, bfloat16 KV"),
        ("Q4_1", {"kv_cache_dtype": "int8"}, "Q4_1 + Q8_0 weights, int8 inputs, int8 KV"),
        ("Q4_1", {"dtype": "float32"}, "float32 weights, float32 inputs, float32 KV"),
        ("Q4_1", {"quantization": "int4"}, "Q4_1 + Q8_0 weights, int8 inputs, bfloat16 KV"),
        ("Q4_0", {"quantization": "int4"}, "Q4_0 weights, int8 inputs, bfloat16 KV"),
        ("Q4_K", {}, "Q4_K + Q6_K + Q5_K weights, int8 inputs, bfloat16 KV"),
    ],
)
def test_a_runner_says_in_which_formats_it_computes(models, name, config, formats):
    config = {"dtype": "bfloat16", "ops": "native"} | config
    runner, info = load_runner(models[name].checkpoint, **config)
    assert info.formats == formats
    runner.close()


def test_a_float_among_quantized_parts_is_quantized_and_a_matrix_of_floats_is_not(models):
    runner, info = load_runner(
        models["floats among them"].checkpoint, ops="native", dtype="float32", quantization="auto"
    )
    assert info.formats == "float32 weights, float32 inputs, float32 KV"
    runner.close()
    runner, info = load_runner(
        models["floats among them"].checkpoint, ops="native", dtype="bfloat16"
    )
    assert info.formats.startswith("Q8_0 + bfloat16 weights, ")
    runner.close()


def test_a_quantized_checkpoint_is_not_quantized_again(models):
    with pytest.raises(ConfigError, match="--quantization int8: expected a checkpoint of floats"):
        load_runner(models["Q4_1"].checkpoint, ops="native", quantization="int8")


def test_torch_computes_with_what_the_blocks_stand_for(models):
    runner, info = load_runner(models["Q4_K"].checkpoint, ops="reference")
    assert info.formats == "float32 weights, float32 inputs, float32 KV"
    runner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [1, 16, 17])
def test_a_block_is_as_large_as_the_plan_says(models, dtype, block_size):
    runner, info = load_runner(
        models["Q4_0"].checkpoint, ops="native", kv_cache_dtype=dtype, block_size=block_size
    )
    cache = runner._parts.loaded.cache
    assert cache.block_bytes == runner._parts.loaded.plan.block_bytes
    assert info.kv_bytes_per_token >= 2 * kv_token_bytes(2, 32, dtype)
    if block_size == 16:
        assert cache.block_bytes == 2 * 16 * kv_token_bytes(2, 32, dtype)
    runner.close()
