"""Messages across the device border are numbers and bytes; bad sampling values are named."""

import enum
import math
import struct
from array import array

import numpy as np
import pytest
from msgspec import structs

from streamkv.core.groups import SequenceGroup
from streamkv.errors import InvalidRequestError
from streamkv.protocol import (
    Ask,
    CopyKind,
    Request,
    RowAdded,
    RowLogprobs,
    RowSampling,
    SamplingParams,
    StepInput,
    StepOutput,
    pack_ints,
    unpack_ints,
)
from streamkv.step_bytes import decode_output, decode_step, encode_output, encode_step


def request_with(sampling: SamplingParams) -> Request:
    return Request(
        request_id="r",
        model="m",
        prompt_token_ids=(1, 2, 3),
        sampling=sampling,
        seed=-7,
        max_tokens=4,
    )


def whole_step() -> StepInput:
    """Everything that a step can have; two rows are added."""
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.125,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        min_tokens=2,
        max_tokens=4,
        stop_token_ids=(9,),
        logit_bias={5: -100.0, 6: 0.5},
        logprobs=3,
    )
    masked = structs.replace(
        RowSampling.build(request_with(sampling), {2, 9}).of_choice(1),
        allowed_ids=pack_ints((4, 5, 9)),
        bad_words=pack_ints((1, 8, 2, 5, 6)),
        mask_slot=11,
        num_prompt_logprobs=2,
    )
    row = RowAdded(
        row=3,
        num_prompt_tokens=2,
        token_ids=pack_ints((1, 2, 3)),
        block_ids=pack_ints((7,)),
        sampling=masked,
    )
    plain = RowSampling.build(request_with(SamplingParams(top_k=-1)), ())
    return StepInput(
        step_id=2**40,
        removed=pack_ints((3, 4, 5)),
        added=(row, RowAdded(4, 1, pack_ints((8,)), b"", plain)),
        appended=pack_ints((3, 8)),
        scheduled=pack_ints((3, 0, 3, Ask.SAMPLE | Ask.SCORE, 4, 0, 1, Ask.NONE)),
        copies=pack_ints((2**31 - 1, CopyKind.OUT, 9, 10, 0, CopyKind.BLOCK, 11, 12)),
    )


def whole_output() -> StepOutput:
    return StepOutput(
        step_id=2**40,
        sampled=pack_ints((7, 0, 9)),
        logprobs=(
            RowLogprobs(-0.5, 2, pack_ints((8, 7)), array("f", (-0.25, -0.5)).tobytes()),
            None,
            RowLogprobs(-1.25, 1, b"", b""),
        ),
        failed=pack_ints((1,)),
        error="",
        duration_s=0.25,
        copies_done=pack_ints((5, 2**31 - 1)),
        copies_failed=pack_ints((6,)),
        copies_s=0.125,
        deferred=pack_ints((0, 2)),
        scored=(
            RowLogprobs(-2.5, 7, pack_ints((4,)), array("f", (-0.75,)).tobytes()),
            RowLogprobs(0.0, 0, b"", b""),
        ),
    )


EMPTY_STEP = StepInput(0, b"", (), b"", b"")
OUTPUTS = [
    whole_output(),
    StepOutput(0, b""),
    StepOutput(1, b"", error="kein Speicher für Größe 3\nmehr", copies_done=pack_ints((0,))),
]


@pytest.mark.parametrize("step", [whole_step(), EMPTY_STEP])
def test_a_step_survives_being_written_to_bytes(step):
    assert decode_step(encode_step(step)) == step


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_survives_being_written_to_bytes(output):
    assert decode_output(encode_output(output)) == output


def test_a_step_is_laid_out_as_documented():
    assert encode_step(whole_step()) == b"".join(
        (
            b"SKI3",
            struct.pack("<iq4i", 3, 2**40, 2, 1, 2, 2),
            struct.pack("<3i", 3, 4, 5),
            struct.pack("<2i", 3, 8),
            struct.pack("<8i", 2**31 - 1, 1, 9, 10, 0, 0, 11, 12),
            struct.pack("<8i", 3, 0, 3, 3, 4, 0, 1, 0),
            # row 3
            struct.pack("<6i", 3, 2, 3, 1, 2, 2),
            struct.pack("<4i", 1, 2, 3, 40),
            struct.pack("<4i", 3, 5, 11, 2),
            struct.pack("<q", -7),
            struct.pack("<6d", 0.5, 0.75, 0.125, 1.0, -1.5, 1.25),
            struct.pack("<3i", 1, 2, 3),
            struct.pack("<i", 7),
            struct.pack("<2i", 2, 9),
            struct.pack("<2i", 5, 6),
            struct.pack("<2f", -100.0, 0.5),
            struct.pack("<3i", 4, 5, 9),
            struct.pack("<5i", 1, 8, 2, 5, 6),
            # row 4
            struct.pack("<6i", 4, 1, 1, 0, 0, 0),
            struct.pack("<4i", 0, 0, -1, 0),
            struct.pack("<4i", 0, 0, -1, -1),
            struct.pack("<q", -7),
            struct.pack("<6d", 1.0, 1.0, 0.0, 0.0, 0.0, 1.0),
            struct.pack("<i", 8),
        )
    )


def test_an_output_is_laid_out_as_documented():
    assert encode_output(whole_output()) == b"".join(
        (
            b"SKO3",
            struct.pack("<iqdd8i", 3, 2**40, 0.25, 0.125, 1, 2, 3, 2, 2, 1, 0, 0),
            struct.pack("<3i", 7, 0, 9),
            struct.pack("<i", 1),
            struct.pack("<2i", 0, 2),
            struct.pack("<2i", 5, 2**31 - 1),
            struct.pack("<i", 6),
            struct.pack("<iid", 2, 2, -0.5),
            struct.pack("<2i2f", 8, 7, -0.25, -0.5),
            struct.pack("<iid", -1, 0, 0.0),
            struct.pack("<iid", 0, 1, -1.25),
            struct.pack("<iid", 1, 7, -2.5),
            struct.pack("<if", 4, -0.75),
            struct.pack("<iid", 0, 0, 0.0),
        )
    )
    failed = StepOutput(1, b"", error="é")
    assert encode_output(failed) == (
        b"SKO3" + struct.pack("<iqdd8i", 0, 1, 0.0, 0.0, *[0] * 6, 2, 0) + b"\xc3\xa9"
    )


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_step, encode_step(whole_step())),
        (decode_output, encode_output(whole_output())),
        (decode_output, encode_output(OUTPUTS[2])),
    ],
)
def test_a_message_that_is_cut_too_long_or_something_else_is_an_error(decode, message):
    for end in range(len(message)):
        with pytest.raises(ValueError, match="message: expected"):
            decode(message[:end])
    with pytest.raises(ValueError, match=f"expected its end at {len(message)}"):
        decode(message + b"\0")
    with pytest.raises(ValueError, match="expected it to begin with b'SK"):
        decode(b"GGUF" + message[4:])


def test_an_output_that_says_to_have_a_score_and_has_none_is_an_error():
    data = bytearray(encode_output(StepOutput(0, b"", scored=(RowLogprobs(0.0, 1, b"", b""),))))
    data[64:68] = struct.pack("<i", -1)
    with pytest.raises(ValueError, match="expected as many scores as it says"):
        decode_output(bytes(data))


def test_an_error_that_is_no_text_still_crosses():
    output = decode_output(encode_output(StepOutput(1, b"", error="a \udc80 file")))
    assert output.error == "a \\udc80 file"


def test_end_tokens_are_masked_only_below_min_tokens_and_unless_eos_is_ignored():
    def masked(**params) -> list[int]:
        request = request_with(SamplingParams(max_tokens=4, **params))
        group = SequenceGroup(request, first_arrival=0, eos_token_ids=frozenset({2}))
        return list(unpack_ints(group.sequences[0].sampling.min_tokens_stop_ids))

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
        ("logit_bias", [1]),
        ("stop", 5),
        ("stop", iter(("x",) * 17)),
        ("temperature", np.array([1.0, 2.0])),
        ("top_k", np.float32(1.0)),
        ("n", np.bool_(True)),
        ("stop_token_ids", (1.5,)),
        ("stop_token_ids", (2**31,)),
    ],
)
def test_a_sampling_value_out_of_range_is_an_error_that_names_the_field(field, value):
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field
    assert field in str(raised.value)
    assert isinstance(raised.value, ValueError)  # as vLLM's


@pytest.mark.parametrize(
    ("field", "neutral", "value"),
    [
        ("logits_processors", [None, []], [print]),
        ("detokenize", [True], False),
        ("extra_args", [None, {}], {"a": 1}),
    ],
)
def test_vllm_fields_for_what_is_not_done_are_taken_at_values_that_ask_for_nothing(
    field, neutral, value
):
    for one in neutral:
        assert request_with(SamplingParams(**{field: one})).sampling.max_tokens == 16
    with pytest.raises(InvalidRequestError, match=f"^{field}: .*leave it out") as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field


def test_what_scripts_leave_empty_is_left_out():
    sampling = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, seed=-1)
    assert sampling == SamplingParams()
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=(text for text in "ab")).stop == ("a", "b")
    assert SamplingParams.from_optional(n=None, top_p=None, max_tokens=5).max_tokens == 5
    assert SamplingParams.from_optional(temperature=None) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None) == SamplingParams(max_tokens=None)


def test_numbers_of_numpy_become_pythons():
    theirs = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        seed=np.uint8(7),
        stop_token_ids=np.array([5, 6]),
        logit_bias={np.int32(3): np.float16(1.5)},
        logprobs=np.array(4),
    )
    ours = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.25,
        seed=7,
        stop_token_ids=(5, 6),
        logit_bias={3: 1.5},
        logprobs=4,
    )
    assert repr(theirs) == repr(ours)


def test_fields_that_change_no_answer_are_taken_whatever_they_are():
    kinds = enum.Enum("RequestOutputKind", ["CUMULATIVE", "FINAL_ONLY"])
    SamplingParams(output_kind=kinds.FINAL_ONLY, skip_clone=True, stream_interval=4)


def test_a_clone_shares_nothing_that_can_be_changed_and_is_checked():
    stop_token_ids, logit_bias = [5], {7: 1.0}
    sampling = SamplingParams(stop_token_ids=stop_token_ids, logit_bias=logit_bias)
    clone = sampling.clone(max_tokens=3)
    stop_token_ids.append(-1)
    logit_bias[-1] = 0.0
    sampling.temperature = 9.0
    sampling.logit_bias[1] = 2.0
    assert clone == SamplingParams(stop_token_ids=[5], logit_bias={7: 1.0}, max_tokens=3)
    sampling.top_p = 0.0
    with pytest.raises(InvalidRequestError, match="top_p: .* got 0.0"):
        sampling.clone()


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4


def test_as_many_stop_tokens_and_biases_as_are_allowed_are_taken():
    sampling = SamplingParams(
        stop_token_ids=range(1024), logit_bias=dict.fromkeys(range(1024), 1.0), min_tokens=1
    )
    row = RowSampling.build(request_with(sampling), {*range(1024), 5000})
    assert list(unpack_ints(row.min_tokens_stop_ids)) == [*range(1024), 5000]


def test_the_choices_of_a_request_differ_by_their_number_only():
    sampling = SamplingParams(n=3, min_tokens=1, stop_token_ids=(9, 5), logit_bias={1: 2.0})
    request = structs.replace(request_with(sampling), bad_words=((5,), (7, 8)))
    first = RowSampling.build(request, {2, 5, 9})
    assert [*unpack_ints(first.bad_words)] == [1, 5, 2, 7, 8]
    for choice, slot in enumerate((4, 9, 6)):
        row = first.of_choice(choice, slot)
        assert (row.choice, row.mask_slot) == (choice, slot)
        assert row.of_choice(0) == first
        assert row.bias_ids is first.bias_ids
