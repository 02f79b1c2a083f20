"""transformers' beam search as the oracle of ours."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from streamkv.core.beam import BeamSearch, Hypothesis
from streamkv.protocol import RowLogprobs, pack_ints

# Much more than the sums of two implementations in float32 differ by.
NOISE = 2e-4


class Expected(NamedTuple):
    outputs: list[tuple[int, ...]]  # best first, each up to its end token
    scores: list[float]
    steps: tuple[torch.Tensor, ...]  # float32 [width, vocabulary]: what it had for its beams


def generate(
    model: Any,
    prompt: Sequence[int],
    *,
    width: int,
    end: Collection[int],
    max_tokens: int,
    penalty: float = 1.0,
    early: bool | str = False,
) -> Expected:
    """All `width` answers of transformers."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=sorted(end) or None,
        )
    outputs = found.sequences[:, len(prompt) :].tolist()
    return Expected(
        [_up_to_end(output, end) for output in outputs],
        found.sequences_scores.tolist(),
        found.scores,
    )


def _up_to_end(output: list[int], end: Collection[int]) -> tuple[int, ...]:
    lengths = [index + 1 for index, token_id in enumerate(output) if token_id in end]
    return tuple(output[: min(lengths, default=len(output))])


def tokens_of(answer: Hypothesis) -> tuple[int, ...]:
    return tuple(link.token_id for link in answer.links())


def replay(
    beams: BeamSearch, steps: Sequence[torch.Tensor], num_candidates: int
) -> list[list[tuple[int, int]]]:
    """Give it what transformers had for its beams, until either is done; what it chose. As long as
    that are the same beams, the candidates are theirs."""
    chosen = [[(0, 0)]]
    for step in steps:
        values, ids = step[: len(chosen[-1])].topk(num_candidates)
        chosen.append(
            beams.advance(
                [
                    RowLogprobs(one[0].item(), 1, pack_ints(some.tolist()), one.numpy().tobytes())
                    for one, some in zip(values, ids, strict=True)
                ]
            )
        )
        if beams.is_done:
            break
    return chosen


def is_decided(
    expected: Expected,
    *,
    width: int,
    end: Collection[int],
    max_tokens: int,
    penalty: float = 1.0,
    early: bool | str = False,
) -> bool:
    """Whether a little noise in the log-probabilities changes nothing: which beams go on, which
    are answers, when it stops, and in what order they are."""
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[object, list[tuple[int, ...]]]] = []
    for _ in range(4):
        beams = BeamSearch(
            width,
            num_return=width,
            length_penalty=penalty,
            early_stopping=early,
            end_token_ids=end,
            num_prompt_tokens=0,
            max_num_tokens=max_tokens,
        )
        noise = [torch.rand(step.shape, generator=generator) * NOISE for step in expected.steps]
        noisy = [step + some for step, some in zip(expected.steps, noise, strict=True)]
        chosen = replay(beams, noisy, width + len(end))
        found.append((chosen, [tokens_of(one) for one in beams.hypotheses()]))
    return all(one == (found[0][0], expected.outputs) for one in found)
