"""FakeRow: what the FakeRunner knows of a row, and which tokens may come next in it. Besides, what
a step asks of rows, and what it gives.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple

from fake_model import fake_score, next_token, tokens_left

from streamkv.protocol import (
    RowAdded,
    RowLogprobs,
    StepInput,
    StepOutput,
    pack_ints,
    unpack_ints,
)


class Scheduled(NamedTuple):
    row_id: int
    start: int
    count: int
    ask: int

    @property
    def end(self) -> int:
        return self.start + self.count


class Results:
    """Of the rows of a step."""

    def __init__(self) -> None:
        self.sampled: list[int] = []
        self.logprobs: list[RowLogprobs | None] = []
        self.failed: list[int] = []
        self.deferred: list[int] = []
        self.scored: list[RowLogprobs] = []

    def add(self, token_id: int, logprobs: RowLogprobs | None) -> None:
        self.sampled.append(token_id)
        self.logprobs.append(logprobs)

    def pass_over(self, places: list[int]) -> None:
        """A row without a token; its place goes to `failed` or `deferred`."""
        places.append(len(self.sampled))
        self.add(0, None)


class FakeRow:
    def __init__(self, added: RowAdded) -> None:
        self.token_ids = unpack_ints(added.token_ids)
        self.block_table = list(unpack_ints(added.block_ids))
        self.num_prompt_tokens = added.num_prompt_tokens
        self.sampling = sampling = added.sampling
        self.is_lost = False  # a step with it failed; what it samples from now on means nothing
        self.is_void = False  # its last token did not come: it waits to be asked for it again
        self.stop_ids = unpack_ints(sampling.min_tokens_stop_ids)
        self.allowed = frozenset(unpack_ints(sampling.allowed_ids)) or None
        self.bad_words = _words(unpack_ints(sampling.bad_words))

    def sample(
        self,
        context_crc: int,
        vocab_size: int,
        avoid: Collection[int],
        mask: frozenset[int] | None,
    ) -> int:
        """Its next token, which it keeps."""
        sampling, left = self.sampling, None
        is_short = len(self.token_ids) - self.num_prompt_tokens < sampling.min_tokens
        if is_short or self.bad_words or not (mask is None and self.allowed is None):
            left = tokens_left(
                vocab_size,
                self.token_ids[self.num_prompt_tokens :].tolist(),
                mask=mask,
                allowed=self.allowed,
                bad_words=self.bad_words,
                stop_ids=self.stop_ids if is_short else (),
            )
        token_id = next_token(
            context_crc,
            vocab_size,
            avoid=avoid,
            allowed=left,
            temperature=sampling.temperature,
            seed=sampling.seed,
            choice=sampling.choice,
        )
        self.token_ids.append(token_id)
        return token_id

    def num_to_score(self, start: int, count: int) -> int:
        """Of its prompt's tokens that follow these positions."""
        return min(start + count + 1, self.num_prompt_tokens) - (start + 1)

    def score(
        self,
        cached: array[int],
        start: int,
        count: int,
        vocab_size: int,
        *,
        is_finite: bool,
    ) -> list[RowLogprobs]:
        """Of its prompt's tokens that follow these positions, after what is cached of the context
        of each."""
        crc = zlib.crc32(cached[:start].tobytes())
        scores: list[RowLogprobs] = []
        for position in range(start, start + self.num_to_score(start, count)):
            crc = zlib.crc32(cached[position : position + 1].tobytes(), crc)
            scores.append(
                fake_score(
                    crc,
                    self.token_ids[position + 1],
                    self.sampling.num_prompt_logprobs,
                    vocab_size,
                    is_finite=is_finite,
                )
            )
        return scores


def _words(packed: array[int]) -> list[list[int]]:
    words: list[list[int]] = []
    while packed:
        end = 1 + packed[0]
        words.append(packed[1:end].tolist())
        packed = packed[end:]
    return words


def failed_output(step: StepInput, error: str, done: list[int], not_done: list[int]) -> StepOutput:
    return StepOutput(
        step_id=step.step_id,
        sampled=b"",
        error=error,
        copies_done=pack_ints(done),
        copies_failed=pack_ints(not_done),
    )


def groups(packed: bytes, size: int) -> Iterator[tuple[int, ...]]:
    values = iter(unpack_ints(packed))
    return zip(*[values] * size, strict=True)
