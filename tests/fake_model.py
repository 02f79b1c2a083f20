"""The model of the FakeRunner: the next token is a hash of the context. And its oracles."""

from __future__ import annotations

import itertools
import struct
import zlib
from array import array
from collections.abc import Collection, Iterable, Sequence

from fake_masks import FakeMatcher

from streamkv.core.beam import BeamSearch
from streamkv.protocol import RowLogprobs, pack_ints

# What devices say of a score whose logits are not.
NOT_FINITE = RowLogprobs(logprob=0.0, rank=0, top_ids=b"", top_logprobs=b"")


def next_token(
    context_crc: int,
    vocab_size: int,
    *,
    avoid: Collection[int] = (),
    allowed: Collection[int] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    choice: int = 0,
) -> int:
    """The token after a context with this CRC-32. Seed and choice count above temperature 0. Some
    are avoided where others are allowed."""
    if allowed is not None:
        allowed = {token_id for token_id in allowed if token_id not in avoid} or allowed
        avoid = ()
    if temperature > 0:
        context_crc = zlib.crc32(struct.pack("=qi", seed, choice), context_crc)
    token_id = context_crc % vocab_size
    while token_id in avoid or not (allowed is None or token_id in allowed):
        token_id = (token_id + 1) % vocab_size
    return token_id


def ends_of_bad_words(output: list[int], bad_words: Iterable[list[int]]) -> frozenset[int]:
    """Tokens that would complete one of them."""
    return frozenset(word[-1] for word in bad_words if [*output, word[-1]][-len(word) :] == word)


def tokens_left(
    vocab_size: int,
    output: list[int],
    *,
    mask: Collection[int] | None,
    allowed: Collection[int] | None,
    bad_words: Collection[list[int]] = (),
    stop_ids: Collection[int] = (),
) -> frozenset[int]:
    """What may come after `output`: what would leave no token yields to what comes before it."""
    left = frozenset(range(vocab_size))
    for tokens in (mask, allowed):
        if tokens is not None:
            left = left.intersection(tokens) or left
    for tokens in (ends_of_bad_words(output, bad_words), stop_ids):
        left = left.difference(tokens) or left
    return left


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num: int,
    vocab_size: int,
    *,
    avoid: Collection[int] = (),
    end_token_ids: Collection[int] = (),
    min_tokens: int = 0,
    allowed: Collection[int] | None = None,
    bad_words: Collection[list[int]] = (),
    grammar: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    choice: int = 0,
) -> list[int]:
    """What FakeRunner answers to a prompt: at most `num` tokens, to the first of `end_token_ids`.

    Sequential: it knows no blocks, batches or steps. `grammar` is the seed of a FakeMatcher.
    """
    crc = zlib.crc32(pack_ints(prompt_token_ids))
    output: list[int] = []
    matcher = None if grammar is None else FakeMatcher(grammar, vocab_size)
    while len(output) < num and not (output and output[-1] in end_token_ids):
        left = None
        if matcher is not None or allowed or bad_words or len(output) < min_tokens:
            left = tokens_left(
                vocab_size,
                output,
                mask=matcher and matcher.allowed,
                allowed=allowed,
                bad_words=bad_words,
                stop_ids=end_token_ids if len(output) < min_tokens else (),
            )
        token_id = next_token(
            crc,
            vocab_size,
            avoid=avoid,
            allowed=left,
            temperature=temperature,
            seed=seed,
            choice=choice,
        )
        if matcher is not None:
            matcher.consume(token_id)
        output.append(token_id)
        crc = zlib.crc32(pack_ints((token_id,)), crc)
    return output


def expected_beams(
    prompt_token_ids: Sequence[int],
    num: int,
    vocab_size: int,
    *,
    width: int,
    num_return: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    avoid: Collection[int] = (),
    end_token_ids: Collection[int] = (),
) -> list[list[int]]:
    """What FakeRunner's candidates make of a prompt, the best answer first. Sequential, as above:
    a beam is the CRC of its context."""
    search = BeamSearch(
        width,
        num_return=num_return,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        end_token_ids=end_token_ids,
        num_prompt_tokens=len(prompt_token_ids),
        max_num_tokens=len(prompt_token_ids) + num,
    )
    beams = [zlib.crc32(pack_ints(prompt_token_ids))]
    while not search.is_done:
        likely = [next_token(crc, vocab_size, avoid=avoid) for crc in beams]
        rows = [fake_logprobs(token_id, vocab_size, vocab_size) for token_id in likely]
        chosen = search.advance(rows)
        beams = [zlib.crc32(pack_ints((token_id,)), beams[beam]) for beam, token_id in chosen]
    return [[link.token_id for link in answer.links()] for answer in search.hypotheses()]


def fake_logprobs(token_id: int, num_logprobs: int, vocab_size: int) -> RowLogprobs:
    """Logprobs that depend on the most likely token, and so on the context: it comes first, then
    its successors."""
    num_logprobs = min(num_logprobs, vocab_size)
    logprob = -(1 + token_id % 7) / 8
    return RowLogprobs(
        logprob=logprob,
        rank=1,
        top_ids=pack_ints((token_id + i) % vocab_size for i in range(num_logprobs)),
        top_logprobs=array("f", (logprob - i / 4 for i in range(num_logprobs))).tobytes(),
    )


def fake_score(
    context_crc: int, token_id: int, num_logprobs: int, vocab_size: int, *, is_finite: bool = True
) -> RowLogprobs:
    """Of a token of a prompt, after a context with this CRC-32."""
    if not is_finite:
        return NOT_FINITE
    likely = fake_logprobs(context_crc % vocab_size, num_logprobs, vocab_size)
    logprob = -(1 + zlib.crc32(pack_ints((token_id,)), context_crc) % 1000) / 8
    return RowLogprobs(
        logprob=logprob,
        rank=1 + (token_id - context_crc) % vocab_size,
        top_ids=likely.top_ids,
        top_logprobs=likely.top_logprobs,
    )


def expected_scores(
    prompt_token_ids: Sequence[int], num_logprobs: int, vocab_size: int
) -> list[RowLogprobs]:
    """Of all tokens of a prompt but the first."""
    crc = 0
    scores: list[RowLogprobs] = []
    for token_id, next_id in itertools.pairwise(prompt_token_ids):
        crc = zlib.crc32(pack_ints((token_id,)), crc)
        scores.append(fake_score(crc, next_id, num_logprobs, vocab_size))
    return scores
