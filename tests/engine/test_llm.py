"""LLM: prompts of any form, answers in their order, seeds, the bar; names as vLLM has them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from continuation import continued_ids
from engine.llm_support import SilentBar, check_idle, make_llm
from engine.support import NOT_ASCII_IDS, TOKENIZER, VOCAB_SIZE, greedy, make_runner, oracle
from fakes import fake_logprobs
from tiny import save_tiny_checkpoint

from streamkv import LLM, SamplingParams
from streamkv.protocol import unpack_ints

PROMPTS = ["the quick brown fox", "user", "what is the answer to this question", "the the the"]


def test_a_model_on_disk_answers_as_transformers_does(tmp_path):
    save_tiny_checkpoint(tmp_path, hidden_size=64)  # heads of 16
    expected = [continued_ids(tmp_path, prompt, 8) for prompt in PROMPTS]
    options = {"dtype": "float32", "num_gpu_blocks_override": 64}
    empty = {"quantization": None, "revision": None, "max_model_len": None}
    vllm_only = {"disable_log_stats": True, "max_seq_len_to_capture": 8192}
    with LLM(str(tmp_path), **options, **empty, **vllm_only) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.get_tokenizer().encode("the fox") == llm.tokenizer.encode("the fox")
        assert llm.get_tokenizer() is llm.get_tokenizer()
        assert (llm.get_tokenizer().eos_token_id, llm.get_tokenizer().model_max_length) == (2, 256)
        (sampled,) = llm.generate(PROMPTS[0], SamplingParams(seed=1), use_tqdm=False)
    with LLM(str(tmp_path), **options, seed=5) as llm:  # a seed of its own is not the LLM's
        (again,) = llm.generate(PROMPTS[0], SamplingParams(seed=1), use_tqdm=False)
    assert again.outputs == sampled.outputs


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("the fox", [("the fox", None)]),
        (["the fox", "user"], [("the fox", None), ("user", None)]),
        ([5, 6, 7], [(None, [5, 6, 7])]),
        ((5, 6), [(None, [5, 6])]),
        ([[5, 6], [7]], [(None, [5, 6]), (None, [7])]),
        ({"prompt": "the fox"}, [("the fox", None)]),
        ({"prompt_token_ids": [5], "prompt": None}, [(None, [5])]),
        (["user", {"prompt": "x", "prompt_token_ids": [5]}], [("user", None), ("x", [5])]),
        ([], []),
        (np.array([5, 6, 7]), [(None, [5, 6, 7])]),
        (np.array([[5, 6], [7, 8]]), [(None, [5, 6]), (None, [7, 8])]),
        ([np.int64(5), np.int32(6)], [(None, [5, 6])]),
        ([torch.tensor([5, 6]), [np.int64(7)]], [(None, [5, 6]), (None, [7])]),
        ({"prompt_token_ids": np.array([5])}, [(None, [5])]),
        (np.array(["the fox", "user"]), [("the fox", None), ("user", None)]),
    ],
)  # fmt: skip
def test_prompts_come_in_many_forms_and_keep_their_order(prompts, expected):
    runner = make_runner(avoid=NOT_ASCII_IDS)
    with make_llm(runner) as llm:
        outputs = llm.generate(prompts, greedy(max_tokens=7), use_tqdm=False)
        for output, (text, token_ids) in zip(outputs, expected, strict=True):
            token_ids = TOKENIZER.encode(text) if token_ids is None else token_ids
            assert (output.prompt, output.prompt_token_ids) == (text, token_ids)
            (choice,) = output.outputs
            assert choice.token_ids == oracle(runner, token_ids, 7)
            assert choice.text == TOKENIZER.decode(choice.token_ids)
            assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "length", None)
            assert (choice.logprobs, choice.cumulative_logprob) == (None, None)
            assert output.finished and output.error == "" and output.prompt_logprobs is None
            assert output.metrics.arrival_time <= output.metrics.first_token_time
        assert len({output.request_id for output in outputs}) == len(outputs)


def test_many_more_prompts_than_fit_at_once_or_in_the_queue_are_all_answered_in_order():
    runner = make_runner(num_blocks=40)
    with make_llm(runner, max_num_seqs=3, max_num_queued_reqs=1) as llm:
        samplings = [greedy(max_tokens=1 + index % 9) for index in range(60)]
        outputs = llm.generate([[index, 1] for index in range(60)], samplings, use_tqdm=False)
        for index, output in enumerate(outputs):
            expected = oracle(runner, [index, 1], 1 + index % 9)
            assert output.outputs[0].token_ids == expected
        check_idle(llm, runner)


def test_each_choice_and_its_log_probabilities_are_shaped_as_in_vllm():
    runner = make_runner()
    with make_llm(runner) as llm:
        sampling = SamplingParams(n=3, seed=4, max_tokens=5, logprobs=2)
        (output,) = llm.generate([[5, 6]], sampling, use_tqdm=False)
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
        for choice in output.outputs:
            expected = oracle(runner, [5, 6], 5, temperature=1.0, seed=4, choice=choice.index)
            assert choice.token_ids == expected
            sum_of_all = 0.0
            for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
                truth = fake_logprobs(token_id, 2, VOCAB_SIZE)
                first, second = position
                assert [first, second] == list(unpack_ints(truth.top_ids))
                assert (position[first].logprob, position[first].rank) == (truth.logprob, 1)
                assert position[second].rank == 2
                assert position[second].decoded_token == TOKENIZER.token_text(second)
                sum_of_all += truth.logprob
            assert choice.cumulative_logprob == pytest.approx(sum_of_all)


def test_priority_says_who_runs_first():
    runner = make_runner()
    with make_llm(runner, max_num_seqs=1) as llm:
        prompts = [[index] for index in range(6)]
        outputs = llm.generate(prompts, greedy(max_tokens=2), False, priority=[5, 4, 3, 2, 1, 0])
        times = [output.metrics.finished_time for output in outputs]
        assert times == sorted(times, reverse=True) and len(set(times)) == 6


def test_more_tokens_than_the_context_has_room_for_end_with_it():
    with make_llm(make_runner()) as llm:
        (output,) = llm.generate([[1] * 100], greedy(max_tokens=5000), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 28
        assert output.outputs[0].finish_reason == "length"
        (output,) = llm.generate([[1] * 100], SamplingParams(), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 16


def test_scripts_find_names_where_vllm_has_them():
    from streamkv import TextPrompt, TokensPrompt, inputs, outputs, sampling_params
    from streamkv.entrypoints.llm import LLM as EntryLLM
    from streamkv.outputs import RequestOutput

    assert EntryLLM is LLM and sampling_params.SamplingParams is SamplingParams
    assert inputs.TextPrompt is TextPrompt and inputs.TokensPrompt is TokensPrompt
    with make_llm(make_runner()) as llm:
        prompts = [TextPrompt(prompt="user"), TokensPrompt(prompt_token_ids=[5, 6])]
        found = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    assert all(isinstance(output, RequestOutput) for output in found)
    assert [output.prompt for output in found] == ["user", None]
    assert outputs.CompletionOutput is type(found[0].outputs[0])


# --- seeds ---------------------------------------------------------------------------------------


def test_seeds_are_those_of_the_engine_in_the_order_of_the_prompts():
    prompts = [[index, 3] for index in range(12)]
    own = SamplingParams(max_tokens=9, seed=99)
    samplings = [own if index == 4 else SamplingParams(max_tokens=9) for index in range(12)]
    source = random.Random(0)
    seeds = [99 if index == 4 else source.getrandbits(63) for index in range(12)]
    for max_num_seqs in (1, 7):
        runner = make_runner()
        with make_llm(runner, max_num_seqs=max_num_seqs, seed=0) as llm:
            outputs = llm.generate(prompts, samplings, use_tqdm=False)
            for prompt, seed, output in zip(prompts, seeds, outputs, strict=True):
                expected = oracle(runner, prompt, 9, temperature=1.0, seed=seed)
                assert output.outputs[0].token_ids == expected
            (later,) = llm.generate([prompts[0]], samplings[0], use_tqdm=False)
            assert later.outputs[0].token_ids != outputs[0].outputs[0].token_ids


def test_without_a_seed_no_start_is_like_another():
    answers = []
    for _ in range(2):
        with make_llm(make_runner(), seed=-1) as llm:
            (output,) = llm.generate("user", SamplingParams(max_tokens=30), use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] != answers[1]


# --- the bar -------------------------------------------------------------------------------------


def test_the_bar_counts_prompts_and_says_tokens_per_second(capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("streamkv.engine.progress_bar.time.monotonic", lambda: float(next(clock)))
    bars: list[SilentBar] = []

    def make_bar(**options: Any) -> SilentBar:
        bars.append(SilentBar(**options))
        return bars[0]

    with make_llm(make_runner()) as llm:
        llm.generate([[1, 2], [3, 4]], greedy(n=3, max_tokens=4), use_tqdm=make_bar)
        assert capsys.readouterr().err == ""
        llm.generate("user", use_tqdm=False)
        assert capsys.readouterr().err == ""
        llm.generate("user")
        assert "Processed prompts" in capsys.readouterr().err
    (bar,) = bars
    assert (bar.total, bar.num, bar.closed) == (2, 2, True)
    assert bar.postfix.startswith("est. speed input: ")
