"""What a request must satisfy before it may enter, apart from the scheduler's own limits.

Owns the checks of prompts and sampling parameters against the facts of the loaded model, and what
is filled in at admission: the seed and max_tokens. It must not know streams, the scheduler or the
event loop. Invariant: a request that passes can't fail on the device for what it says.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from ..errors import ContextLengthError, InvalidRequestError
from ..protocol import Request, RunnerInfo, SamplingParams


def check_prompt(prompt: object) -> str | tuple[int, ...]:
    """The prompt as text or token ids. InvalidRequestError unless it is one and not empty."""
    if isinstance(prompt, (str, Sequence)) and not isinstance(prompt, (bytes, bytearray)):
        if not prompt:
            raise InvalidRequestError(
                "prompt: expected at least one token, got none", param="prompt"
            )
        if isinstance(prompt, str):
            return prompt
        wrong = next((item for item in prompt if type(item) is not int), None)
        if wrong is None:
            return tuple(prompt)
        got = f"a sequence with {wrong!r} in it"
    else:
        got = type(prompt).__name__
    raise InvalidRequestError(f"prompt: expected text or token ids, got {got}", param="prompt")


def check_unicode(text: str) -> None:
    """InvalidRequestError if the text has half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"prompt: expected Unicode text, got a lone surrogate at character {exc.start}",
            param="prompt",
        ) from None


def build_request(
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    info: RunnerInfo,
    *,
    request_id: str,
    model: str,
    arrival_s: float,
    priority: int,
    cache_salt: str,
) -> Request:
    """The request as the scheduler takes it. InvalidRequestError, ContextLengthError."""
    if not prompt_token_ids:
        raise InvalidRequestError("prompt: expected at least one token, got none", param="prompt")
    _check_vocabulary("prompt", prompt_token_ids, info.vocab_size)
    _check_vocabulary("logit_bias", sampling.logit_bias, info.vocab_size)
    _check_vocabulary("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    return Request(
        request_id=request_id,
        model=model,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        max_tokens=_resolve_max_tokens(len(prompt_token_ids), sampling, info.max_model_len),
        arrival_s=arrival_s,
        priority=priority,
        cache_salt=cache_salt,
    )


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{name}: expected token ids from 0 to {vocab_size - 1}, got {wrong}", param=name
        )


def _resolve_max_tokens(
    num_prompt_tokens: int, sampling: SamplingParams, max_model_len: int
) -> int:
    """max_tokens, or all that the context has room for."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"prompt: expected at most {max_model_len - 1} tokens, which leaves one of the context "
            f"of {max_model_len} for the answer, got {num_prompt_tokens}; shorten the prompt",
            param="prompt",
        )
    for name, wanted in (("max_tokens", sampling.max_tokens), ("min_tokens", sampling.min_tokens)):
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"{name}: the prompt's {num_prompt_tokens} tokens leave {room} of the context of "
                f"{max_model_len}, got {wanted}; shorten the prompt or lower {name}",
                param=name,
            )
    return room if sampling.max_tokens is None else sampling.max_tokens
