"""From what was asked for on the command line to SamplingParams.

Owns which default stands: what was asked, else the checkpoint's, else the API's. Invariant: what
was asked wrongly is a ConfigError before anything loads, and no answer is longer than its context.
"""

from __future__ import annotations

from typing import Any

from ..engine.async_engine import AsyncEngine
from ..errors import ConfigError, InvalidRequestError
from ..fields import flag_of
from ..protocol import SamplingParams
from .options import SamplingConfig


def check_sampling(options: SamplingConfig) -> None:
    """ConfigError, naming the flag, for a value that makes no sense."""
    try:
        SamplingParams(**options.asked())
    except InvalidRequestError as error:
        flag = flag_of(str(error.param))
        raise ConfigError(f"{flag}: {error.message.partition(': ')[2]}") from None


def why_cut(
    engine: AsyncEngine, options: SamplingConfig, sampling: SamplingParams, num_prompt_tokens: int
) -> str:
    """What ended an answer that was generated with this."""
    longest = engine.info.max_model_len
    if sampling.max_tokens == longest - num_prompt_tokens:
        return f"the context of {longest:,} tokens is full"
    if options.max_tokens is not None:
        return f"--max-tokens allows {options.max_tokens:,}"
    return (
        f"the checkpoint's max_new_tokens allows {sampling.max_tokens:,}; --max-tokens asks for "
        "more"
    )


def sampling_within(
    engine: AsyncEngine, options: SamplingConfig, num_prompt_tokens: int, **fallbacks: Any
) -> SamplingParams:
    """For an answer to a prompt of so many tokens. `fallbacks` stand where neither the options nor
    the checkpoint say otherwise; the answer is never longer than there is room for."""
    values = {"max_tokens": None, **fallbacks, **engine.sampling_defaults, **options.asked()}
    room = engine.info.max_model_len - num_prompt_tokens
    values["max_tokens"] = min(values["max_tokens"] or room, room)
    return SamplingParams(**values)
