"""Rows: what the device side remembers of each running sequence, between steps.

Owns the token buffers, block tables and sampling parameters by row, and turns the changes of a
StepInput into arrays. Knows nothing of models or tensors: numpy only. Owned by the device thread.
Invariant: nothing that a kernel will use as an index leaves here unchecked; a step that breaks
the protocol is a ValueError, not a wild read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol import Ask, CopyKind, RowAdded, StepInput
from .philox import uniforms
from .sampler import GREEDY_BELOW, Edits, SamplingBatch

Int32s = NDArray[np.int32]

TINIEST_PENALTY = float(np.finfo(np.float32).tiny)
SAMPLING_FIELDS = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("top_k", "i8"),
        ("min_p", "f8"),
        ("presence_penalty", "f8"),
        ("frequency_penalty", "f8"),
        ("repetition_penalty", "f8"),
        ("seed", "i8"),
        ("choice", "i4"),
        ("min_tokens", "i8"),
        ("num_logprobs", "i8"),
        ("edited", "?"),  # masks, biases or penalties can apply: the row needs a closer look
    ]
)


class BatchArrays(NamedTuple):
    """`ops.Batch` in numpy, int32; shapes as there."""

    token_ids: Int32s
    positions: Int32s
    slots: Int32s
    query_start: Int32s
    context_lens: Int32s
    block_tables: Int32s
    logit_rows: Int32s


class Asking(NamedTuple):
    """The rows of a step that want a token, in `scheduled`'s order."""

    rows: Int32s  # [R]
    positions: Int32s  # [R] where the token will stand


class Rows:
    """State of rows 0 .. num_rows-1. All arrays are committed lazily, by the rows that are used."""

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        num_host_slots: int = 0,
    ) -> None:
        self._block_size = block_size
        self._pool_blocks = num_blocks
        self._host_slots = num_host_slots
        self._vocab_size = vocab_size
        # One token more than the context: a last one may be sampled that is never computed.
        self._tokens = np.zeros((num_rows, max_model_len + 1), np.int32)
        self._block_tables = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self._num_tokens = np.zeros(num_rows, np.int64)  # known, sampled ones included
        self._num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._sampling = np.zeros(num_rows, SAMPLING_FIELDS)
        self._stop_ids: dict[int, NDArray[np.int64]] = {}
        self._biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def apply(self, step: StepInput) -> None:
        """Removed, then added, then appended. (Copies are checked here and made by the caller.)"""
        for copy in np.frombuffer(step.copies, np.int32).reshape(-1, 4).tolist():
            _check_copy(copy, self._pool_blocks, self._host_slots)
        removed = np.frombuffer(step.removed, np.int32)
        appended = np.frombuffer(step.appended, np.int32).reshape(-1, 2)
        _check_range("removed rows", removed, len(self._tokens))
        _check_range("appended rows", appended[:, 0], len(self._tokens))
        for row in removed.tolist():
            self._num_tokens[row] = self._num_blocks[row] = 0
            self._stop_ids.pop(row, None)
            self._biases.pop(row, None)
        for added in step.added:
            self._add(added)
        for row, block_id in appended.tolist():
            place = self._num_blocks[row]
            if not 0 <= block_id < self._pool_blocks or place == self._block_tables.shape[1]:
                raise ValueError(f"row {row} can't take block {block_id} as its number {place}")
            self._block_tables[row, place] = block_id
            self._num_blocks[row] = place + 1

    def batch(self, scheduled: Int32s) -> BatchArrays:
        """The inputs of a step from `scheduled` [n, 4]: (row, start, count, Ask)."""
        rows, starts, counts, asks = scheduled.T
        context_lens = starts + counts
        self._check(rows, starts, counts, context_lens)
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        if query_start[-1] == len(rows):  # one token each: nothing to spread out
            token_rows, positions = rows, starts.copy()
        else:
            token_rows = np.repeat(rows, counts)
            offsets = np.repeat(starts - query_start[:-1], counts)
            positions = np.arange(query_start[-1], dtype=np.int32) + offsets
        block_index, offset = np.divmod(positions, np.int32(self._block_size))
        width = -(-int(context_lens.max()) // self._block_size)
        return BatchArrays(
            token_ids=self._tokens[token_rows, positions],
            positions=positions,
            slots=self._block_tables[token_rows, block_index] * np.int32(self._block_size) + offset,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=self._block_tables[rows, :width],
            logit_rows=query_start[1:][asks == Ask.SAMPLE] - np.int32(1),
        )

    def asking(self, scheduled: Int32s) -> Asking:
        """Who gets a token from a step."""
        asking = scheduled[scheduled[:, 3] == Ask.SAMPLE]
        return Asking(asking[:, 0], asking[:, 1] + asking[:, 2])

    def keep(self, asking: Asking, token_ids: Int32s) -> None:
        """Append the sampled tokens to their rows."""
        self._tokens[asking.rows, asking.positions] = token_ids
        self._num_tokens[asking.rows] = asking.positions + 1

    def sampling_batch(self, asking: Asking) -> SamplingBatch:
        """What the sampler needs to know of the asking rows."""
        sampling = self._sampling[asking.rows]
        if (sampling["temperature"] >= GREEDY_BELOW).any():
            draws = uniforms(
                np.ascontiguousarray(sampling["seed"]), asking.positions, sampling["choice"]
            )
        else:
            draws = np.zeros(len(sampling))
        edited = np.flatnonzero(sampling["edited"]).tolist()
        return SamplingBatch(
            temperature=sampling["temperature"],
            top_k=sampling["top_k"],
            top_p=sampling["top_p"],
            min_p=sampling["min_p"],
            uniforms=draws,
            num_logprobs=sampling["num_logprobs"],
            added=_join(self._added(index, asking) for index in edited),
            repeated=_join(self._repeated(index, asking) for index in edited),
            subtracted=_join(self._subtracted(index, asking) for index in edited),
            masked=_join(self._masked(index, asking) for index in edited),
        )

    def _add(self, added: RowAdded) -> None:
        row, sampling = added.row, added.sampling
        tokens = np.frombuffer(added.token_ids, np.int32)
        blocks = np.frombuffer(added.block_ids, np.int32)
        if not 0 <= row < len(self._tokens):
            raise ValueError(f"added row {row}: expected 0 .. {len(self._tokens) - 1}")
        _check_range(f"row {row}: token ids", tokens, self._vocab_size)
        _check_range(f"row {row}: block ids", blocks, self._pool_blocks)
        if len(tokens) > self._tokens.shape[1] or len(blocks) > self._block_tables.shape[1]:
            raise ValueError(f"row {row}: {len(tokens)} tokens in {len(blocks)} blocks don't fit")
        self._tokens[row, : len(tokens)] = tokens
        self._block_tables[row, : len(blocks)] = blocks
        self._block_tables[row, len(blocks) :] = 0
        self._num_tokens[row] = len(tokens)
        self._num_prompt_tokens[row] = added.num_prompt_tokens
        self._num_blocks[row] = len(blocks)

        # A token that the vocabulary doesn't have is never sampled: masking it is done.
        stop_ids = np.frombuffer(sampling.min_tokens_stop_ids, np.int32).astype(np.int64)
        stop_ids = stop_ids[stop_ids < self._vocab_size]
        if len(stop_ids) == self._vocab_size:  # nothing would be left to choose
            stop_ids = stop_ids[:0]
        self._stop_ids[row] = stop_ids
        bias_ids = np.frombuffer(sampling.bias_ids, np.int32).astype(np.int64)
        known = bias_ids < self._vocab_size
        bias_values = np.frombuffer(sampling.bias_values, np.float32)
        self._biases[row] = (bias_ids[known], bias_values[known])
        penalized = (
            sampling.presence_penalty or sampling.frequency_penalty
        ) or sampling.repetition_penalty != 1.0
        self._sampling[row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            sampling.seed,
            sampling.choice,
            sampling.min_tokens,
            sampling.num_logprobs,
            bool(penalized or len(bias_ids) or sampling.min_tokens),
        )

    def _check(self, rows: Int32s, starts: Int32s, counts: Int32s, ends: Int32s) -> None:
        """Raise unless every scheduled token and its block is known."""
        _check_range("scheduled rows", rows, len(self._tokens))
        wrong = (starts < 0) | (counts < 1) | (ends > self._num_tokens[rows])
        wrong |= ends > self._num_blocks[rows] * self._block_size
        if wrong.any():
            at = int(wrong.argmax())
            row = int(rows[at])
            raise ValueError(
                f"row {row}: positions {starts[at]} to {ends[at]} are scheduled, known are "
                f"{self._num_tokens[row]} tokens in {self._num_blocks[row]} blocks"
            )

    def _added(self, index: int, asking: Asking) -> Edits:
        """The biases."""
        token_ids, values = self._biases[int(asking.rows[index])]
        return _edits(index, token_ids, values)

    def _masked(self, index: int, asking: Asking) -> Edits:
        """Stop tokens, while min_tokens aren't reached."""
        row, position = int(asking.rows[index]), int(asking.positions[index])
        if position - int(self._num_prompt_tokens[row]) >= self._sampling["min_tokens"][row]:
            return Edits.none()
        stop_ids = self._stop_ids[row]
        return _edits(index, stop_ids, np.full(len(stop_ids), -np.inf))

    def _repeated(self, index: int, asking: Asking) -> Edits:
        """The repetition penalty, on every token of prompt and output."""
        row, position = int(asking.rows[index]), int(asking.positions[index])
        penalty = self._sampling["repetition_penalty"][row]
        if penalty == 1.0:
            return Edits.none()
        seen = np.unique(self._tokens[row, :position])
        # In float32 a tinier one is zero, and a logit of zero divided by it is not a number.
        return _edits(index, seen, np.full(len(seen), max(penalty, TINIEST_PENALTY)))

    def _subtracted(self, index: int, asking: Asking) -> Edits:
        """Frequency (per occurrence) and presence (once) penalties, on tokens of the output."""
        row, position = int(asking.rows[index]), int(asking.positions[index])
        frequency = self._sampling["frequency_penalty"][row]
        presence = self._sampling["presence_penalty"][row]
        if not frequency and not presence:
            return Edits.none()
        output = self._tokens[row, self._num_prompt_tokens[row] : position]
        token_ids, occurrences = np.unique(output, return_counts=True)
        return _edits(index, token_ids, frequency * occurrences + presence)


def _edits(index: int, token_ids: NDArray[np.integer], values: NDArray[np.floating]) -> Edits:
    """Edits of one row of the logits."""
    rows = np.full(len(token_ids), index, np.int64)
    return Edits(rows, token_ids.astype(np.int64), values.astype(np.float32))


def _join(parts: Iterable[Edits]) -> Edits:
    found = [Edits.none(), *parts]
    return Edits(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def _check_copy(copy: list[int], num_blocks: int, num_slots: int) -> None:
    number, kind, source, target = copy
    if number < 0:
        raise ValueError(f"copies: expected numbers from 0, got {number}")
    if kind not in (CopyKind.BLOCK, CopyKind.OUT, CopyKind.IN):
        raise ValueError(f"copy {number}: expected a kind of 0 to 2, got {kind}")
    for what, place, is_slot in (
        ("source", source, kind == CopyKind.IN),
        ("target", target, kind == CopyKind.OUT),
    ):
        end = num_slots if is_slot else num_blocks
        if not 0 <= place < end:
            raise ValueError(
                f"copy {number}: {what}: expected a {'host slot' if is_slot else 'block'} below "
                f"{end}, got {place}"
            )


def _check_range(what: str, values: Int32s, end: int) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < end):
        raise ValueError(f"{what}: expected 0 .. {end - 1}, got {values.min()} .. {values.max()}")
