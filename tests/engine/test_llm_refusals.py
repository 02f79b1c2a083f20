"""LLM: what is wrong is said before anything runs; scripts for vLLM run, or are told what to do."""

from __future__ import annotations

import numpy as np
import pytest
from engine.llm_support import CHAT, STRIPPING, check_idle, llm_threads, make_llm
from engine.support import greedy, make_runner, oracle
from tiny import save_tiny_checkpoint

from streamkv import LLM, SamplingParams
from streamkv.errors import ConfigError, ContextLengthError, InvalidRequestError


@pytest.mark.parametrize(
    ("prompts", "error", "match"),
    [
        (["a", ""], InvalidRequestError, r"^prompts\[1\]: expected at least one token"),
        (["a", None], InvalidRequestError, r"^prompts\[1\]: expected text or token ids, got None"),
        (["a", [1, "2"]], InvalidRequestError, r"^prompts\[1\]: .*'2' in it"),
        (["a", np.array([0.5])], InvalidRequestError, r"^prompts\[1\]: .*0.5 in it"),
        (["a", [1, 9999]], InvalidRequestError, r"^prompts\[1\]: expected token ids .* got 9999"),
        (["a", "\ud800"], InvalidRequestError, r"^prompts\[1\]: .* lone surrogate"),
        (["a", [1] * 128], ContextLengthError, r"^prompts\[1\]: expected at most 127 tokens"),
        (["a", "the fox " * 500], ContextLengthError, r"^prompts\[1\]: expected at most 127"),
        ([{"text": "a"}], InvalidRequestError, r"^prompts\[0\]: .* got text"),
        ([{"prompt": "a", "multi_modal_data": {}}], InvalidRequestError, "got multi_modal_data"),
        ({}, InvalidRequestError, "^prompts: expected text, .* got none of them"),
        (7, InvalidRequestError, "^prompts: .* got int"),
        (b"a", InvalidRequestError, "^prompts: .* got bytes"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_runs(prompts, error, match):
    runner = make_runner()
    with make_llm(runner) as llm:
        with pytest.raises(error, match=match):
            llm.generate(prompts, greedy(max_tokens=2), use_tqdm=False)
        check_idle(llm, runner)
        assert runner.num_steps == 0
        assert len(llm.generate("user", use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sampling_params": [SamplingParams()] * 3}, "one for each of the 2 prompts, got 3"),
        ({"sampling_params": {"n": 2}}, "sampling_params: expected SamplingParams or a list"),
        ({"priority": [1]}, "priority: expected one for each of the 2 prompts, got 1"),
        ({"priority": "high"}, "priority: expected int"),
        ({"lora_request": "mine"}, "lora_request: expected None"),
        ({"prompt_token_ids": [[5]]}, "prompt_token_ids: expected no prompts beside it"),
        ({"sampling_params": greedy(min_tokens=500)}, r"^prompts\[0\]: min_tokens: .* got 500"),
        ({"sampling_params": greedy(stop_token_ids=[999])}, r"^prompts\[0\]: stop_token_ids: "),
    ],
)
def test_what_goes_with_the_prompts_is_checked_too(options, match):
    runner = make_runner()
    with make_llm(runner) as llm:
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate(["a", "b"], use_tqdm=False, **options)
        with pytest.raises(TypeError, match="got unheard_of"):
            llm.chat(CHAT, unheard_of=None)
        assert runner.num_steps == 0
        assert len(llm.generate(["a", "b"], use_tqdm=False, lora_request=None)) == 2


def test_scripts_of_vllm_are_understood_or_told_what_to_do():
    runner = make_runner()
    with make_llm(runner, max_num_seqs=np.int64(1)) as llm:
        (output,) = llm.generate(None, greedy(max_tokens=3), prompt_token_ids=[[5]], use_tqdm=False)
        assert output.outputs[0].token_ids == oracle(runner, [5], 3)
        assert output.lora_request is output.outputs[0].lora_request is None
        priority = np.array([2, 1])
        first, second = llm.generate([[1], [2]], greedy(max_tokens=2), False, priority=priority)
        assert first.metrics.finished_time > second.metrics.finished_time
        (output,) = llm.chat(CHAT, greedy(max_tokens=2), False, None, STRIPPING, "auto")
        assert output.prompt == "[user] what is the answer\n"
        with pytest.raises(InvalidRequestError, match="params: expected BeamSearchParams, got"):
            llm.beam_search(["a"], None)
        with pytest.raises(AttributeError, match="no encode, .*: models here generate text"):
            _ = llm.encode
        with pytest.raises(AttributeError, match="LLM has no attribute 'unheard_of'"):
            _ = llm.unheard_of
        assert not hasattr(llm, "reset_prefix_cache")


def test_parameters_may_be_changed_before_a_call_and_are_checked_by_it():
    runner = make_runner()
    with make_llm(runner) as llm:
        sampling = llm.get_default_sampling_params()
        sampling.max_tokens, sampling.temperature = 3, 0.0
        (output,) = llm.generate([[5]], sampling, use_tqdm=False)
        assert output.outputs[0].token_ids == oracle(runner, [5], 3)
        sampling.temperature = -1.0
        with pytest.raises(InvalidRequestError, match=r"^prompts\[0\]: temperature: .* got -1.0"):
            llm.generate([[5]], sampling, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quantisation": "int8"}, "quantisation.*quantization"),
        ({"quantization": "awq"}, "quantization"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"enable_lora": True}, "enable_lora"),
        ({"max_model_len": -5}, "max_model_len"),
    ],
)
def test_options_that_can_not_be_honoured_are_refused_by_name(options, match, tmp_path):
    save_tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=match):
        LLM(str(tmp_path), **options)
    assert llm_threads() == []


def test_names_that_are_not_here_are_refused_with_what_to_do():
    with pytest.raises(ImportError, match="EngineArgs, which vLLM has: LLM and AsyncEngine take"):
        from streamkv import EngineArgs  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from streamkv import Nothing  # noqa: F401
