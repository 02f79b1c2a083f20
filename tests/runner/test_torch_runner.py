"""What is the torch runner's alone: a kernel that fails, threads, and GPUs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drive import load_runner, run_requests
from runner.support import (
    NUM_TOKENS,
    greedy,
    greedy_requests,
    prompts,
    sampled_requests,
    step,
    tokens_of,
)

from streamkv.ops.reference import REFERENCE
from streamkv.protocol import Ask, FinishReason, unpack_ints


def test_an_error_under_overlap_leaves_the_step_sent_ahead_and_other_rows_alone(folder, oracle):
    """A kernel fails once, as when memory runs out; the next step was planned before that."""
    failures = [RuntimeError("out of memory:\ntried to\nallocate")]

    def linear_silu_mul(x, weight, bias):
        if failures and len(x) == 13:
            raise failures.pop()
        return REFERENCE.linear_silu_mul(x, weight, bias)

    runner, _ = load_runner(folder)
    runner._loaded.ops._kernels = dataclasses.replace(REFERENCE, linear_silu_mul=linear_silu_mul)
    healthy, prompt = prompts()[4], prompts()[5]
    runner.step(step(0, [(0, 0, len(healthy), Ask.SAMPLE)], added=[(0, healthy, [0, 1])]))
    failed = runner.step(step(1, [(1, 0, 13, Ask.SAMPLE)], added=[(1, prompt, [2])]))
    assert failed.error == "RuntimeError: out of memory: tried to allocate"
    assert failed.sampled == b"" and failed.step_id == 1
    ahead = runner.step(step(2, [(0, 8, 1, Ask.SAMPLE), (1, 13, 1, Ask.SAMPLE)]))
    assert ahead.error == "" and unpack_ints(ahead.sampled)[0] == greedy(oracle, healthy, 2)[1]
    again = runner.step(step(3, [(1, 0, 13, Ask.SAMPLE)], removed=[1], added=[(1, prompt, [2])]))
    assert [*unpack_ints(again.sampled)] == greedy(oracle, prompt, 1)


def test_threads_are_torchs_only_if_somebody_chose_them(folder):
    before = torch.get_num_threads()
    try:
        load_runner(folder)
        assert torch.get_num_threads() == before
        load_runner(folder, threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_generates_what_transformers_does(folder, oracle, dtype):
    """Everything on the device: mixed chunks and decodes, filters, penalties, logprobs."""
    expected = [greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts()]
    runner, info = load_runner(folder, device="cuda", dtype=dtype)
    assert info.device.startswith("cuda") and info.dtype == dtype
    found = tokens_of(run_requests(runner, info, greedy_requests(), max_num_batched_tokens=64))
    if dtype == "float32":
        assert found == expected
    first_equal = sum(a[0] == b[0] for a, b in zip(found, expected, strict=True))
    assert first_equal >= len(expected) - 3
    for choices in run_requests(runner, info, sampled_requests()).values():
        for choice in choices:
            assert len(choice.token_ids) == NUM_TOKENS
            assert choice.finish_reason == FinishReason.LENGTH
    runner.close()
