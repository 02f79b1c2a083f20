"""A context of 32,768 tokens, by yarn, against transformers in float32, and the memory it takes.

The side that serves is a process without torch, so that its peak is what serving takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from runner.support import VOCAB_SIZE
from tiny import save_tiny_checkpoint

CONTEXT_LEN = 32768
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": CONTEXT_LEN // 8,
}
# Beginnings of one text: the later ones find the earlier in the prefix cache. The last one's
# answer fills the context.
LENGTHS_AND_MAX_TOKENS = ((4090, 1), (17011, 1), (32760, 8))
STEP_TOKENS = 2048  # so a prompt is computed in chunks
ORACLE_CHUNK = 512  # and in these by transformers, whose scores are in memory at once

SERVE = """
import json, sys
from pathlib import Path
from drive import build_scheduler, load_runner, request, run_requests
from streamkv.protocol import unpack_ints

def status(name):
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if name in x]
    return int(line.split()[1]) * 1024

folder, asked_path, answer_path = map(Path, sys.argv[1:])
asked = json.loads(asked_path.read_text())
budget = asked["max_num_batched_tokens"]
runner, info = load_runner(
    folder,
    ops="native",
    threads=2,
    max_num_seqs=2,
    max_num_batched_tokens=budget,
    num_gpu_blocks_override=2048,
)
scheduler = build_scheduler(info, max_num_seqs=2, max_num_batched_tokens=budget)
loaded_bytes = status("VmRSS")
answers = []
for length, max_tokens in asked["lengths_and_max_tokens"]:
    one = request(str(length), asked["prompt"][:length], max_tokens, logprobs=20)
    ((choice,),) = run_requests(runner, info, [one], scheduler=scheduler).values()
    for token_id, row in zip(choice.token_ids, choice.logprobs, strict=True):
        top_logprobs = [*memoryview(row.top_logprobs).cast("f")]
        answers.append((token_id, row.logprob, [*unpack_ints(row.top_ids)], top_logprobs))
answer = {
    "answers": answers,
    "num_prefix_hit_tokens": scheduler.num_prefix_hit_tokens,
    "context_len": info.max_model_len,
    "weight_bytes": info.weight_bytes,
    "kv_bytes": info.num_blocks * info.block_size * info.kv_bytes_per_token,
    "loaded_bytes": loaded_bytes,
    "peak_bytes": status("VmHWM"),
}
answer_path.write_text(json.dumps(answer))
heavy = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


def expected_logprobs(folder: Path, prompt: list[int]) -> list[torch.Tensor]:
    """transformers', over the vocabulary, of each token that is asked for, in the order asked."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = transformers.DynamicCache(config=model.config)

    def logprobs_after(token_ids: list[int]) -> torch.Tensor:
        output = model(torch.tensor([token_ids]), None, None, cache, logits_to_keep=1)
        return output.logits[0, -1].log_softmax(-1)

    found, start = [], 0
    with torch.inference_mode():
        for length, max_tokens in LENGTHS_AND_MAX_TOKENS:
            while start < length:
                end = min(start + ORACLE_CHUNK, length)
                logprobs = logprobs_after(prompt[start:end])
                start = end
            found.append(logprobs)
            for _ in range(max_tokens - 1):
                found.append(logprobs_after([int(found[-1].argmax())]))
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_full_context_of_32768_equals_transformers_in_little_memory(tmp_path):
    length = LENGTHS_AND_MAX_TOKENS[-1][0]
    prompt = np.random.default_rng(3).integers(3, VOCAB_SIZE, length).tolist()
    folder = save_tiny_checkpoint(
        tmp_path / "tiny",
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT_LEN,
        rope_parameters=YARN,
    )
    asked = {
        "prompt": prompt,
        "lengths_and_max_tokens": LENGTHS_AND_MAX_TOKENS,
        "max_num_batched_tokens": STEP_TOKENS,
    }
    answer = serve(folder, asked, tmp_path)
    assert answer["context_len"] == CONTEXT_LEN
    # To the token; but the last prompt needs all blocks, and none is left to copy part of one to.
    assert answer["num_prefix_hit_tokens"] == 4090 + 17008
    for (token_id, logprob, top_ids, top_logprobs), row in zip(
        answer["answers"], expected_logprobs(folder, prompt), strict=True
    ):
        assert token_id == top_ids[0] == int(row.argmax())
        np.testing.assert_allclose(logprob, float(row[token_id]), atol=5e-4, rtol=0)
        np.testing.assert_allclose(top_logprobs, row[top_ids], atol=5e-4, rtol=0)
        np.testing.assert_allclose(top_logprobs, row.topk(20).values, atol=5e-4, rtol=0)
    assert answer["peak_bytes"] - answer["loaded_bytes"] > 0.9 * answer["kv_bytes"], "it was used"
    assert answer["peak_bytes"] < answer["weight_bytes"] + answer["kv_bytes"] + 250e6


def serve(folder: Path, asked: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    asked_path, answer_path = tmp_path / "asked.json", tmp_path / "answer.json"
    asked_path.write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SERVE, folder, asked_path, answer_path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(answer_path.read_text())
