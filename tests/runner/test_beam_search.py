"""Beam search by the whole engine: the answers of transformers' generate(num_beams).

Both compute the same weights in float32; where a difference in rounding could change an answer, a
prompt is left out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from beams import NOISE, Expected, generate, is_decided
from drive import build_scheduler, load_runner, request, run_requests
from runner.support import greedy, prompts, tokens_of

from streamkv import LLM, SamplingParams
from streamkv.protocol import FinishReason, Request, StepInput, StepOutput, unpack_ints

NUM_TOKENS = 14
BLOCK_SIZE = 4
EOS = frozenset({2, 0})
MIXES: list[dict[str, Any]] = [
    {"width": 4},
    {"width": 2, "penalty": 0.0, "early": True},
    {"width": 6, "penalty": 2.0, "early": "never"},
    {"width": 3, "penalty": -1.0},
    {"width": 5, "penalty": 0.5, "early": "never"},
    {"width": 1},
]


class Case(NamedTuple):
    """A prompt, how to answer it, and what transformers makes of it."""

    name: str
    prompt: list[int]
    mix: dict[str, Any]
    expected: Expected

    def sampling(self, stop_token_ids: list[int], num_return: int) -> dict[str, Any]:
        return {
            "use_beam_search": True,
            "best_of": self.mix["width"],
            "n": num_return,
            "length_penalty": self.mix.get("penalty", 1.0),
            "early_stopping": self.mix.get("early", False),
            "stop_token_ids": stop_token_ids,
        }

    def request(self, stop_token_ids: list[int], num_return: int) -> Request:
        sampling = self.sampling(stop_token_ids, num_return)
        return request(self.name, self.prompt, NUM_TOKENS, **sampling)


@pytest.fixture(scope="module")
def stop_token_ids(oracle) -> list[int]:
    """Some that the model often takes, so that answers have many lengths."""
    counts: Counter[int] = Counter()
    for prompt in prompts():
        counts.update(greedy(oracle, prompt, NUM_TOKENS)[3:])
    return [token_id for token_id, _ in counts.most_common(40)[::8]]


@pytest.fixture(scope="module")
def cases(oracle, stop_token_ids) -> list[Case]:
    end = EOS.union(stop_token_ids)
    found = []
    for index, prompt in enumerate([*prompts(), *(prompt[::-1] for prompt in prompts()[1:])]):
        mix = MIXES[index % len(MIXES)]
        if mix["width"] == 1:
            expected = greedy_answer(oracle, prompt, end)
        else:
            expected = generate(oracle, prompt, end=end, max_tokens=NUM_TOKENS, **mix)
        if is_decided(expected, end=end, max_tokens=NUM_TOKENS, **mix):
            found.append(Case(str(index), prompt, mix, expected))
    lengths = {len(output) for case in found for output in case.expected.outputs}
    assert len(found) >= 16 and len(lengths) >= 8, (len(found), lengths)
    return found


def greedy_answer(oracle, prompt, end) -> Expected:
    """With one beam, transformers' beam search is greedy."""
    with torch.inference_mode():
        steps = []
        output: list[int] = []
        while not output or (len(output) < NUM_TOKENS and output[-1] not in end):
            logits = oracle(torch.tensor([prompt + output])).logits[0, -1:]
            steps.append(logits.log_softmax(-1))
            output.append(int(logits.argmax()))
        total = sum(step[0, token].item() for step, token in zip(steps, output, strict=True))
    return Expected([tuple(output)], [total / len(output)], tuple(steps))


class Watch:
    """A runner that notes how many blocks are held when it gets a step, and its copies."""

    def __init__(self, runner, scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self.num_held_blocks = 0  # at most
        self.num_copies = 0

    def step(self, step: StepInput) -> StepOutput:
        self.num_held_blocks = max(self.num_held_blocks, self._scheduler.num_held_blocks)
        self.num_copies += len(unpack_ints(step.copies)) // 4
        return self._runner.step(step)


@pytest.fixture(scope="module")
def loaded(folder):
    runner, info = load_runner(folder, ops="native", block_size=BLOCK_SIZE, swap_space=0.01)
    yield runner, info
    runner.close()


def check(results, cases, stop_token_ids, num_return=None):
    for case in cases:
        width, penalty = case.mix["width"], case.mix.get("penalty", 1.0)
        given = [choice for choice in results[case.name] if choice.finish_reason is not None]
        assert len(given) == (num_return or width)
        outputs = case.expected.outputs[: num_return or width]
        assert [tuple(choice.token_ids) for choice in given] == outputs, case.name
        for choice, score in zip(given, case.expected.scores, strict=False):
            total = sum(one.logprob for one in choice.logprobs)
            assert total / len(choice.token_ids) ** penalty == pytest.approx(score, abs=NOISE)
            is_end = choice.token_ids[-1] in EOS.union(stop_token_ids)
            reason = FinishReason.STOP if is_end else FinishReason.LENGTH
            assert choice.finish_reason is reason


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_num_batched_tokens", [512, 24])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_answers_are_those_of_transformers(
    loaded, cases, stop_token_ids, depth, max_num_batched_tokens, enable_prefix_caching
):
    """Many at once; prompts in chunks or at once."""
    requests = [case.request(stop_token_ids, case.mix["width"]) for case in cases]
    results = run_requests(
        *loaded,
        requests,
        depth=depth,
        eos_token_ids=EOS,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    check(results, cases, stop_token_ids)


def test_answers_of_the_torch_runner_are_the_same(folder, cases, stop_token_ids):
    runner, info = load_runner(folder, ops="reference", block_size=BLOCK_SIZE)
    requests = [case.request(stop_token_ids, case.mix["width"]) for case in cases[:12]]
    check(run_requests(runner, info, requests, eos_token_ids=EOS), cases[:12], stop_token_ids)
    runner.close()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing(loaded, cases, stop_token_ids, mode, depth):
    runner, info = loaded
    options = {} if mode == "recompute" else {"num_host_slots": info.num_host_slots}
    scheduler = build_scheduler(
        info, eos_token_ids=EOS, num_blocks=56, preemption_mode=mode, **options
    )
    requests = [case.request(stop_token_ids, case.mix["width"]) for case in cases]
    results = run_requests(runner, info, requests, depth=depth, scheduler=scheduler)
    check(results, cases, stop_token_ids)
    assert scheduler.num_preemptions > 0
    assert (scheduler.num_swaps > 0) == (mode == "swap")
    assert scheduler.num_held_blocks == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_beams_share_their_prompt_and_what_they_have_in_common(
    loaded, cases, stop_token_ids, enable_prefix_caching
):
    runner, info = loaded
    long = [case for case in cases if len(case.prompt) >= 40 and case.mix["width"] >= 3]
    num_copies = 0
    for case in long:
        width = case.mix["width"]
        scheduler = build_scheduler(
            info, eos_token_ids=EOS, enable_prefix_caching=enable_prefix_caching
        )
        watch = Watch(runner, scheduler)
        one = case.request(stop_token_ids, width)
        check(run_requests(watch, info, [one], scheduler=scheduler), [case], stop_token_ids)
        num_prompt_blocks = len(case.prompt) // BLOCK_SIZE  # full ones, of which there is one each
        num_own_blocks = -(-(len(case.prompt) + NUM_TOKENS) // BLOCK_SIZE) - num_prompt_blocks
        assert watch.num_held_blocks <= num_prompt_blocks + width * num_own_blocks
        assert watch.num_held_blocks < width * num_prompt_blocks
        num_copies += watch.num_copies
    assert num_copies > 0  # of blocks that another beam has too, before a token is written to them


def test_beams_and_others_run_side_by_side(loaded, cases, stop_token_ids):
    others = [
        request("greedy", cases[0].prompt, NUM_TOKENS),
        request("several", cases[1].prompt, NUM_TOKENS, temperature=1.0, n=3, seed=5),
        request("best", cases[2].prompt, NUM_TOKENS, temperature=0.7, n=1, best_of=3, seed=6),
    ]
    alone = run_requests(*loaded, others, eos_token_ids=EOS)
    beams = [case.request(stop_token_ids, 1) for case in cases]
    mixed = run_requests(*loaded, [*beams[:5], *others, *beams[5:]], eos_token_ids=EOS)
    check(mixed, cases, stop_token_ids, num_return=1)
    assert tokens_of({one.request_id: mixed[one.request_id] for one in others}) == tokens_of(alone)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_blocks", [512, 28])
def test_a_program_gets_the_answers_in_order(
    folder, cases, stop_token_ids, async_scheduling, num_blocks
):
    """With a pool of plenty, and with one that few fit in."""
    with LLM(
        str(folder),
        dtype="float32",
        packed_cache_gib=0.0,
        max_model_len=96,
        async_scheduling=async_scheduling,
        num_gpu_blocks_override=num_blocks,
    ) as llm:
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=NUM_TOKENS,
                logprobs=2,
                **case.sampling(stop_token_ids, min(2, case.mix["width"])),
            )
            for case in cases
        ]
        outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False)
    for case, output, sampling in zip(cases, outputs, params, strict=True):
        expected = case.expected.outputs[: sampling.n]
        assert [tuple(choice.token_ids) for choice in output.outputs] == expected
        for choice, score in zip(output.outputs, case.expected.scores, strict=False):
            penalty = sampling.length_penalty
            total = choice.cumulative_logprob
            assert total / len(choice.token_ids) ** penalty == pytest.approx(score, abs=NOISE)
            assert total == pytest.approx(
                sum(
                    logprobs[token_id].logprob
                    for token_id, logprobs in zip(choice.token_ids, choice.logprobs, strict=True)
                )
            )
            assert all(2 <= len(logprobs) <= 3 for logprobs in choice.logprobs)
            last = choice.token_ids[-1]
            is_end = last in EOS.union(stop_token_ids)
            assert choice.finish_reason == ("stop" if is_end else "length")
            assert choice.stop_reason == (last if is_end and last not in EOS else None)
