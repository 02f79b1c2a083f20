"""What a request must satisfy before it may enter, apart from the scheduler's own limits.

Owns the checks of prompts and sampling parameters against the facts of the loaded model, and what
is filled in at admission: the seed (by `seed_source`) and max_tokens. It must not know streams, the
scheduler or the event loop. Invariant: a request that passes can't fail on the device for what it
says.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

from ..errors import ContextLengthError, InvalidRequestError
from ..plain import plain
from ..protocol import Request, RunnerInfo, SamplingParams
from ..text.tokenizer import Tokenizer

SESSION_TTL_S = 3600.0
MAX_SESSION_TTL_S = 7 * 86400.0


def seed_source(seed: int) -> Callable[[], int]:
    """Where requests without a seed get theirs: the same ones in the same order at each start, or
    with -1 ones that nobody can foresee."""
    source = random.SystemRandom() if seed < 0 else random.Random(seed)
    return functools.partial(source.getrandbits, 63)


def check_prompt(
    prompt: object, info: RunnerInfo, num_kept: int | None = None
) -> str | tuple[int, ...]:
    """The prompt as text or token ids, the last `num_kept` of them. InvalidRequestError unless it
    is one and not empty.

    ContextLengthError for too many ids, before any of them is looked at.
    """
    prompt = plain(prompt)
    if isinstance(prompt, (str, Sequence)) and not isinstance(prompt, (bytes, bytearray)):
        if not prompt:
            raise InvalidRequestError(
                "prompt: expected at least one token, got none", param="prompt"
            )
        if isinstance(prompt, str):
            return prompt
        if num_kept is not None:
            prompt = prompt[-num_kept:]
        check_prompt_len(len(prompt), info)
        if set(map(type, prompt)) != {int}:
            prompt = tuple(map(plain, prompt))
        if set(map(type, prompt)) == {int}:
            return tuple(prompt)
        wrong = next(item for item in prompt if type(item) is not int)
        got = f"a sequence with {wrong!r} in it"
    else:
        got = type(prompt).__name__
    raise InvalidRequestError(f"prompt: expected text or token ids, got {got}", param="prompt")


def num_kept_tokens(sampling: SamplingParams, info: RunnerInfo) -> int | None:
    """How many of a prompt's last tokens are kept; None: all of them."""
    num_kept = sampling.truncate_prompt_tokens
    if num_kept != -1:
        return num_kept
    num_wanted = sampling.min_tokens if sampling.max_tokens is None else sampling.max_tokens
    return max(info.max_model_len - max(num_wanted, 1), 1)


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The ways to write them: as they begin a text, and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if token_ids:
                found[token_ids] = None
    return tuple(found)


def check_prompt_len(num_tokens: int, info: RunnerInfo, name: str = "prompt") -> None:
    """ContextLengthError unless the context has room for an answer."""
    longest = info.max_model_len
    if num_tokens >= longest:
        raise ContextLengthError(
            f"{name}: expected at most {longest - 1} tokens, which leaves one of the context "
            f"of {longest} for the answer, got {num_tokens}; shorten the {name}"
            f"{_or_more_memory(info, num_tokens + 1)}",
            param=name,
        )


def check_name(name: str, value: object) -> None:
    """InvalidRequestError unless `value` is text that can be written down."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name}: expected text, got {type(value).__name__}", param=name)
    check_unicode(value, name)


def check_priority(priority: object) -> None:
    """InvalidRequestError unless requests can be ordered by it."""
    if type(priority) is not int:
        raise InvalidRequestError(
            f"priority: expected a whole number, got {priority!r}", param="priority"
        )


def check_session(session_id: object, ttl_s: object, *, can_keep: bool) -> float:
    """For how many seconds it is kept. InvalidRequestError unless it can be, under that name."""
    check_name("session_id", session_id)
    if session_id and not can_keep:
        raise InvalidRequestError(
            "session_id: expected none, as prefix caching is off; leave it out, or start the "
            "server with --enable-prefix-caching",
            param="session_id",
        )
    if ttl_s is None:
        return SESSION_TTL_S
    if not session_id:
        raise InvalidRequestError(
            "session_ttl: expected a session_id (or the header X-Session-Id) beside it, got none; "
            "name the session, or leave it out",
            param="session_ttl",
        )
    if type(ttl_s) not in (int, float) or not 0 <= cast("float", ttl_s) <= MAX_SESSION_TTL_S:
        raise InvalidRequestError(
            f"session_ttl: expected seconds, 0 to {MAX_SESSION_TTL_S:.0f}, got {ttl_s!r:.100}",
            param="session_ttl",
        )
    return float(cast("float", ttl_s))


def check_unicode(text: str, name: str = "prompt") -> None:
    """InvalidRequestError if the text has half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"{name}: expected Unicode text, got a lone surrogate at character {exc.start}",
            param=name,
        ) from None


def check_text(text: str, tokenizer: Tokenizer, info: RunnerInfo, name: str = "prompt") -> None:
    """`check_unicode`, and ContextLengthError if the text has too many tokens however it is
    tokenized."""
    check_unicode(text, name)
    num_tokens = tokenizer.min_num_tokens(text)
    if num_tokens >= info.max_model_len:
        raise ContextLengthError(
            f"{name}: expected at most {info.max_model_len - 1} tokens, got {len(text)} "
            f"characters, which are at least {num_tokens} tokens; shorten the prompt"
            f"{_or_more_memory(info, num_tokens + 1, 'at least ')}",
            param=name,
        )


def check_num_messages(
    messages: Sequence[object], info: RunnerInfo, name: str = "messages"
) -> None:
    """ContextLengthError for more messages (and tool calls in them) than the context has tokens,
    before any is read."""
    num_messages = len(messages)
    if num_messages <= info.max_model_len:
        num_messages += sum(map(_num_tool_calls, messages))
    if num_messages > info.max_model_len:
        raise ContextLengthError(
            f"{name}: expected at most {info.max_model_len} messages, one for each token of the "
            f"context, got {num_messages}; send fewer"
            f"{_or_more_memory(info, num_messages, 'at least ')}",
            param=name,
        )


def build_request(
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    info: RunnerInfo,
    draw_seed: Callable[[], int],
    *,
    model: str,
    request_id: str = "",
    arrival_s: float = 0.0,
    priority: int = 0,
    cache_salt: str = "",
    session_id: str = "",
    session_ttl_s: float = 0.0,
    bad_words: tuple[tuple[int, ...], ...] = (),
    mask_slots: tuple[int, ...] = (),
    wants_progress: bool = False,
) -> Request:
    """The request as the scheduler takes it. InvalidRequestError, ContextLengthError."""
    if not prompt_token_ids:
        raise InvalidRequestError("prompt: expected at least one token, got none", param="prompt")
    check_prompt_len(len(prompt_token_ids), info)
    _check_vocabulary("prompt", prompt_token_ids, info.vocab_size)
    _check_vocabulary("logit_bias", sampling.logit_bias, info.vocab_size)
    _check_vocabulary("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    _check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or (), info.vocab_size)
    _check_vocabulary("bad_words", [i for word in bad_words for i in word], info.vocab_size)
    max_tokens = _resolve_max_tokens(len(prompt_token_ids), sampling, info)
    seed = draw_seed() if sampling.seed is None else sampling.seed
    if sampling.structured_outputs is not None:  # its masks leave ends only where they must
        sampling = sampling.clone(ignore_eos=False)
    return Request(
        request_id=request_id,
        model=model,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        seed=seed,
        max_tokens=max_tokens,
        arrival_s=arrival_s,
        priority=priority,
        cache_salt=cache_salt,
        session_id=session_id,
        session_ttl_s=session_ttl_s,
        bad_words=bad_words,
        mask_slots=mask_slots,
        wants_progress=wants_progress,
    )


def _num_tool_calls(message: object) -> int:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return len(calls) if isinstance(calls, Sequence) else 0


def _check_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and not (0 <= min(token_ids) and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{name}: expected token ids from 0 to {vocab_size - 1}, got {wrong}", param=name
        )


def _or_more_memory(info: RunnerInfo, num_tokens: int, at_least: str = "") -> str:
    """The other remedy, if so many tokens fit in the model's context, but not in KV memory. There
    may be more of them where `at_least` says so."""
    if num_tokens > info.full_model_len:
        return ""
    return (
        f", or start with more KV memory: {at_least}{num_tokens} tokens need "
        f"{at_least}{-(-num_tokens // info.block_size)} KV blocks of {info.block_size}, there are "
        f"{info.num_blocks} ({info.kv_bound})"
    )


def _resolve_max_tokens(num_prompt_tokens: int, sampling: SamplingParams, info: RunnerInfo) -> int:
    """max_tokens, or all that the context has room for."""
    room = info.max_model_len - num_prompt_tokens
    for name, wanted in (("max_tokens", sampling.max_tokens), ("min_tokens", sampling.min_tokens)):
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"{name}: the prompt's tokens ({num_prompt_tokens}) leave {room} of the context of "
                f"{info.max_model_len}, got {wanted}; shorten the prompt or lower {name}"
                f"{_or_more_memory(info, num_prompt_tokens + wanted)}",
                param=name,
            )
    return room if sampling.max_tokens is None else sampling.max_tokens
