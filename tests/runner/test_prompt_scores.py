"""Log-probabilities of a prompt's tokens, through real steps, against transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from drive import load_runner
from runner.support import RUNNERS, VOCAB_SIZE, greedy, prompts, row_added, step
from safetensors.torch import load_file, save_file
from tiny import save_tiny_checkpoint

from streamkv.protocol import MAX_SCORED, Ask, RowLogprobs, unpack_ints

BOTH = Ask.SAMPLE | Ask.SCORE
PROMPT = prompts()[10]  # 60 tokens


@pytest.fixture(params=RUNNERS)
def kind(request) -> dict:
    """What `load_runner` builds this kind of runner from."""
    return RUNNERS[request.param]


def check(
    scored: Sequence[RowLogprobs], oracle: Any, token_ids: list[int], num_top: int, first: int = 1
) -> None:
    """Of the tokens of a text from `first` on."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([token_ids])).logits[0].double()
    expected = logits.log_softmax(dim=-1).numpy()
    for position, one in enumerate(scored, first):
        row, token_id = expected[position - 1], token_ids[position]
        assert one.logprob == pytest.approx(row[token_id], abs=1e-4)
        # Log-probabilities a rounding error apart may be equal.
        assert (row > row[token_id] + 1e-4).sum() < one.rank
        assert one.rank <= (row > row[token_id] - 1e-4).sum() + 1
        top = np.frombuffer(one.top_ids, np.int32)
        values = np.frombuffer(one.top_logprobs, np.float32)
        assert len(top) == len(values) == min(num_top, VOCAB_SIZE)
        np.testing.assert_allclose(values, row[top], atol=1e-4)
        np.testing.assert_allclose(values, np.sort(row)[::-1][: len(top)], atol=1e-4)


def score(runner: Any, chunks: Sequence[int], num_top: int) -> tuple[list[RowLogprobs], list[int]]:
    """The prompt in chunks of such sizes; its scores, and the token after it."""
    blocks = [0, 1, 2, 3]
    added = [row_added(0, PROMPT, blocks, len(PROMPT), num_prompt_logprobs=num_top)]
    scored: list[RowLogprobs] = []
    start = 0
    for index, count in enumerate(chunks):
        end = start + count
        ask = BOTH if end == len(PROMPT) else Ask.SCORE
        output = runner.step(
            step(index, [(0, start, count, ask)], added=added if index == 0 else ())
        )
        assert (output.error, output.failed, output.logprobs) == ("", b"", ())
        assert len(output.scored) == min(count, len(PROMPT) - 1 - start)
        scored += output.scored
        start = end
    runner.step(step(99, removed=[0]))
    return scored, [*unpack_ints(output.sampled)]


def chunkings() -> list[list[int]]:
    rng = random.Random(2)
    found = [[60], [7] * 8 + [4], [1] * 60, [59, 1], [1, 59]]
    for _ in range(4):
        cuts = sorted(rng.sample(range(1, 60), 6))
        ends = zip([0, *cuts], [*cuts, 60], strict=True)
        found.append([end - start for start, end in ends])
    return found


@pytest.mark.parametrize("num_top", [0, 3, 400])
def test_scores_are_transformers_log_softmax_however_the_prompt_is_cut(
    folder, oracle, kind, num_top
):
    runner, _ = load_runner(folder, block_size=16, **kind)
    expected = greedy(oracle, PROMPT, 1)
    is_native = kind["ops"] == "native"
    cuts = chunkings() if is_native else chunkings()[:2]
    answers = [score(runner, chunks, num_top) for chunks in cuts]
    for scored, sampled in answers:
        assert len(scored) == 59 and sampled == expected
        check(scored, oracle, PROMPT, num_top)
        assert scored == answers[0][0] or not is_native, "not a bit depends on the cut"


def test_the_rows_of_a_step_are_scored_in_its_order_and_only_what_is_prompt(folder, oracle, kind):
    """One that was preempted has an answer already; one wants no scores; one is done with them."""
    runner, _ = load_runner(folder, block_size=64, **kind)
    texts = [prompts()[5], prompts()[6], prompts()[7]]
    answer = greedy(oracle, texts[0], 4)
    rows = [
        row_added(3, [*texts[0], *answer], [0], len(texts[0]), num_prompt_logprobs=1),
        row_added(1, texts[1], [1], len(texts[1])),
        row_added(2, texts[2], [2], len(texts[2]), num_prompt_logprobs=2),
    ]
    scheduled = [
        (2, 0, 10, Ask.SCORE),
        (1, 0, len(texts[1]), Ask.SAMPLE),
        (3, 0, len(texts[0]) + 4, BOTH),
    ]
    output = runner.step(step(0, scheduled, added=rows))
    assert output.error == ""
    sampled = [greedy(oracle, texts[1], 1)[0], greedy(oracle, texts[0], 5)[4]]
    assert [*unpack_ints(output.sampled)] == sampled
    num_first = len(texts[0]) - 1
    assert len(output.scored) == 10 + num_first
    check(output.scored[:10], oracle, texts[2], 2)
    check(output.scored[10:], oracle, texts[0], 1)

    rest = len(texts[2]) - 10
    ask = [(3, len(texts[0]) + 4, 1, BOTH), (2, 10, rest, BOTH)]
    output = runner.step(step(1, ask))
    assert output.error == "" and len(output.scored) == rest - 1
    check(output.scored, oracle, texts[2], 2, first=11)
    assert [*unpack_ints(output.sampled)] == [
        greedy(oracle, texts[0], 6)[5],
        greedy(oracle, texts[2], 1)[0],
    ]


def test_the_largest_step_has_all_rows_and_all_scores(folder, kind):
    """Each takes a row of logits, for which there is memory; one more is an error."""
    runner, _ = load_runner(folder, max_num_seqs=2, block_size=128, **kind)
    prompt = [5] * 100
    rows = [row_added(row, prompt, [row], 100, num_prompt_logprobs=0) for row in (0, 1)]
    runner.step(step(0, [(0, 0, 67, 0), (1, 0, 67, 0)], added=rows))
    too_many = runner.step(step(1, [(0, 67, 33, BOTH), (1, 66, 34, BOTH)]))
    assert "expected at most 64 tokens of prompts to score in a step, got 65" in too_many.error
    output = runner.step(step(2, [(0, 67, 33, BOTH), (1, 67, 33, BOTH)]))
    assert output.error == ""
    assert (len(output.sampled), len(output.scored)) == (8, MAX_SCORED)


def test_a_token_with_logits_that_are_no_numbers_has_rank_0_and_its_row_fails(tmp_path, kind):
    broken = save_tiny_checkpoint(tmp_path, head_dim=16, tie_word_embeddings=False)
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][3] = math.nan
    save_file(weights, broken / "model.safetensors")
    runner, _ = load_runner(broken, **kind)
    rows = [
        row_added(0, [5, 6, 3, 7, 8], [0], 5, num_prompt_logprobs=2),
        row_added(1, [5, 6, 9, 7, 8], [1], 5, num_prompt_logprobs=2),
    ]
    begun = runner.step(step(0, [(0, 0, 2, Ask.SCORE), (1, 0, 2, Ask.SCORE)], added=rows))
    assert begun.scored[0] == begun.scored[2], "of the same token after the same"
    output = runner.step(step(1, [(0, 2, 3, BOTH), (1, 2, 3, BOTH)]))
    assert output.error == "" and [*unpack_ints(output.failed)] == [0]
    assert output.scored[:2] == (RowLogprobs(0.0, 0, b"", b""),) * 2
    for one in (*begun.scored, *output.scored[2:]):
        assert one.rank > 0 and one.logprob < 0 and len(one.top_ids) == 8
