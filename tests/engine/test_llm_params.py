"""LLM: vLLM's parameters beyond OpenAI's, in its shapes."""

from __future__ import annotations

import json

import jsonschema
import pytest
from engine.llm_support import CHAT, check_idle, llm_threads, make_llm
from engine.support import TOKENIZER, VOCAB_SIZE, greedy, make_runner, oracle
from fakes import FakeMaskBoard, expected_scores

from streamkv.errors import ContextLengthError, InvalidRequestError
from streamkv.protocol import unpack_ints
from streamkv.sampling_params import GuidedDecodingParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_answers_follow_grammars_by_both_names():
    runner = make_runner(
        masks=FakeMaskBoard(VOCAB_SIZE), mask_wait_s=10.0, avoid=(), max_model_len=300
    )
    with make_llm(runner) as llm:
        ways = [
            greedy(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["the fox"])),
            greedy(max_tokens=9, guided_decoding=GuidedDecodingParams(choice=["a dog"])),
            greedy(max_tokens=90, structured_outputs={"json": SCHEMA}),
        ]
        outputs = llm.generate(["x", "y", "z"], ways, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs[:2]] == ["the fox", "a dog"]
        last = outputs[2].outputs[0]
        assert last.text.startswith("{")
        if last.finish_reason == "stop":
            jsonschema.validate(json.loads(last.text), SCHEMA)
        (output,) = llm.chat(CHAT, ways[0], use_tqdm=False)
        assert output.outputs[0].text == "the fox"
        num_steps = runner.num_steps
        wrong = greedy(max_tokens=9, structured_outputs={"json": {"not": {}}})
        with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: structured_outputs: .*not"):
            llm.generate(["a", "b"], [ways[0], wrong], use_tqdm=False)
        assert runner.num_steps == num_steps
        check_idle(llm, runner)
    assert llm_threads() == []


def test_a_prompts_log_probabilities_are_shaped_as_in_vllm():
    runner = make_runner()
    prompt = [5, 6, 7, 8, 5, 6]
    with make_llm(runner) as llm:
        sampling = greedy(max_tokens=3, prompt_logprobs=2)
        output, plain = llm.generate(
            [prompt, prompt], [sampling, greedy(max_tokens=3)], use_tqdm=False
        )
        assert output.outputs == plain.outputs
        assert plain.prompt_logprobs is None
        first, *others = output.prompt_logprobs
        assert first is None
        scores = expected_scores(prompt, 2, VOCAB_SIZE)
        for token_id, position, row in zip(prompt[1:], others, scores, strict=True):
            assert next(iter(position)) == token_id
            assert (position[token_id].logprob, position[token_id].rank) == (row.logprob, row.rank)
            assert position[token_id].decoded_token == TOKENIZER.token_text(token_id)
            assert set(position) == {token_id, *unpack_ints(row.top_ids)}
        check_idle(llm, runner)


def test_long_prompts_are_cut_where_that_is_wanted():
    runner = make_runner()
    ids = [i % 60 for i in range(300)]
    with make_llm(runner) as llm:
        samplings = [greedy(max_tokens=4, truncate_prompt_tokens=k) for k in (5, -1, 200)]
        outputs = llm.generate([ids, ids], samplings[:2], use_tqdm=False)
        for output, kept in zip(outputs, (ids[-5:], ids[-124:]), strict=True):
            assert output.prompt_token_ids == kept
            assert output.outputs[0].token_ids == oracle(runner, kept, 4)
        text = "the fox and the dog " * 200
        (output,) = llm.generate(text, samplings[0], use_tqdm=False)
        assert output.prompt_token_ids == TOKENIZER.encode(text)[-5:]
        (output,) = llm.chat([{"role": "user", "content": text}], samplings[1], use_tqdm=False)
        assert len(output.prompt_token_ids) == 124
        with pytest.raises(ContextLengthError, match=r"^prompts\[1\]: expected at most 127"):
            llm.generate([ids, ids], [samplings[0], samplings[2]], use_tqdm=False)
        check_idle(llm, runner)
