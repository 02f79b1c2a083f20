"""SamplingParams: several sequences for one prompt, and what else is vLLM's."""

import math

import msgspec
import numpy as np
import pytest

from streamkv.core.groups import SequenceGroup
from streamkv.errors import InvalidRequestError
from streamkv.protocol import Request, SamplingParams
from streamkv.sampling import StructuredOutputs
from streamkv.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    StructuredOutputsParams,
)


def num_logprobs(**params) -> int:
    """How many the device is asked for."""
    request = Request(
        request_id="r",
        model="m",
        prompt_token_ids=(1,),
        sampling=SamplingParams(**params),
        seed=1,
        max_tokens=4,
    )
    group = SequenceGroup(request, first_arrival=0, eos_token_ids=frozenset({2, 3}))
    return group.sequences[0].sampling.num_logprobs


def test_as_many_sequences_are_computed_as_the_greatest_number_says():
    assert SamplingParams().num_sequences == 1
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=3, best_of=None).num_sequences == 3
    assert SamplingParams(n=3, best_of=5).num_sequences == 5
    assert SamplingParams(best_of=np.int64(4), use_beam_search=np.bool_(True)).num_sequences == 4
    assert SamplingParams(n=64, use_beam_search=True).num_sequences == 64


def test_candidates_are_told_their_log_probabilities_and_beams_what_may_follow():
    assert num_logprobs() == -1
    assert num_logprobs(n=2, best_of=2) == -1
    assert num_logprobs(n=2, best_of=3) == 0
    assert num_logprobs(best_of=3, logprobs=5) == 5
    assert num_logprobs(n=4, use_beam_search=True) == 8
    assert num_logprobs(n=4, use_beam_search=True, logprobs=20) == 20
    # An end token of each kind may be among the most likely of every beam.
    assert num_logprobs(n=2, use_beam_search=True, stop_token_ids=(5, 6, 7)) == 7
    assert num_logprobs(n=2, use_beam_search=True, ignore_eos=True) == 4


def test_nothing_but_the_model_chooses_with_beams():
    sampling = SamplingParams(
        n=2,
        best_of=4,
        use_beam_search=True,
        temperature=0,
        top_k=-1,
        top_p=1,
        length_penalty=np.float32(0.5),
        early_stopping="never",
        stop_token_ids=(5,),
    )
    assert (sampling.length_penalty, sampling.early_stopping) == (0.5, "never")
    assert SamplingParams(use_beam_search=True).temperature == 1.0  # the default is no wish
    assert SamplingParams(use_beam_search=True, early_stopping=True).early_stopping is True


def test_what_scripts_leave_empty_is_left_out():
    sampling = SamplingParams(
        best_of=None, use_beam_search=None, length_penalty=None, early_stopping=None
    )
    assert sampling == SamplingParams()
    assert SamplingParams(best_of=1, length_penalty=1, early_stopping=False).num_sequences == 1


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("best_of", {"n": 3, "best_of": 2}),
        ("best_of", {"best_of": 129}),
        ("best_of", {"best_of": 1.5}),
        ("best_of", {"best_of": True}),
        ("best_of", {"best_of": 65, "use_beam_search": True}),
        ("n", {"n": 65, "use_beam_search": True}),
        ("use_beam_search", {"use_beam_search": "yes"}),
        ("use_beam_search", {"use_beam_search": 1.0}),
        ("length_penalty", {"length_penalty": 2.0}),
        ("length_penalty", {"length_penalty": math.nan, "use_beam_search": True}),
        ("length_penalty", {"length_penalty": "long", "use_beam_search": True}),
        ("early_stopping", {"early_stopping": True}),
        ("early_stopping", {"early_stopping": "never"}),
        ("early_stopping", {"early_stopping": "sometimes", "use_beam_search": True}),
        ("early_stopping", {"early_stopping": [], "use_beam_search": True}),
        ("temperature", {"temperature": 0.5, "use_beam_search": True}),
        ("top_p", {"top_p": 0.5, "use_beam_search": True}),
        ("top_k", {"top_k": 5, "use_beam_search": True}),
        ("min_p", {"min_p": 0.5, "use_beam_search": True}),
        ("repetition_penalty", {"repetition_penalty": 1.1, "use_beam_search": True}),
        ("presence_penalty", {"presence_penalty": 1, "use_beam_search": True}),
        ("frequency_penalty", {"frequency_penalty": 1, "use_beam_search": True}),
        ("logit_bias", {"logit_bias": {1: 1.0}, "use_beam_search": True}),
        ("min_tokens", {"min_tokens": 1, "use_beam_search": True}),
        ("stop", {"stop": "end", "use_beam_search": True}),
    ],
)
def test_what_makes_no_sense_together_is_an_error_that_names_the_field(field, params):
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as raised:
        SamplingParams(**params)
    assert raised.value.param == field


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": "."}, 'stop: expected none with use_beam_search, got ["."]; leave it out'),
        ({"logit_bias": {1: 2}}, 'logit_bias: expected none with use_beam_search, got {"1": 2}'),
        (
            {"structured_outputs": {"regex": "a+"}},
            "structured_outputs: expected none with use_beam_search, got regex; leave it out",
        ),
        ({"min_tokens": 1}, "min_tokens: expected the default (0) with use_beam_search, got 1"),
        ({"temperature": 0.5}, "temperature: expected the default (1.0) or 0.0 with use_beam_"),
        ({"n": 65}, "n: expected a number of beams in [1, 64], got 65"),
        ({"n": 300}, "n: expected a number of beams in [1, 64], got 300"),
        ({"best_of": 129}, "best_of: expected a number of beams in [1, 64], got 129"),
        ({"n": 300, "use_beam_search": False}, "n: expected a number in [1, 128], got 300"),
        (
            {"early_stopping": True, "use_beam_search": False},
            "early_stopping: expected the default (false) without use_beam_search, got true; leave "
            "it out, or set use_beam_search: true",
        ),
        ({"n": 4, "best_of": 2}, "best_of: expected at least n, 4, as many as are given of them, "),
    ],
)
def test_a_refusal_says_whether_it_is_for_beams_in_the_words_of_clients(params, message):
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**({"use_beam_search": True} | params))
    assert raised.value.message.startswith(message)


def test_vllms_parameters_of_a_beam_search_are_these():
    params = BeamSearchParams(beam_width=4, max_tokens=9, length_penalty=0.5, ignore_eos=True)
    assert params.sampling_params() == SamplingParams(
        n=4,
        use_beam_search=True,
        max_tokens=9,
        temperature=0.0,
        length_penalty=0.5,
        ignore_eos=True,
        logprobs=8,
    )
    for wrong, field in (
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"temperature": 0.7}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{field}: ") as raised:
            BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | wrong)).sampling_params()
        assert raised.value.param == field


def test_what_an_answer_is_to_match_is_one_of_seven_kinds():
    for fields, kind in (
        ({"json": {"type": "object"}}, "json"),
        ({"json": '{"type": "object"}'}, "json"),
        ({"json": msgspec.Raw(b'{"type": "object"}')}, "json"),
        ({"json": True}, "json"),
        ({"regex": "a+"}, "regex"),
        ({"choice": ["a", "b"]}, "choice"),
        ({"grammar": "root ::= a"}, "grammar"),
        ({"lark": "start: a", "json_object": False}, "lark"),
        ({"json_object": True, "whitespace_pattern": " ?"}, "json_object"),
        ({"structural_tag": {"format": {}}}, "structural_tag"),
    ):
        structured = StructuredOutputs(**fields)
        assert structured.kind == kind
        assert structured == StructuredOutputs(**fields)
        assert len({structured, StructuredOutputs(**fields)}) == 1
        # vLLM's ways to give it.
        for params in (
            {"structured_outputs": structured},
            {"structured_outputs": fields},
            {"guided_decoding": GuidedDecodingParams(**fields, backend="xgrammar")},
            {"guided_decoding": fields},
        ):
            assert SamplingParams(**params).structured_outputs.kind == kind
            assert SamplingParams(**params).guided_decoding is None
            assert SamplingParams(**params).clone().structured_outputs.kind == kind
    assert StructuredOutputsParams is StructuredOutputs
    assert StructuredOutputs(json={"type": "object"}).json == '{"type":"object"}'


def test_a_class_of_pydantics_is_its_schema():
    class Answer:
        @staticmethod
        def model_json_schema() -> dict:
            return {"type": "integer"}

    assert StructuredOutputs(json=Answer).json == '{"type":"integer"}'


def test_nothing_is_to_be_matched_where_nothing_is_asked_for():
    for nothing in (None, {}, {"json": None, "regex": None}):
        assert SamplingParams(structured_outputs=nothing).structured_outputs is None
    assert GuidedDecodingParams.from_optional(json=None, backend="auto") is None
    assert GuidedDecodingParams.from_optional(regex="a").regex == "a"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "exactly one of json, regex, .*, got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"json": 5}, "json: expected text that isn't empty, got int"),
        ({"json": {"a": object()}}, "json: expected JSON"),
        ({"json": ""}, "json: expected text that isn't empty, got ''"),
        ({"regex": ""}, "regex: expected text"),
        ({"regex": 5}, "regex: expected text that isn't empty, got int"),
        ({"regex": "a" * 300_000}, "regex: expected at most 131072 characters, got 300000"),
        ({"json": {"a": "b" * 300_000}}, "json: expected at most 131072 characters"),
        ({"choice": []}, "choice: expected at least one text, got an empty list"),
        ({"choice": ["a", ""]}, r"choice\[1\]: expected text that isn't empty, got ''"),
        ({"choice": ["a", 5]}, r"choice\[1\]: expected text that isn't empty, got int"),
        ({"choice": "abc"}, "expected a list of choices"),
        ({"choice": ["a"] * 5000}, "at most 4096 choices"),
        ({"choice": ["a" * 100_000] * 3}, "choice: expected at most 131072 characters in all"),
        ({"choice": ["a", "b\ud800"]}, r"choice\[1\]: expected Unicode, got a lone .* character 1"),
        ({"regex": "\udfff"}, "regex: expected Unicode, got a lone surrogate at character 0"),
        ({"json": '{"const":"\ud800"}'}, "json: expected Unicode, got a lone surrogate"),
        ({"json": {"const": "\ud800"}}, "json: expected JSON, got .*surrogates not allowed"),
        ({"json": {}, "whitespace_pattern": "\ud800"}, "whitespace_pattern: expected Unicode"),
        ({"grammar": b"root"}, "got bytes"),
        ({"json_object": "yes"}, "json_object: expected true or false"),
        ({"json": {}, "whitespace_pattern": " " * 300}, "at most 256 characters"),
    ],
)
def test_what_can_not_be_matched_is_an_error(fields, why):
    with pytest.raises(InvalidRequestError, match=why) as raised:
        StructuredOutputs(**fields)
    assert raised.value.param.startswith("structured_outputs")


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("structured_outputs", {"structured_outputs": 5}),
        ("structured_outputs", {"structured_outputs": {"yaml": "a"}}),
        ("guided_decoding", {"guided_decoding": "json"}),
        (
            "guided_decoding",
            {"guided_decoding": {"regex": "a"}, "structured_outputs": {"json": {}}},
        ),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}, "use_beam_search": True}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids", {"allowed_token_ids": [-1]}),
        ("allowed_token_ids", {"allowed_token_ids": range(5000)}),
        ("allowed_token_ids", {"allowed_token_ids": [1], "use_beam_search": True}),
        ("bad_words", {"bad_words": ["a", ""]}),
        ("bad_words", {"bad_words": [5]}),
        ("bad_words", {"bad_words": ["a"] * 129}),
        ("bad_words", {"bad_words": ["a" * 5000]}),
        ("bad_words", {"bad_words": ["a"], "use_beam_search": True}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 1.5}),
        ("spaces_between_special_tokens", {"spaces_between_special_tokens": "no"}),
        ("detokenize", {"detokenize": False}),
    ],
)
def test_vllms_own_parameters_are_checked_by_name(field, params):
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as raised:
        SamplingParams(**params)
    assert raised.value.param == field


def test_vllms_own_parameters_are_kept_in_one_form():
    params = SamplingParams(
        allowed_token_ids=np.array([5, 3]),
        bad_words="never",
        prompt_logprobs=np.int64(3),
        truncate_prompt_tokens=-1,
        spaces_between_special_tokens=None,
    )
    assert params.allowed_token_ids == (5, 3)
    assert params.bad_words == ("never",)
    assert (params.prompt_logprobs, params.truncate_prompt_tokens) == (3, -1)
    assert params.spaces_between_special_tokens is True
    assert SamplingParams(bad_words=None, allowed_token_ids=None) == SamplingParams()
