"""Deltas as a writer gets them: none is so long that reading it would hold up the event loop.

Owns how those that merged while their reader was slow are cut, and whole answers with them. Knows
nothing of what is read from them. Invariant: the pieces joined are the delta.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from ..engine.stream import TokenDelta, TokenStream

MAX_PIECE_LEN = 512  # characters, and tokens: reading a call from them may take a millisecond


def is_long(delta: TokenDelta) -> bool:
    """Whether it is to be cut."""
    return len(delta.text) > MAX_PIECE_LEN or len(delta.token_ids) > MAX_PIECE_LEN


def cut(delta: TokenDelta) -> Iterator[TokenDelta]:
    """The same in pieces that aren't long, of which the last says how it ended. One with
    log-probabilities stays whole: the engine has cut it by their number."""
    text, token_ids = delta.text, delta.token_ids
    num = 1 if delta.logprobs else -(-max(len(text), len(token_ids)) // MAX_PIECE_LEN)
    begin, first = 0, 0
    for i in range(1, num):
        end, last = i * len(text) // num, i * len(token_ids) // num
        yield TokenDelta(delta.choice, text[begin:end], token_ids[first:last])
        begin, first = end, last
    yield structs.replace(delta, text=text[begin:], token_ids=token_ids[first:])


def has_one_delta(stream: TokenStream) -> bool:
    """Whether a turn of the engine brings one delta at most."""
    sampling = stream.sampling
    wants_more = (sampling.logprobs, sampling.prompt_logprobs) != (None, None)
    return sampling.n == 1 and not wants_more and not stream.wants_progress
