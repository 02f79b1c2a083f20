"""Tiny random Llamas in plain torch against transformers, logits at every position."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny import save_tiny_checkpoint

import streamkv.models
from streamkv.errors import ModelLoadError
from streamkv.models import ModelConfig, build_model
from streamkv.models.llama import LlamaForCausalLM
from streamkv.ops import Batch
from streamkv.ops.reference import REFERENCE
from streamkv.runner.torch_ops import TorchOps

VARIANTS = {
    "grouped-tied": {},
    "untied": {"tie_word_embeddings": False},
    "one-kv-head": {"num_key_value_heads": 1},
    "a-kv-head-per-head": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "narrow-heads": {"head_dim": 8},
    "wide-heads": {"head_dim": 32},
    "three-layers": {"num_hidden_layers": 3, "rms_norm_eps": 1e-3},
    "other-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn-rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def config_dict(**changes) -> dict:
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4).to_dict()
    return config | {"architectures": ["LlamaForCausalLM"]} | changes


def build(folder: Path, dtype: torch.dtype) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """The model of a folder, and its tensors by parameter name."""
    model = build_model(ModelConfig.from_dict(json.loads((folder / "config.json").read_text())))
    tensors = load_file(folder / "model.safetensors")
    weights = {
        parameter.name: torch.cat([tensors[name] for name, _ in parameter.parts]).to(dtype)
        for parameter in model.parameters()
    }
    return model, weights


def all_logits(
    folder: Path,
    token_ids: torch.Tensor,
    chunks: list[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits of every position, [T, vocab_size], computed in chunks through scattered blocks."""
    model, weights = build(folder, dtype)
    config, block_size = model.config, 4
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    shape = (40, config.num_hidden_layers, 2, config.num_key_value_heads, 4, config.head_dim)
    kv_cache = torch.full(shape, float("nan"), dtype=dtype)
    ops = TorchOps(REFERENCE, weights, kv_cache, max_model_len=50)
    found = []
    for start, end in zip([0, *chunks], [*chunks, len(token_ids)], strict=True):
        positions = torch.arange(start, end, dtype=torch.int32)
        batch = Batch(
            token_ids=token_ids[start:end].int(),
            positions=positions,
            slots=blocks[positions // block_size] * block_size + positions % block_size,
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=blocks[None, : -(-end // block_size)].contiguous(),
            logit_rows=positions - start,
        )
        found.append(model.logits(ops, model.forward(ops, batch)))
    return torch.cat(found)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_transformers(tmp_path, variant):
    folder = save_tiny_checkpoint(tmp_path, **({"head_dim": 16} | VARIANTS[variant]))
    oracle = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    randomize_biases(oracle, folder)
    token_ids = torch.randint(0, 339, (50,), generator=torch.Generator().manual_seed(0))
    expected = oracle(token_ids[None]).logits[0]
    for chunks in ([], [7, 8, 33]):
        logits = all_logits(folder, token_ids, chunks)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_bfloat16_is_close_to_float32_and_its_logits_are_float32(tmp_path):
    folder = save_tiny_checkpoint(tmp_path, head_dim=16)
    token_ids = torch.randint(0, 339, (50,), generator=torch.Generator().manual_seed(0))
    exact = all_logits(folder, token_ids, [])
    rounded = all_logits(folder, token_ids, [20], dtype=torch.bfloat16)
    assert rounded.dtype is torch.float32
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).abs().mean() < 0.05 * exact.abs().mean()


@torch.inference_mode()
def test_only_rows_that_want_logits_get_them_and_all_tokens_are_stored(tmp_path):
    model, weights = build(save_tiny_checkpoint(tmp_path, head_dim=16), torch.float32)
    caches, hidden = [], []
    for wanted in ([0, 1, 2, 3, 4], [3, 1], []):
        caches.append(torch.zeros(2, 2, 2, 2, 4, 16))
        ops = TorchOps(REFERENCE, weights, caches[-1], max_model_len=8)
        positions = torch.arange(5, dtype=torch.int32)
        batch = Batch(
            token_ids=positions + 7,
            positions=positions,
            slots=positions,
            query_start=torch.tensor([0, 5], dtype=torch.int32),
            context_lens=torch.tensor([5], dtype=torch.int32),
            block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
            logit_rows=torch.tensor(wanted, dtype=torch.int32),
        )
        hidden.append(model.forward(ops, batch))
    torch.testing.assert_close(hidden[1], hidden[0][[3, 1]])
    assert hidden[2].shape == (0, 32)
    assert torch.equal(caches[1], caches[0]) and torch.equal(caches[2], caches[0])


def randomize_biases(model, folder: Path) -> None:
    """transformers starts biases at zero, which would hide a missing one; save others instead."""
    biases = [weight for name, weight in model.named_parameters() if name.endswith(".bias")]
    generator = torch.Generator().manual_seed(2)
    for bias in biases:
        bias.copy_(torch.randn(bias.shape, generator=generator))
    if biases:
        model.save_pretrained(folder)


def test_a_model_lists_each_weight_once_and_is_built_without_torch():
    model = build_model(ModelConfig.from_dict(config_dict(attention_bias=True)))
    names = [name for parameter in model.parameters() for name, _ in parameter.parts]
    assert len(names) == len(set(names))
    with torch.device("meta"):
        oracle = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, attention_bias=True)
        )
    assert set(names) == {name for name, _ in oracle.named_parameters()}
    for path in Path(streamkv.models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "torch" for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "torch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_a_config_that_cannot_be_computed_exactly_is_refused(changes, message):
    with pytest.raises(ModelLoadError) as caught:
        build_model(ModelConfig.from_dict(config_dict(**changes)))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_rope_theta_is_read_where_old_and_new_configs_keep_it():
    old = config_dict(rope_theta=5e5)
    del old["rope_parameters"]
    new = config_dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    assert ModelConfig.from_dict(old).rope.theta == 5e5
