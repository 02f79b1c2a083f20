"""What a reader of a stream sees: frozen values, no behaviour.

Owns the shapes of deltas, completions and usage. It must not know how tokens become text, nor how
they reach the reader. Invariant: of one choice's deltas exactly one, the last, has a
`finish_reason`.
"""

from __future__ import annotations

import msgspec

from ..protocol import FinishReason


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One of the most likely tokens at a position."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A sampled token's natural-log probability, and the most likely tokens at its position."""

    token_id: int
    token: str
    bytes: bytes  # what it added to the text: none if it was skipped, or ended it unseen
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[TopLogprob, ...]  # most likely first


class TokenDelta(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained since its last delta.

    `text` may be empty while `token_ids` is not: half a character, or what could be the start of a
    stop string, waits for the tokens that follow. Deltas with log-probabilities are cut to 64
    tokens.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # () or one per token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    cumulative_logprob: float | None = None  # in the last one: of all tokens, where it is known
    # Of one without tokens, on request: (computed, all) tokens of the prompt.
    progress: tuple[int, int] | None = None
    # Of one without tokens, where they were asked for: of more of the prompt's tokens, in order.
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class SoFar(msgspec.Struct, frozen=True, gc=False):
    """One choice, which may not have ended: all that was handed out or waits for its reader."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Completion(msgspec.Struct, frozen=True, gc=False):
    """One whole choice: its deltas, joined."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    cumulative_logprob: float | None = None  # None if nothing asked for log-probabilities


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens in and out. All choices share the prompt; their output is summed, and so is that of
    the candidates of `best_of` that are not given."""

    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was found in the prefix cache
    num_generated_tokens: int
