"""LLM: batches from any thread, with a model on disk and with a runner that only pretends."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine.support import (
    NOT_ASCII_IDS,
    SPECIAL_IDS,
    TOKENIZER,
    VOCAB_SIZE,
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    oracle,
    scheduler_of,
    until,
)
from fakes import FakeRunner, fake_logprobs
from tiny import save_tiny_checkpoint, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamkv import LLM, SamplingParams
from streamkv.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
)
from streamkv.protocol import unpack_ints
from streamkv.server.messages import Messages

PROMPTS = ["the quick brown fox", "user", "what is the answer to this question", "the the the"]


def make_llm(runner: FakeRunner, **overrides: Any) -> LLM:
    return LLM.from_engine(lambda: make_engine(runner, **overrides))


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def wait_until(llm: LLM, condition: Callable[[], bool]) -> None:
    llm._background.call(until(condition)).result(20)


def check_idle(llm: LLM, runner: FakeRunner) -> None:
    """Nothing is left of requests that ended, however they did."""
    engine = llm._background.engine
    wait_until(llm, lambda: not scheduler_of(engine).has_work)
    check_nothing_is_held(engine, runner)


def llm_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("streamkv")]


# --- prompts and answers -------------------------------------------------------------------------


def test_a_model_on_disk_answers_as_transformers_does(tmp_path):
    save_tiny_checkpoint(tmp_path, hidden_size=64)  # heads of 16
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([TOKENIZER.encode(prompt)])
        output = model.generate(ids, max_new_tokens=8, do_sample=False)
        expected.append(output[0, ids.shape[1] :].tolist())
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


# --- what is wrong is said before anything runs --------------------------------------------------


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
        with pytest.raises(AttributeError, match="no beam_search, .*: answers are sampled"):
            llm.beam_search(["a"], None)
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


# --- chats ---------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "what is the answer"}]
STARTED = [*CHAT, {"role": "assistant", "content": "it is the "}]
STRIPPING = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}\n"
    "{% endfor %}{% if tools %}{{ tools[0]['name'] }}{% endif %}{{ tone }}"
)


def test_conversations_become_prompts_by_the_models_template():
    runner = make_runner()
    with make_llm(runner) as llm:
        one = llm.chat(CHAT, greedy(max_tokens=5), use_tqdm=False)
        two = llm.chat([CHAT, STARTED], greedy(max_tokens=5), use_tqdm=False)
        assert [output.prompt for output in two] == [
            TOKENIZER.apply_chat_template(chat) for chat in (CHAT, STARTED)
        ]
        assert texts(one) == texts(two[:1])
        for output in two:
            assert output.prompt_token_ids == TOKENIZER.encode(output.prompt)
            assert output.outputs[0].token_ids == oracle(runner, output.prompt_token_ids, 5)


@pytest.mark.parametrize("template", [None, STRIPPING])
def test_the_last_message_is_continued_as_by_transformers(template, tmp_path):
    save_tiny_checkpoint(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        STARTED, tokenize=False, continue_final_message=True, chat_template=template
    )
    with make_llm(make_runner()) as llm:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        (output,) = llm.chat(STARTED, use_tqdm=False, chat_template=template, **options)
        assert output.prompt == expected
        parts = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "it is the "}]}]
        (output,) = llm.chat(parts, use_tqdm=False, chat_template=template, **options)
        assert output.prompt == expected


def test_a_conversation_makes_the_prompt_that_the_server_makes_of_it():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer(**{"tokenizer.chat_template": template})
    with make_llm(make_runner(), tokenizer=tokenizer) as llm:
        (output,) = llm.chat(chat, use_tqdm=False)
        assert output.prompt == '<system>be brief<user>a\nb<assistant>{"a": 1}<tool>7'
        body = msgspec.json.Decoder(Messages).decode(msgspec.json.encode(chat))
        served = llm._background.call(llm._background.engine.encode_chat(body)).result(20)
        assert served == output.prompt_token_ids


def test_another_template_gets_the_tools_and_variables():
    with make_llm(make_runner()) as llm:
        (output,) = llm.chat(
            CHAT,
            use_tqdm=False,
            chat_template=STRIPPING,
            tools=[{"name": "search"}],
            chat_template_kwargs={"tone": "!"},
        )
        assert output.prompt == "[user] what is the answer\nsearch!"
        with pytest.raises(ModelLoadError, match="chat template: expected valid Jinja"):
            llm.chat(CHAT, chat_template="{% for")


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ("hello", {}, "^messages: expected a list of messages.* got str"),
        ([CHAT, []], {}, r"^messages\[1\]: expected a list of messages, got none"),
        ([CHAT, ["hi"]], {}, r"^messages\[1\]\[0\]: expected a dict with role and content"),
        ([CHAT, [{"role": "user", "content": [{"type": "image_url"}]}]], {},
         r"^messages\[1\]\[0\].content\[0\]: expected .*text only"),
        (CHAT * 200, {}, "^messages: expected at most 128 messages"),
        ([CHAT, [{"role": "user", "content": "the fox " * 500}]], {},
         r"^messages\[1\]: expected at most 127 tokens"),
        (CHAT, {"continue_final_message": True}, "^continue_final_message: expected add_gener"),
        ([{"role": "user"}], {"continue_final_message": True, "add_generation_prompt": False},
         r"^messages\[0\].content: expected .*text"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False,
                "chat_template": "nothing"}, "^messages: the chat template leaves the last one"),
    ],
)  # fmt: skip
def test_a_bad_conversation_is_named_before_anything_runs(messages, options, match):
    runner = make_runner()
    with make_llm(runner) as llm:
        with pytest.raises(InvalidRequestError, match=match):
            llm.chat(messages, use_tqdm=False, **options)
        assert runner.num_steps == 0


# --- failures and interruptions ------------------------------------------------------------------


def test_a_prompt_that_fails_on_the_device_does_not_take_the_others_with_it(caplog):
    broken = 60
    runner = make_runner(avoid=[*SPECIAL_IDS, broken])
    runner.broken_token_ids = frozenset((broken,))
    with make_llm(runner, max_num_seqs=2) as llm:
        prompts = [[index] for index in range(58, 63)]
        outputs = llm.generate(prompts, greedy(n=2, max_tokens=4), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            if prompt == [broken]:
                assert "not finite" in output.error
                assert [choice.finish_reason for choice in output.outputs] == ["error"] * 2
                assert [choice.text for choice in output.outputs] == [""] * 2
            else:
                assert output.error == ""
                assert output.outputs[1].token_ids == oracle(runner, prompt, 4)
        (warning,) = (one for one in caplog.records if one.name == "streamkv.engine.llm")
        assert "1 of 5 prompts failed" in warning.getMessage()
        assert "prompts[2]: " in warning.getMessage()
        check_idle(llm, runner)


def test_an_engine_that_dies_ends_the_call_and_all_later_ones():
    runner = make_runner()
    runner.fail_step_ids = frozenset(range(2, 100))
    with make_llm(runner, max_num_seqs=2) as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="3 steps failed in a row"):
                llm.generate([[index] for index in range(20)], greedy(max_tokens=9), use_tqdm=False)


def test_an_interrupt_ends_the_requests_and_leaves_the_llm_usable():
    runner = make_runner(gate=(gate := threading.Semaphore(10)))  # steps before it stands still
    with make_llm(runner, max_num_seqs=4) as llm:
        engine = llm._background.engine

        def interrupt() -> None:
            wait_until(llm, lambda: engine.stats().num_requests_running == 4)
            os.kill(os.getpid(), signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[index] for index in range(30)], greedy(max_tokens=90), use_tqdm=False)
        interrupter.join()
        gate.release(1000)
        check_idle(llm, runner)
        assert engine.stats().request_success_total["length"] == 0
        (output,) = llm.generate([[7]], greedy(max_tokens=9), use_tqdm=False)
        assert output.outputs[0].token_ids == oracle(runner, [7], 9)


def test_a_progress_bar_that_fails_ends_the_requests_too():
    class Broken(SilentBar):
        def update(self, num: int) -> None:
            raise ZeroDivisionError

    runner = make_runner()
    with make_llm(runner, max_num_seqs=2) as llm:
        with pytest.raises(ZeroDivisionError):
            llm.generate([[index] for index in range(30)], greedy(max_tokens=50), use_tqdm=Broken)
        check_idle(llm, runner)


def test_closing_ends_the_calls_of_other_threads():
    runner = make_runner(gate=(gate := threading.Semaphore(10)))
    llm = make_llm(runner)
    engine = llm._background.engine
    errors = []

    def generate() -> None:
        with pytest.raises(EngineDeadError, match="closed") as caught:
            llm.generate([[1], [2]], greedy(max_tokens=50), use_tqdm=False)
        errors.append(caught.value)

    callers = [threading.Thread(target=generate) for _ in range(3)]
    for caller in callers:
        caller.start()

    def num_requests() -> int:
        stats = engine.stats()
        return stats.num_requests_running + stats.num_requests_waiting

    wait_until(llm, lambda: num_requests() == 6)
    closer = threading.Thread(target=llm.close)
    closer.start()
    for caller in callers:  # they hear of it though the device stands still
        caller.join(20)
    gate.release(1000)
    closer.join(20)
    assert len(errors) == 3
    with pytest.raises(EngineDeadError, match="the LLM is closed"):
        llm.generate("user")
    llm.close()
    assert runner.closed and llm_threads() == []


def test_threads_share_one_llm():
    runner = make_runner()
    found: dict[int, list[int]] = {}
    with make_llm(runner, max_num_seqs=4) as llm:

        def generate(first: int) -> None:
            prompts = [[first + index] for index in range(10)]
            for prompt, output in zip(
                prompts, llm.generate(prompts, greedy(max_tokens=6), use_tqdm=False), strict=True
            ):
                found[prompt[0]] = output.outputs[0].token_ids

        callers = [threading.Thread(target=generate, args=(first,)) for first in (0, 50, 100)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(20)
    assert len(found) == 30
    assert all(token_ids == oracle(runner, [key], 6) for key, token_ids in found.items())


def test_it_works_beside_a_running_event_loop():
    runner = make_runner(avoid=NOT_ASCII_IDS)

    async def main() -> list[str]:
        with make_llm(runner) as llm:
            return texts(llm.generate(["user", "the fox"], greedy(max_tokens=4), use_tqdm=False))

    for prompt, text in zip(("user", "the fox"), asyncio.run(main()), strict=True):
        assert text == TOKENIZER.decode(oracle(runner, TOKENIZER.encode(prompt), 4))


# --- the end -------------------------------------------------------------------------------------


def test_what_can_not_be_loaded_is_said_and_leaves_nothing():
    runner = make_runner(load_error=ModelLoadError("no weights"))
    with pytest.raises(ModelLoadError, match="no weights"):
        make_llm(runner)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make_llm(make_runner(), max_num_seqs=0)
    assert llm_threads() == []


def test_an_interrupt_while_loading_ends_it():
    runner = make_runner(load_gate=(load_gate := threading.Event()))

    def interrupt() -> None:
        while "streamkv-device-fake" not in llm_threads():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        load_gate.set()

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        make_llm(runner)
    interrupter.join()
    assert llm_threads() == []


def test_who_forgets_an_llm_frees_it():
    runners = [make_runner(), make_runner()]
    first, second = map(make_llm, runners)
    engine = weakref.ref(first._background.engine)
    for llm in (first, second):
        llm.generate("user", greedy(max_tokens=3), use_tqdm=False)
    del first, llm
    assert runners[0].closed and not runners[1].closed
    assert len(llm_threads()) == 2  # the second's
    gc.collect()
    assert engine() is None
    second.circle = second
    del second
    gc.collect()
    assert runners[1].closed and llm_threads() == []


def run_program(program: str, *arguments: str) -> str:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FORGETFUL = """
import sys, threading
from engine.support import greedy, make_engine, make_runner
from streamkv import LLM
from streamkv.engine import device_thread
device_thread._EXIT_CHECK_S = 1000.0  # it must not be what ends the program
runner = make_runner()
close = runner.close
runner.close = lambda: (close(), print("closed", flush=True))
llm = LLM.from_engine(lambda: make_engine(runner))
def use():
    (output,) = llm.generate([[1]], greedy(max_tokens=3), use_tqdm=False)
    print(len(output.outputs[0].token_ids), flush=True)
"""


def test_a_program_that_forgets_its_llm_ends_at_once_and_frees_it():
    assert run_program(FORGETFUL + "use()") == "3\nclosed\n"


def test_an_llm_serves_on_in_a_thread_that_outlives_the_main_script():
    assert run_program(FORGETFUL + """
def later():
    threading.main_thread().join()
    use()
    llm.close()
threading.Thread(target=later).start()
""") == "3\nclosed\n"  # fmt: skip


def test_a_fork_is_told_that_the_llm_is_in_another_process():
    assert run_program(FORGETFUL + """
import os
from streamkv.errors import EngineDeadError
if child := os.fork():
    os.waitpid(child, 0)
    use()
else:
    try:
        use()
    except EngineDeadError as error:
        print(error, flush=True)
    llm.close()
""") == "the LLM was loaded in another process: load it after the fork\n3\nclosed\n"  # fmt: skip


def test_llms_that_come_and_go_leave_no_thread_and_no_memory(tmp_path):
    save_tiny_checkpoint(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    program = """
import sys, threading
from streamkv import LLM
def rss_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
def cycle():
    llm = LLM(sys.argv[1], num_gpu_blocks_override=64)  # weights of 33 MiB
    llm.generate([[1, 2, 3]] * 20, use_tqdm=False)
for _ in range(2):
    cycle()
before = rss_kib(), threading.active_count()
for _ in range(4):
    cycle()
print(rss_kib() - before[0], threading.active_count() - before[1])
"""
    grown_kib, grown_threads = map(int, run_program(program, str(tmp_path)).split())
    assert grown_kib < 16 * 1024 and grown_threads == 0


# --- the bar -------------------------------------------------------------------------------------


class SilentBar:
    """What `LLM.generate` uses of tqdm."""

    postfix = ""

    def __init__(self, *, total: int, desc: str, dynamic_ncols: bool, postfix: str) -> None:
        self.total, self.num, self.closed = total, 0, False

    def update(self, num: int) -> None:
        self.num += num

    def refresh(self) -> None: ...

    def close(self) -> None:
        self.closed = True


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


def test_names_that_are_not_here_are_refused_with_what_to_do():
    with pytest.raises(ImportError, match="EngineArgs, which vLLM has: LLM and AsyncEngine take"):
        from streamkv import EngineArgs  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from streamkv import Nothing  # noqa: F401


def test_what_kept_a_model_from_loading_is_told_without_the_threads_calls(tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist") as error:
        LLM(str(tmp_path / "nowhere"))
    calls = [entry.name for entry in error.traceback]
    assert calls[1:] == ["__init__", "_load", "__init__"] and error.value.__cause__ is None
