"""Sampling a step's rows in torch: those whose masks are there first, the others when they come.

Owns the wait for masks and who is deferred. Knows the board, rows and logits, no model. Invariant:
a row's token depends on its own logits, parameters and mask, never on when its mask came.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol import RowLogprobs
from .asks import Asking
from .rows import Rows
from .sampler import sample
from .token_masks import Words


class SampledRows(NamedTuple):
    """Of all rows that asked."""

    token_ids: NDArray[np.int32]  # [R]; 0 where there is none
    logprobs: tuple[RowLogprobs | None, ...]  # () or [R]
    failed: NDArray[np.int32]  # places of those whose logits were not finite
    deferred: NDArray[np.int32]  # places of those without a mask

    @classmethod
    def none(cls) -> SampledRows:
        nothing = np.zeros(0, np.int32)
        return cls(nothing, (), nothing, nothing)


def sample_rows(logits: Tensor, rows: Rows, masks: Any, wait_s: float) -> SampledRows:
    """For each of `rows.asking`, whose logits [R, V] these are. `masks` is a _cpu.MaskBoard, which
    is waited for so long."""
    asking = rows.asking
    sampling = _Sampling(logits, rows, masks)
    is_ready = (asking.mask_slots < 0) & ~asking.is_void
    waiting = np.flatnonzero(~is_ready & ~asking.is_void)
    is_ready[waiting] = _find(masks, asking.at(waiting), 0.0)
    sampling.sample(np.flatnonzero(is_ready))
    waiting = waiting[~is_ready[waiting]]
    if len(waiting):
        if logits.is_cuda:  # a forward pass that still runs is time that masks have anyway
            torch.cuda.current_stream(logits.device).synchronize()
        sampling.sample(waiting[_find(masks, asking.at(waiting), wait_s)])
    return sampling.result()


def _find(masks: Any, asking: Asking, timeout_s: float) -> NDArray[np.bool_]:
    """Whose mask is there."""
    if not len(asking.rows):
        return np.zeros(0, np.bool_)
    found = masks.find(asking.mask_slots.tolist(), asking.positions.tolist(), timeout_s)
    return np.array(found, np.bool_)


class _Sampling:
    """Collects what some rows get, then others."""

    def __init__(self, logits: Tensor, rows: Rows, masks: Any) -> None:
        self._logits = logits
        self._rows = rows
        self._masks = masks
        num_rows = len(rows.asking.rows)
        self._token_ids = np.zeros(num_rows, np.int32)
        self._logprobs: list[RowLogprobs | None] = [None] * num_rows
        self._failed = np.zeros(num_rows, np.bool_)
        self._is_done = np.zeros(num_rows, np.bool_)

    def sample(self, places: NDArray[np.int64]) -> None:
        if not len(places):
            return
        is_all = len(places) == len(self._token_ids)
        index = torch.from_numpy(places).to(self._logits.device)
        batch = self._rows.sampling_batch(self._rows.asking.at(places), self._words)
        sampled = sample(self._logits if is_all else self._logits[index], batch)
        self._token_ids[places] = sampled.token_ids
        self._failed[places[sampled.failed]] = True
        self._is_done[places] = True
        for place, one in zip(places.tolist(), sampled.logprobs, strict=False):
            self._logprobs[place] = one

    def result(self) -> SampledRows:
        has_logprobs = any(one is not None for one in self._logprobs)
        return SampledRows(
            self._token_ids,
            tuple(self._logprobs) if has_logprobs else (),
            np.flatnonzero(self._failed).astype(np.int32),
            np.flatnonzero(~self._is_done).astype(np.int32),
        )

    def _words(self, slot: int) -> Words:
        return np.frombuffer(self._masks.words(slot), np.uint32)
