"""How each row is sampled: protocol.RowSampling by row, and what the sampler needs of it.

Owns parameters, biases and masks of rows. Knows neither blocks nor models, and no token but those
it is shown: numpy only. Invariant: tokens that the vocabulary doesn't have are left out wherever
they are named; they are never sampled anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol import RowSampling
from .asks import Asking
from .philox import uniforms
from .sampler import GREEDY_BELOW, Edits, Masks, SamplingBatch
from .token_masks import TokenMasks, Words, num_mask_words

Int32s = NDArray[np.int32]

TINIEST_PENALTY = float(np.finfo(np.float32).tiny)
FIELDS = np.dtype(
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
        ("num_logprobs", "i8"),
        ("num_prompt_logprobs", "i8"),
        ("mask_slot", "i4"),
        ("edited", "?"),  # biases or penalties can apply: the row needs a closer look
    ]
)


class Text(NamedTuple):
    """Of a row, before the token that is to be sampled."""

    token_ids: Int32s
    num_prompt_tokens: int

    @property
    def output(self) -> Int32s:
        return self.token_ids[self.num_prompt_tokens :]


class RowSamplings:
    """Of rows 0 .. num_rows-1. `has_mask`: whether a slot is on the mask board."""

    def __init__(self, num_rows: int, vocab_size: int, has_mask: Callable[[int], bool]) -> None:
        self._vocab_size = vocab_size
        self._has_mask = has_mask
        self.fields = np.zeros(num_rows, FIELDS)
        self._masks: dict[int, TokenMasks] = {}
        self._biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def add(self, row: int, sampling: RowSampling) -> None:
        """ValueError for a slot that isn't on the board, and for bad words that are no words."""
        if sampling.mask_slot != -1 and not self._has_mask(sampling.mask_slot):
            raise ValueError(
                f"row {row}: expected a slot that is on the mask board, got {sampling.mask_slot}"
            )
        try:
            masks = TokenMasks.build(sampling, self._vocab_size)
        except ValueError as exc:
            raise ValueError(f"row {row}: {exc}") from exc
        self.remove(row)
        if masks is not None:
            self._masks[row] = masks
        bias_ids = np.frombuffer(sampling.bias_ids, np.int32).astype(np.int64)
        known = (bias_ids >= 0) & (bias_ids < self._vocab_size)
        bias_values = np.frombuffer(sampling.bias_values, np.float32)
        self._biases[row] = (bias_ids[known], bias_values[known])
        penalized = (
            sampling.presence_penalty or sampling.frequency_penalty
        ) or sampling.repetition_penalty != 1.0
        self.fields[row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            sampling.seed,
            sampling.choice,
            sampling.num_logprobs,
            sampling.num_prompt_logprobs,
            sampling.mask_slot,
            bool(penalized or len(bias_ids)),
        )

    def remove(self, row: int) -> None:
        self._masks.pop(row, None)
        self._biases.pop(row, None)

    def batch(
        self, asking: Asking, texts: Sequence[Text], grammar_mask: Callable[[int], Words]
    ) -> SamplingBatch:
        """For rows whose texts these are. `grammar_mask` gives that of a slot."""
        fields = self.fields[asking.rows]
        if (fields["temperature"] >= GREEDY_BELOW).any():
            draws = uniforms(
                np.ascontiguousarray(fields["seed"]), asking.positions, fields["choice"]
            )
        else:
            draws = np.zeros(len(fields))
        edited = np.flatnonzero(fields["edited"]).tolist()
        rows = asking.rows.tolist()
        return SamplingBatch(
            temperature=fields["temperature"],
            top_k=fields["top_k"],
            top_p=fields["top_p"],
            min_p=fields["min_p"],
            uniforms=draws,
            num_logprobs=fields["num_logprobs"],
            added=_join(_edits(index, *self._biases[rows[index]]) for index in edited),
            repeated=_join(self._repeated(index, rows[index], texts[index]) for index in edited),
            subtracted=_join(
                self._subtracted(index, rows[index], texts[index]) for index in edited
            ),
            masks=self._allowed(rows, texts, grammar_mask),
        )

    def _repeated(self, index: int, row: int, text: Text) -> Edits:
        """The repetition penalty, on every token of prompt and output."""
        penalty = self.fields["repetition_penalty"][row]
        if penalty == 1.0:
            return Edits.none()
        seen = np.unique(text.token_ids)
        # In float32 a tinier one is zero, and a logit of zero divided by it is not a number.
        return _edits(index, seen, np.full(len(seen), max(penalty, TINIEST_PENALTY)))

    def _subtracted(self, index: int, row: int, text: Text) -> Edits:
        """Frequency (per occurrence) and presence (once) penalties, on tokens of the output."""
        frequency = self.fields["frequency_penalty"][row]
        presence = self.fields["presence_penalty"][row]
        if not frequency and not presence:
            return Edits.none()
        token_ids, occurrences = np.unique(text.output, return_counts=True)
        return _edits(index, token_ids, frequency * occurrences + presence)

    def _allowed(
        self, rows: Sequence[int], texts: Sequence[Text], grammar_mask: Callable[[int], Words]
    ) -> Masks:
        """Of the rows that may not get any token."""
        found: dict[int, Words] = {}
        for index, row in enumerate(rows):
            masks = self._masks.get(row)
            if masks is None:
                continue
            slot = int(self.fields["mask_slot"][row])
            grammar = grammar_mask(slot) if slot >= 0 else None
            words = masks.allowed_next(texts[index].output, grammar)
            if words is not None:
                found[index] = words
        stacked = np.array([*found.values()], np.uint32)
        return Masks(
            np.array([*found], np.int64),
            stacked.reshape(len(found), num_mask_words(self._vocab_size)).view(np.int32),
        )


def _edits(index: int, token_ids: NDArray[np.integer], values: NDArray[np.floating]) -> Edits:
    """Edits of one row of the logits."""
    rows = np.full(len(token_ids), index, np.int64)
    return Edits(rows, token_ids.astype(np.int64), values.astype(np.float32))


def _join(parts: Iterable[Edits]) -> Edits:
    found = [Edits.none(), *parts]
    return Edits(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
