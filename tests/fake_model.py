"""The model of the FakeRunner: the next token is a hash of the context. And its oracles."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Collection, Sequence

from streamkv.core.beam import BeamSearch
from streamkv.protocol import RowLogprobs, pack_ints


def next_token(
    context_crc: int,
    vocab_size: int,
    *,
    avoid: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
    choice: int = 0,
) -> int:
    """The token after a context with this CRC-32. Seed and choice count above temperature 0."""
    if temperature > 0:
        context_crc = zlib.crc32(struct.pack("=qi", seed, choice), context_crc)
    token_id = context_crc % vocab_size
    while token_id in avoid:
        token_id = (token_id + 1) % vocab_size
    return token_id


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num: int,
    vocab_size: int,
    *,
    avoid: Collection[int] = (),
    end_token_ids: Collection[int] = (),
    min_tokens: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    choice: int = 0,
) -> list[int]:
    """What FakeRunner answers to a prompt: at most `num` tokens, to the first of `end_token_ids`.

    Sequential: it knows no blocks, batches or steps.
    """
    crc = zlib.crc32(pack_ints(prompt_token_ids))
    output: list[int] = []
    while len(output) < num and not (output and output[-1] in end_token_ids):
        masked = {*avoid, *end_token_ids} if len(output) < min_tokens else avoid
        token_id = next_token(
            crc, vocab_size, avoid=masked, temperature=temperature, seed=seed, choice=choice
        )
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
