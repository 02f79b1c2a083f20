"""Rows: what the device side remembers of each running sequence, between steps.

Owns the token buffers and block tables by row, and turns the changes of a StepInput into arrays;
how rows are sampled is row_sampling.py's. Knows nothing of models or tensors: numpy only. Owned by
the device thread. Invariant: nothing that a kernel will use as an index leaves here unchecked; a
step that breaks the protocol is a ValueError, not a wild read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol import Ask, CopyKind, RowAdded, StepInput
from .asks import Asking, ScoredSpans, Scoring, check_asks, check_num_scored
from .row_sampling import RowSamplings, Text
from .sampler import SamplingBatch
from .token_masks import Words

Int32s = NDArray[np.int32]


class BatchArrays(NamedTuple):
    """`ops.Batch` in numpy, int32; shapes as there."""

    token_ids: Int32s
    positions: Int32s
    slots: Int32s
    query_start: Int32s
    context_lens: Int32s
    block_tables: Int32s
    logit_rows: Int32s


class Rows:
    """State of rows 0 .. num_rows-1. All arrays are committed lazily, by the rows that are used.

    `asking` and `scoring` are of the batch made last; its rows of logits are those of the first,
    then those of the other.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        num_host_slots: int = 0,
        has_mask: Callable[[int], bool] = lambda slot: False,
    ) -> None:
        """`has_mask`: whether a slot is on the mask board."""
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
        self._sampling = RowSamplings(num_rows, vocab_size, has_mask)
        self._deferred_at = np.full(num_rows, -1, np.int64)  # positions; -1: none is
        self.asking = Asking.none()
        self.scoring = Scoring.none()

    def apply(self, step: StepInput) -> None:
        """Removed, then added, then appended. (Copies are checked here and made by the caller.)"""
        self.asking, self.scoring = Asking.none(), Scoring.none()
        for copy in np.frombuffer(step.copies, np.int32).reshape(-1, 4).tolist():
            _check_copy(copy, self._pool_blocks, self._host_slots)
        removed = np.frombuffer(step.removed, np.int32)
        appended = np.frombuffer(step.appended, np.int32).reshape(-1, 2)
        _check_range("removed rows", removed, len(self._tokens))
        _check_range("appended rows", appended[:, 0], len(self._tokens))
        for row in removed.tolist():
            self._num_tokens[row] = self._num_blocks[row] = 0
            self._sampling.remove(row)
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
        rows, starts, counts, _ = scheduled.T
        context_lens = starts + counts
        self._check(rows, starts, counts, context_lens)
        check_asks(scheduled, self._sampling.fields["num_prompt_logprobs"][rows])
        scored = ScoredSpans.find(scheduled, self._num_prompt_tokens[rows])
        check_num_scored(scored)
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
            logit_rows=self._ask(scheduled, query_start, scored),
        )

    def _ask(self, scheduled: Int32s, query_start: Int32s, scored: ScoredSpans) -> Int32s:
        """Who asks for what; returns the rows that want logits. A row that was deferred and asks
        for the same position has its tokens again."""
        is_asking = scheduled[:, 3] & Ask.SAMPLE != 0
        rows, starts, counts, _ = scheduled[is_asking].T
        positions = starts + counts
        again = rows[self._deferred_at[rows] == positions]
        self._num_tokens[again] = self._deferred_at[again]
        self._deferred_at[again] = -1
        slots = self._sampling.fields["mask_slot"][rows]
        self.asking = Asking(rows, positions, slots, self._deferred_at[rows] >= 0)
        places, offsets = scored
        row_scored, start_scored = scheduled[places, 0], scheduled[places, 1]
        self.scoring = Scoring(
            self._tokens[row_scored, start_scored + offsets + 1],
            self._sampling.fields["num_prompt_logprobs"][row_scored],
        )
        last, inside = query_start[1:][is_asking] - 1, query_start[places] + offsets
        return np.concatenate((last, inside)).astype(np.int32)

    def keep(self, asking: Asking, token_ids: Int32s, deferred: Int32s) -> None:
        """Append the sampled tokens to their rows. `deferred` names those that got none: what
        follows is void until the row asks for this position again."""
        self._tokens[asking.rows, asking.positions] = token_ids
        self._num_tokens[asking.rows] = asking.positions + 1
        first = asking.at(deferred[~asking.is_void[deferred]])
        self._deferred_at[first.rows] = first.positions

    def sampling_batch(self, asking: Asking, grammar_mask: Callable[[int], Words]) -> SamplingBatch:
        """What the sampler needs to know of rows that ask. `grammar_mask` gives that of a slot."""
        texts = [
            Text(self._tokens[row, :position], int(self._num_prompt_tokens[row]))
            for row, position in zip(asking.rows.tolist(), asking.positions.tolist(), strict=True)
        ]
        return self._sampling.batch(asking, texts, grammar_mask)

    def _add(self, added: RowAdded) -> None:
        row = added.row
        tokens = np.frombuffer(added.token_ids, np.int32)
        blocks = np.frombuffer(added.block_ids, np.int32)
        if not 0 <= row < len(self._tokens):
            raise ValueError(f"added row {row}: expected 0 .. {len(self._tokens) - 1}")
        _check_range(f"row {row}: token ids", tokens, self._vocab_size)
        _check_range(f"row {row}: block ids", blocks, self._pool_blocks)
        if len(tokens) > self._tokens.shape[1] or len(blocks) > self._block_tables.shape[1]:
            raise ValueError(f"row {row}: {len(tokens)} tokens in {len(blocks)} blocks don't fit")
        self._sampling.add(row, added.sampling)
        self._tokens[row, : len(tokens)] = tokens
        self._block_tables[row, : len(blocks)] = blocks
        self._block_tables[row, len(blocks) :] = 0
        self._num_tokens[row] = len(tokens)
        self._num_prompt_tokens[row] = added.num_prompt_tokens
        self._num_blocks[row] = len(blocks)
        self._deferred_at[row] = -1

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
