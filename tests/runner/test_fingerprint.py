"""Keys and values kept on disk are found again by the runner that would compute the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from drive import load_runner
from safetensors.torch import load_file, save_file

from streamkv import _cpu
from streamkv.ops.extension import load_extension
from streamkv.runner.fingerprint import PIECE_BYTES, kv_fingerprint

NATIVE = {"ops": "native", "threads": 2, "max_num_seqs": 4}


def fingerprint(folder: Path, **config) -> str:
    runner, _ = load_runner(folder, **(NATIVE | config))
    try:
        return runner._parts.loaded.fingerprint()
    finally:
        runner.close()


@pytest.fixture
def changed(folder, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(folder, tmp_path / "changed"))


def test_what_changes_no_bit_changes_no_digest(folder, changed):
    own = fingerprint(folder)
    assert len(own) == 64
    for config in (
        {},
        {"threads": 1},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 20, "max_model_len": 30, "max_num_seqs": 2},
        {"swap_space": 0.001},
    ):
        assert fingerprint(folder, **config) == own, config
    assert fingerprint(changed) == own, "another path"


def test_each_format_and_size_has_its_own(folder, default_checkpoint):
    floats = [
        {},
        {"block_size": 8},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "bfloat16"},
    ]
    assert len({fingerprint(folder, **config) for config in floats}) == len(floats)
    own = [
        fingerprint(default_checkpoint, dtype="bfloat16", quantization=asked)
        for asked in ("auto", "auto", "none")
    ]
    assert own[0] == own[1] != own[2]


@pytest.mark.parametrize(
    "tensor",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
def test_one_other_number_in_the_weights_is_another_model(folder, changed, tensor):
    weights = load_file(changed / "model.safetensors")
    weights[tensor].view(-1)[-1] += 0.5
    save_file(weights, changed / "model.safetensors")
    assert fingerprint(changed) != fingerprint(folder)


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 5000.0), ("rms_norm_eps", 1e-3)])
def test_another_config_is_another_model(folder, changed, key, value):
    config = json.loads((changed / "config.json").read_text())
    for part in (config, config.get("rope_parameters") or {}):
        if key in part or part is config:
            part[key] = value
    (changed / "config.json").write_text(json.dumps(config))
    assert fingerprint(changed) != fingerprint(folder)


def test_other_kernels_are_another_model(folder, monkeypatch):
    own = fingerprint(folder)
    with monkeypatch.context() as patched:
        patched.setattr(_cpu, "KERNEL_REVISION", _cpu.KERNEL_REVISION + 1)
        assert fingerprint(folder) != own
    assert fingerprint(folder) == own
    before = load_extension().isa()
    try:
        for isa in set(_cpu.available_isas()) - {before}:
            _cpu.set_isa(isa)
            assert fingerprint(folder) != own, isa
    finally:
        _cpu.set_isa(before)


def test_all_bytes_count_and_so_does_where_they_end():
    big = np.arange(PIECE_BYTES + 3, dtype=np.int64).view(np.uint8)
    own = kv_fingerprint({"a": 1}, {"x": [big.data], "y": [big[:5].data]}, 2)
    assert kv_fingerprint({"a": 1}, {"y": [big[:5].data], "x": [big.data]}, 1) == own
    for place in (0, PIECE_BYTES - 1, PIECE_BYTES, len(big) - 1):
        other = big.copy()
        other[place] ^= 1
        assert kv_fingerprint({"a": 1}, {"x": [other.data], "y": [big[:5].data]}, 2) != own
    for facts, weights in (
        ({"a": 2}, {"x": [big.data], "y": [big[:5].data]}),
        ({"a": 1}, {"x": [big.data, big[:5].data]}),
        ({"a": 1}, {"x": [big[:-5].data], "y": [big[:5].data]}),
        ({"a": 1}, {"x": [big.data], "z": [big[:5].data]}),
    ):
        assert kv_fingerprint(facts, weights, 2) != own
