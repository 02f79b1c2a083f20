"""Whose sampling parameters stand: what was asked for, the checkpoint's, a command's, the API's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from streamkv.commands.options import SamplingConfig
from streamkv.commands.sampling import check_sampling, sampling_within, why_cut
from streamkv.errors import ConfigError


def engine(**defaults: float) -> Any:
    return SimpleNamespace(sampling_defaults=defaults, info=SimpleNamespace(max_model_len=1000))


def test_what_was_asked_beats_the_checkpoint_which_beats_the_commands_own():
    asked = SamplingConfig(temperature=0.0, stop=("END",))
    checkpoint = engine(temperature=0.6, top_p=0.9, max_tokens=50)
    sampling = sampling_within(checkpoint, asked, 10, top_p=0.5, min_p=0.1, max_tokens=7)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.0, 0.9, 0.1)
    assert (sampling.max_tokens, sampling.stop, sampling.top_k) == (50, ("END",), 0)


@pytest.mark.parametrize(
    ("asked", "defaults", "fallbacks", "max_tokens", "reason"),
    [
        ({}, {}, {}, 100, "the context of 1,000 tokens"),  # all there is room for
        ({}, {}, {"max_tokens": 256}, 100, "the context"),
        ({}, {"max_tokens": 2048}, {}, 100, "the context"),
        ({"max_tokens": 5000}, {}, {}, 100, "the context"),
        ({"max_tokens": 30}, {"max_tokens": 20}, {"max_tokens": 10}, 30, "--max-tokens allows 30"),
        ({}, {"max_tokens": 20}, {}, 20, "the checkpoint's max_new_tokens allows 20"),
    ],
)
def test_an_answer_is_never_longer_than_there_is_room_for_and_says_what_cut_it(
    asked, defaults, fallbacks, max_tokens, reason
):
    options, checkpoint = SamplingConfig(**asked), engine(**defaults)
    sampling = sampling_within(checkpoint, options, 900, **fallbacks)
    assert sampling.max_tokens == max_tokens
    assert why_cut(checkpoint, options, sampling, 900).startswith(reason)


def test_what_makes_no_sense_names_the_flag():
    with pytest.raises(ConfigError, match=r"^--repetition-penalty: expected a number in \(0"):
        check_sampling(SamplingConfig(repetition_penalty=0.0))
