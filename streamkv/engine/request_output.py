"""What `LLM.generate` returns, in the shape that vLLM gives it.

Owns the shapes and how completions become them. It must not know the engine. Fields that are always
None are vLLM's for what is not done here. Invariant: one CompletionOutput for each choice that was
asked for, in order; fewer only where a beam search has found fewer answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .outputs import Completion, TokenLogprob


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """A token's natural-log probability at a position."""

    logprob: float
    rank: int | None = None  # 1 = most likely
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None  # None unless logprobs, best_of or beams were asked for
    logprobs: list[dict[int, Logprob]] | None  # the sampled token first, then the most likely
    routed_experts: None = None
    lora_request: None = None
    finish_reason: str | None = None  # "stop", "length", or "error": see RequestOutput.error
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """When it happened, in seconds of the monotonic clock."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None


class RequestOutput(msgspec.Struct, kw_only=True):
    """One prompt and what the model made of it."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    # None of its first token; then as in `logprobs`. None unless they were asked for.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    metrics: RequestMetrics | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    error: str = ""  # why the device failed at it: its outputs are empty then


def completion_output(completion: Completion, *, has_logprobs: bool) -> CompletionOutput:
    """A choice that has ended."""
    logprobs = completion.logprobs
    return CompletionOutput(
        index=completion.choice,
        text=completion.text,
        token_ids=list(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=list(map(_position, logprobs)) if has_logprobs else None,
        finish_reason=str(completion.finish_reason),
        stop_reason=completion.stop_reason,
    )


def failed_output(index: int) -> CompletionOutput:
    """A choice of a request that failed on the device."""
    return CompletionOutput(
        index=index,
        text="",
        token_ids=[],
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="error",
    )


def prompt_logprobs(
    positions: Sequence[TokenLogprob | None],
) -> list[dict[int, Logprob] | None] | None:
    """Of a prompt's tokens; None for none."""
    return [None if one is None else _position(one) for one in positions] or None


def _position(sampled: TokenLogprob) -> dict[int, Logprob]:
    found = {sampled.token_id: Logprob(sampled.logprob, sampled.rank, sampled.token)}
    for rank, top in enumerate(sampled.top, start=1):
        found.setdefault(top.token_id, Logprob(top.logprob, rank, top.token))
    return found
