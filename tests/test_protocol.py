"""Messages across the device border are numbers and bytes; bad sampling values are named."""

import math

import pytest

from streamkv.errors import InvalidRequestError
from streamkv.protocol import (
    Ask,
    Request,
    RowAdded,
    RowSampling,
    SamplingParams,
    StepInput,
    decode_step,
    encode_step,
    pack_ints,
    unpack_ints,
)


def request_with(sampling: SamplingParams) -> Request:
    return Request(
        request_id="r",
        model="m",
        prompt_token_ids=(1, 2, 3),
        sampling=sampling,
        seed=-7,
        max_tokens=4,
    )


def test_a_step_survives_being_written_to_bytes():
    sampling = SamplingParams(temperature=0.5, min_tokens=2, max_tokens=4, stop_token_ids=(9,))
    row = RowAdded(
        row=3,
        num_prompt_tokens=3,
        token_ids=pack_ints((1, 2, 3)),
        block_ids=pack_ints((7,)),
        sampling=RowSampling.build(request_with(sampling), 1, {2}),
    )
    step = StepInput(
        step_id=5,
        removed=pack_ints((3,)),
        added=(row,),
        appended=pack_ints((3, 8)),
        scheduled=pack_ints((3, 0, 3, Ask.SAMPLE)),
    )
    assert decode_step(encode_step(step)) == step
    assert list(unpack_ints(step.scheduled)) == [3, 0, 3, 1]


def test_row_sampling_masks_end_tokens_only_below_min_tokens_and_unless_eos_is_ignored():
    def masked(**params) -> list[int]:
        request = request_with(SamplingParams(max_tokens=4, **params))
        return list(unpack_ints(RowSampling.build(request, 0, {2}).min_tokens_stop_ids))

    assert masked() == []
    assert masked(min_tokens=1) == [2]
    assert masked(min_tokens=1, stop_token_ids=(9, 5)) == [2, 5, 9]
    assert masked(min_tokens=1, ignore_eos=True, stop_token_ids=(9,)) == [9]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 0.0}),
        ("stop_token_ids", (-1,)),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", range(1025)),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("n", 1.5),
        ("top_k", 1.5),
        ("seed", 1.5),
        ("max_tokens", 3.0),
        ("min_tokens", 0.5),
        ("logprobs", 1.0),
        ("logit_bias", {1.5: 0.0}),
        ("stop_token_ids", (1.5,)),
        ("stop_token_ids", (2**31,)),
    ],
)
def test_a_sampling_value_out_of_range_is_an_error_that_names_the_field(field, value):
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field
    assert field in str(raised.value)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4


def test_as_many_stop_tokens_and_biases_as_are_allowed_are_taken():
    sampling = SamplingParams(
        stop_token_ids=range(1024), logit_bias=dict.fromkeys(range(1024), 1.0), min_tokens=1
    )
    row = RowSampling.build(request_with(sampling), 0, {5000})
    assert list(unpack_ints(row.min_tokens_stop_ids)) == [*range(1024), 5000]


def test_the_choices_of_a_request_differ_by_their_number_only():
    sampling = SamplingParams(n=3, min_tokens=1, stop_token_ids=(9, 5), logit_bias={1: 2.0})
    first = RowSampling.build(request_with(sampling), 0, {2})
    for choice in range(3):
        row = first.of_choice(choice)
        assert row == RowSampling.build(request_with(sampling), choice, {2})
        assert row.bias_ids is first.bias_ids
