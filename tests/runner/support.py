"""What the tests of runners share: requests, their oracle, and steps written by hand."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from drive import request
from msgspec import structs

from streamkv.protocol import RowAdded, RowSampling, StepInput, pack_ints

RUNNERS = {
    "torch": {"ops": "reference"},
    "program": {"ops": "native"},
    "eager": {"ops": "native", "enforce_eager": True},
}
VOCAB_SIZE = 339
NUM_TOKENS = 12


def prompts() -> list[list[int]]:
    """Lengths 1 to 60; some share their beginning."""
    generator = np.random.default_rng(5)
    shared = generator.integers(3, VOCAB_SIZE, 40).tolist()
    lengths = (1, 2, 3, 5, 8, 13, 16, 17, 31, 40, 60)
    found = [generator.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    return found + [shared[:32] + prompt for prompt in found[:4]] + [shared]


def resident_bytes() -> int:
    """Memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def greedy(oracle, prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            token_ids.append(int(oracle(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def tokens_of(results) -> list[list[int]]:
    return [choice.token_ids for choices in results.values() for choice in choices]


def greedy_requests():
    return [request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts())]


def sampled_requests():
    """Every parameter that the sampler knows, in several mixes."""
    mixes = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "n": 3},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "logprobs": 3},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -100.0}, "logprobs": 0},
        {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": [7, 8]},
    ]
    return [
        request(str(index), prompt, NUM_TOKENS, seed=index, **mixes[index % len(mixes)])
        for index, prompt in enumerate(prompts())
    ]


GREEDY = RowSampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    seed=0,
    choice=0,
    min_tokens=0,
    num_logprobs=-1,
    min_tokens_stop_ids=b"",
    bias_ids=b"",
    bias_values=b"",
)


def mask_words(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """A grammar's mask that allows these: int32 words, token i is bit i % 32 of word i // 32."""
    words = [0] * -(-vocab_size // 32)
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
    return np.array(words, np.uint32).view(np.int32)


def row_added(
    row: int, tokens: Sequence[int], blocks: Iterable[int], num_prompt_tokens: int, **sampling
) -> RowAdded:
    """Greedy unless `sampling` says otherwise."""
    fields = structs.replace(GREEDY, **sampling)
    return RowAdded(row, num_prompt_tokens, pack_ints(tokens), pack_ints(blocks), fields)


def step(step_id: int, scheduled=(), *, removed=(), added=(), appended=(), copies=()) -> StepInput:
    """`added`: RowAdded, or (row, token ids, block ids) of a greedy row."""
    return StepInput(
        step_id=step_id,
        removed=pack_ints(removed),
        added=tuple(
            one if isinstance(one, RowAdded) else row_added(*one, len(one[1])) for one in added
        ),
        appended=pack_ints(value for pair in appended for value in pair),
        scheduled=pack_ints(value for entry in scheduled for value in entry),
        copies=pack_ints(value for copy in copies for value in copy),
    )
