"""Several sequences for one prompt: what `n`, `best_of` and beams ask for together."""

import math

import numpy as np
import pytest

from streamkv.errors import InvalidRequestError
from streamkv.protocol import Request, RowSampling, SamplingParams
from streamkv.sampling_params import BeamSearchParams


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
    return RowSampling.build(request, 0, {2, 3}).num_logprobs


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
