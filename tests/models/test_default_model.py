"""The default model against transformers in float32: same weights, read by other code."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from drive import load_runner, request, run_requests
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from streamkv.protocol import RunnerInfo
from streamkv.text.tokenizer import Tokenizer
from streamkv.weights.gguf import GGUFFile

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Die Hauptstadt von Österreich ist",
    "日本の首都は",
    "Q: How many legs does a spider have?\nA:",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer in one word.<|im_end|>\n<|im_start|>user\nIs water wet?"
    "<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, count(*) FROM orders",
    "The mitochondria is the powerhouse of the cell. " * 6,
    "import numpy as np\n\ndef softmax(x):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "🙂🙃🙂🙃",
    "To be, or not to be, that is",
    "a",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "\n\n\n",
    "Water boils at 100 degrees Celsius, which in Fahrenheit is",
    "<html>\n<head>\n<title>",
)


@pytest.fixture(scope="module")
def prompts(default_checkpoint) -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(GGUFFile(default_checkpoint.path).metadata)
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def oracle(default_checkpoint) -> transformers.LlamaForCausalLM:
    """transformers' model, its tensors read by the gguf package and reordered by transformers."""
    reader = gguf.GGUFReader(default_checkpoint.path)
    facts = {key: field.contents() for key, field in reader.fields.items() if "llama." in key}
    heads = {
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
    }
    config = transformers.LlamaConfig(
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=facts["llama.rope.freq_base"],
        tie_word_embeddings=True,
        **heads,
    )
    processor = LlamaTensorProcessor(config=heads)
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = processor.process(values, tensor.name).weights
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = names.get_name(name, try_suffixes=(".weight",))
            parameter.copy_(torch.from_numpy(tensors.pop(own).copy()))
    assert not tensors
    return model.eval()


@pytest.mark.timeout(300)  # 20 prompts and a second implementation: seconds, unless cores are busy
@pytest.mark.parametrize(
    ("ops", "num_prompts", "num_tokens"), [("native", 20, 64), ("reference", 2, 4)]
)
def test_greedy_tokens_and_logprobs_equal_transformers(
    default_checkpoint, oracle, prompts, ops, num_prompts, num_tokens
):
    """One forward over prompt + output checks every greedy choice: each must be its argmax."""
    runner, info = load_runner(default_checkpoint, ops=ops)
    requests = [
        request(str(index), prompt, num_tokens, logprobs=20)
        for index, prompt in enumerate(prompts[:num_prompts])
    ]
    results = run_requests(runner, info, requests, max_num_batched_tokens=256)
    runner.close()
    for one in requests:
        (generated,) = results[one.request_id]
        assert len(generated.token_ids) == num_tokens
        prompt_len = len(one.prompt_token_ids)
        token_ids = torch.tensor([*one.prompt_token_ids, *generated.token_ids])
        with torch.inference_mode():
            logits = oracle(token_ids[None, :-1], logits_to_keep=num_tokens).logits[0]
        assert token_ids[prompt_len:].tolist() == logits.argmax(dim=-1).tolist()
        expected = logits.log_softmax(dim=-1)  # [num_tokens, vocab_size]
        for position, found in enumerate(generated.logprobs):
            ids = torch.from_numpy(np.frombuffer(found.top_ids, np.int32).copy()).long()
            values = torch.from_numpy(np.frombuffer(found.top_logprobs, np.float32).copy())
            assert found.rank == 1 and ids[0] == generated.token_ids[position]
            torch.testing.assert_close(values, expected[position][ids], atol=1e-4, rtol=0)


def first_token_logprobs(runner: Any, info: RunnerInfo, prompts: list[list[int]]) -> list[Any]:
    requests = [request(str(index), prompt, 1, logprobs=5) for index, prompt in enumerate(prompts)]
    results = run_requests(runner, info, requests)
    runner.close()
    return [results[one.request_id][0].logprobs[0] for one in requests]


@pytest.fixture(scope="module")
def exact(default_checkpoint, prompts) -> list[Any]:
    """float32 throughout, which equals transformers."""
    return first_token_logprobs(*load_runner(default_checkpoint, ops="native"), prompts)


@pytest.mark.parametrize(
    ("config", "formats", "far", "num_equal"),
    [
        ({"quantization": "none"}, "bfloat16 weights, ", 0.1, 19),
        ({}, "Q4_1 + Q8_0 weights, int8 inputs, bfloat16 KV", 0.4, 17),
        ({"kv_cache_dtype": "int8"}, "Q4_1 + Q8_0 weights, int8 inputs, int8 KV", 0.6, 17),
    ],
    ids=["bfloat16", "default", "int8 KV"],
)
def test_rounding_leaves_the_first_tokens_close_to_float32(
    default_checkpoint, prompts, exact, config, formats, far, num_equal
):
    """The same weights, which the file has in 4 and 8 bits: what is lost is in inputs, keys and
    values, and in weights where they are widened to bfloat16. Measured: 0.03, 0.16 and 0.26 at
    most; the four likeliest tokens in the same order for 20, 19 and 20 prompts of 20."""
    runner, info = load_runner(default_checkpoint, dtype="auto", ops="native", **config)
    assert info.dtype == "bfloat16"
    assert info.formats.startswith(formats)
    found = first_token_logprobs(runner, info, prompts)
    distances = [abs(a.logprob - b.logprob) for a, b in zip(found, exact, strict=True)]
    assert 1e-3 < max(distances) < far
    same = [a.top_ids[:4] == b.top_ids[:4] for a, b in zip(found, exact, strict=True)]
    assert sum(same) >= num_equal
