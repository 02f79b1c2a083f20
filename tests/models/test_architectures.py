"""Tiny random models of every architecture against transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from drive import load_runner, request, run_requests
from models.forward import all_logits, build
from tiny import save_tiny_checkpoint
from weights.gguf_files import save_gguf

from streamkv.errors import ConfigError
from streamkv.models import MODELS, build_model, read_config
from streamkv.ops import Batch
from streamkv.ops.reference import REFERENCE
from streamkv.runner.torch_ops import TorchOps
from streamkv.weights.hub import Checkpoint

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
ROPE_THETA = {"rope_type": "default", "rope_theta": 500000.0}

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"

VARIANTS = {
    "llama": (LLAMA, {}),
    "llama-untied": (LLAMA, {"tie_word_embeddings": False}),
    "llama-one-kv-head": (LLAMA, {"num_key_value_heads": 1}),
    "llama-a-kv-head-per-head": (LLAMA, {"num_key_value_heads": 4}),
    "llama-biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama-narrow-heads": (LLAMA, {"head_dim": 8}),
    "llama-wide-heads": (LLAMA, {"head_dim": 32}),
    "llama-three-layers": (LLAMA, {"num_hidden_layers": 3, "rms_norm_eps": 1e-3}),
    "llama-other-theta": (LLAMA, {"rope_parameters": ROPE_THETA}),
    "llama-linear-rope": (LLAMA, {"rope_parameters": ROPE_LINEAR}),
    "llama-llama3-rope": (LLAMA, {"rope_parameters": ROPE_LLAMA3}),
    "llama-yarn-rope": (LLAMA, {"rope_parameters": ROPE_YARN}),
    "mistral": (MISTRAL, {"sliding_window": None}),
    "mistral-untied": (MISTRAL, {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": (QWEN2, {}),
    "qwen2-untied-yarn": (QWEN2, {"tie_word_embeddings": False, "rope_parameters": ROPE_YARN}),
    "qwen3": (QWEN3, {}),
    "qwen3-eps": (QWEN3, {"rms_norm_eps": 1e-2}),
    "qwen3-biases": (QWEN3, {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen3-one-kv-head-yarn": (QWEN3, {"num_key_value_heads": 1, "rope_parameters": ROPE_YARN}),
}


def random_tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 339, (count,), generator=torch.Generator().manual_seed(0))


def oracle_of(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_transformers(tmp_path, variant):
    architecture, fields = VARIANTS[variant]
    folder = save_tiny_checkpoint(tmp_path, architecture=architecture, **{"head_dim": 16, **fields})
    token_ids = random_tokens(50)
    expected = oracle_of(folder)(token_ids[None]).logits[0]
    for chunks in ([], [7, 8, 33]):
        logits = all_logits(folder, token_ids, chunks)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


WINDOWS = {
    MISTRAL: {"sliding_window": 24},
    QWEN2: {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1},
    QWEN3: {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0},
}


@pytest.mark.parametrize("architecture", WINDOWS)
@torch.inference_mode()
def test_a_window_ends_the_context_and_up_to_there_changes_nothing(tmp_path, architecture):
    folder = save_tiny_checkpoint(
        tmp_path, architecture=architecture, head_dim=16, **WINDOWS[architecture]
    )
    longest = read_config(json.loads((folder / "config.json").read_text())).max_context_len
    assert longest == 24
    token_ids = random_tokens(40)
    expected = oracle_of(folder)(token_ids[None]).logits[0]
    same = torch.isclose(all_logits(folder, token_ids, []), expected, atol=1e-4, rtol=1e-4)
    assert same[:longest].all()
    assert not same[longest:].all(dim=-1).any()  # a token more would be another model's answer


def test_a_runner_says_that_a_window_ends_its_context(tmp_path, caplog):
    folder = save_tiny_checkpoint(tmp_path, architecture=MISTRAL, head_dim=16, sliding_window=24)
    with caplog.at_level("INFO"):
        runner, info = load_runner(folder, ops="native")
    runner.close()
    assert info.max_model_len == 24
    assert "the context is 24 tokens, not the checkpoint's 256" in caplog.text
    runner, _ = load_runner(folder, ops="native", max_model_len=24)
    runner.close()
    with pytest.raises(ConfigError, match="expected at most 24, .* window of its layers, got 25"):
        load_runner(folder, ops="native", max_model_len=25)


def save_in_form(form: str, architecture: str, path: Path) -> tuple[Path, Checkpoint]:
    """A folder that transformers reads, and the same model as `form` has it."""
    tied = form != "sharded"
    folder = save_tiny_checkpoint(
        path / "folder", architecture=architecture, head_dim=16, tie_word_embeddings=tied
    )
    if form == "gguf":
        return folder, Checkpoint(save_gguf(folder, path / "model.gguf"), "gguf")
    if form == "sharded":
        oracle_of(folder).save_pretrained(path / "shards", max_shard_size="40KB")
        assert len(list((path / "shards").glob("*.safetensors"))) > 2
        return folder, Checkpoint(path / "shards", "huggingface")
    return folder, Checkpoint(folder, "huggingface")


@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("folder", {"ops": "native"}),
        ("sharded", {"ops": "native"}),
        ("gguf", {"ops": "native"}),
        ("gguf", {"ops": "native", "enforce_eager": True}),
        ("folder", {"ops": "reference"}),
    ],
    ids=["folder", "sharded", "gguf", "gguf-eager", "folder-reference"],
)
@pytest.mark.parametrize("architecture", MODELS)
def test_greedy_tokens_and_logprobs_of_a_runner_equal_transformers(
    tmp_path, architecture, form, how
):
    folder, checkpoint = save_in_form(form, architecture, tmp_path)
    oracle = oracle_of(folder)
    prompts = [random_tokens(length).tolist() for length in (1, 7, 40)]
    requests = [request(str(i), prompt, 12, logprobs=3) for i, prompt in enumerate(prompts)]
    runner, info = load_runner(checkpoint, **how)
    results = run_requests(runner, info, requests, max_num_batched_tokens=16)
    runner.close()
    for index, prompt in enumerate(prompts):
        (generated,) = results[str(index)]
        token_ids = torch.tensor([*prompt, *generated.token_ids])
        with torch.inference_mode():
            logits = oracle(token_ids[None, :-1], logits_to_keep=12).logits[0]
        assert generated.token_ids == logits.argmax(dim=-1).tolist()
        expected = logits.log_softmax(dim=-1)
        for position, one in enumerate(generated.logprobs):
            top = torch.from_numpy(np.frombuffer(one.top_ids, np.int32).copy()).long()
            values = torch.from_numpy(np.frombuffer(one.top_logprobs, np.float32).copy())
            torch.testing.assert_close(values, expected[position][top], atol=2e-4, rtol=0)


@torch.inference_mode()
def test_bfloat16_is_close_to_float32_and_its_logits_are_float32(tmp_path):
    folder = save_tiny_checkpoint(tmp_path, head_dim=16)
    token_ids = random_tokens(50)
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


@pytest.mark.parametrize("name", MODELS)
def test_a_model_lists_each_of_transformers_weights_once(name):
    model_type = getattr(transformers, name)
    fields = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = model_type.config_class(**fields)
    if hasattr(config, "attention_bias"):
        config.attention_bias = True
    with torch.device("meta"):
        oracle = model_type(config)
    model = build_model(read_config(config.to_dict() | {"architectures": [name]}))
    names = [part for parameter in model.parameters() for part, _ in parameter.parts]
    assert sorted(names) == sorted(part for part, _ in oracle.named_parameters())
