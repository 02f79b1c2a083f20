"""The default model against transformers in float32: same weights, read by other code."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
import transformers
from drive import load_runner, request, run_requests
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

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


def test_bfloat16_is_close_to_float32(default_checkpoint, prompts):
    """The default dtype: the same model within rounding, at the first token of every prompt."""
    distributions = []
    for dtype in ("bfloat16", "float32"):
        runner, info = load_runner(default_checkpoint, dtype=dtype, ops="native")
        requests = [
            request(str(index), prompt, 1, logprobs=5) for index, prompt in enumerate(prompts)
        ]
        assert info.dtype == dtype
        results = run_requests(runner, info, requests)
        distributions.append([results[one.request_id][0].logprobs[0] for one in requests])
        runner.close()
    likeliest_equal = 0
    for rounded, exact in zip(*distributions, strict=True):
        assert math.isclose(rounded.logprob, exact.logprob, abs_tol=0.5)
        likeliest_equal += rounded.top_ids[:4] == exact.top_ids[:4]
    assert likeliest_equal >= len(prompts) - 2
