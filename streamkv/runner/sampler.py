"""From logits to tokens: edits, filters, the draw, and log-probabilities.

Owns the arithmetic of sampling, vectorized over rows. Knows no row state and no randomness: the
caller passes one uniform number per row. Invariant: each row is computed from its own logits and
parameters by reductions along the vocabulary only, so its token doesn't depend on the batch.

Order of operations: biases, penalties, masks, [greedy: argmax], temperature, min_p, top_k, top_p,
draw. Masks come after penalties, which can't touch them. Log-probabilities are of the untouched
logits. Tokens that tie with the last one a filter keeps are kept too. A row whose logits are not
finite fails alone: it is named in `failed`, and its token is 0.

Shapes: R rows, V vocabulary size, N edited (row, token) pairs, M masked rows, W words of a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol import RowLogprobs

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow
CHUNK_ELEMENTS = 1 << 21  # rows are sampled in chunks: float64 temporaries of at most 16 MiB
TOP_P_CANDIDATES = 512  # nearly always enough to hold top_p of the mass; else the row is sorted
TIE_MARGIN = 8  # extra candidates for top logprobs, so that equal ones come in token order

NEGATIVE_INFINITY = float("-inf")
# The score of a token whose logits were not finite.
NOT_FINITE = RowLogprobs(logprob=0.0, rank=0, top_ids=b"", top_logprobs=b"")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Edits(NamedTuple):
    """Changes to single logits, as flat arrays [N] of (row, token, value)."""

    rows: Ints
    token_ids: Ints
    values: NDArray[np.float32]

    @classmethod
    def none(cls) -> Edits:
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))


class Masks(NamedTuple):
    """The only tokens that rows may get, as bits: token i is bit i % 32 of word i // 32."""

    rows: Ints  # [M]
    words: NDArray[np.int32]  # [M, W]

    @classmethod
    def none(cls) -> Masks:
        return cls(np.zeros(0, np.int64), np.zeros((0, 0), np.int32))


class SamplingBatch(NamedTuple):
    """What the rows of a step ask for."""

    temperature: Floats  # [R]
    top_k: Ints  # [R] 0 = no limit
    top_p: Floats  # [R]
    min_p: Floats  # [R]
    uniforms: Floats  # [R] in [0, 1)
    num_logprobs: Ints  # [R] -1 = off
    added: Edits  # logit + value: biases; values of equal pairs add up
    repeated: Edits  # repetition penalty: logit / value if positive, else logit * value; pairs once
    subtracted: Edits  # logit - value: frequency and presence penalties; pairs once
    masks: Masks  # other logits become -inf


class Sampled(NamedTuple):
    token_ids: NDArray[np.int32]  # [R]
    logprobs: tuple[RowLogprobs | None, ...]  # () or [R]
    failed: NDArray[np.int32]  # [F] rows without a token: their logits were not finite

    @classmethod
    def none(cls) -> Sampled:
        return cls(np.zeros(0, np.int32), (), np.zeros(0, np.int32))


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Choose a token for each row of logits [R, V]."""
    scores = _edited(logits, batch)
    best = scores.max(dim=-1)
    finite = torch.isfinite(best.values)  # a maximum with a NaN in its row is NaN
    if scores is not logits:  # edits hide an infinity
        finite &= torch.isfinite(logits.amax(dim=-1))
    token_ids = best.indices * finite
    sound = finite.cpu().numpy()
    random_rows = np.flatnonzero(sound & (batch.temperature >= GREEDY_BELOW))
    chunk_rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(random_rows), chunk_rows):
        rows = random_rows[start : start + chunk_rows]
        index = torch.from_numpy(rows).to(logits.device)
        token_ids[index] = _draw(scores[index].float(), batch, rows)
    return Sampled(
        token_ids.to("cpu", torch.int32).numpy(),
        _logprobs(logits, token_ids, np.where(sound, batch.num_logprobs, -1)),
        np.flatnonzero(~sound).astype(np.int32),
    )


def score(
    logits: Tensor, token_ids: NDArray[np.int32], num_logprobs: Ints
) -> tuple[RowLogprobs, ...]:
    """Log-probabilities of tokens that are known, one for each row of logits [R, V]."""
    if not len(token_ids):
        return ()
    known = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)
    sound = torch.isfinite(logits.amax(dim=-1)).cpu().numpy()
    found = _logprobs(logits, known, np.where(sound, num_logprobs, -1)) or (None,) * len(sound)
    return tuple(NOT_FINITE if one is None else one for one in found)


def _edited(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Scores [R, V]: `logits` itself if there is nothing to edit, else a float32 copy."""
    if not any(
        len(changes.rows)
        for changes in (batch.added, batch.repeated, batch.subtracted, batch.masks)
    ):
        return logits
    scores = logits.to(torch.float32, copy=True)
    index, values = _on_device(batch.added, logits)
    scores.index_put_(index, values, accumulate=True)
    index, values = _on_device(batch.repeated, logits)
    old = scores[index]
    scores[index] = torch.where(old > 0, old / values, old * values)
    index, values = _on_device(batch.subtracted, logits)
    scores[index] -= values
    # A request's tiny repetition penalty may overflow; that must not look like broken weights.
    scores.clamp_(max=torch.finfo(torch.float32).max)
    if len(batch.masks.rows):
        rows = torch.from_numpy(batch.masks.rows).to(scores.device)
        is_allowed = _unpack_bits(batch.masks.words, scores)
        scores[rows] = scores[rows].masked_fill(~is_allowed, NEGATIVE_INFINITY)
    return scores


def _unpack_bits(words: NDArray[np.int32], like: Tensor) -> Tensor:
    """[M, W] -> bool [M, V]."""
    places = torch.arange(32, dtype=torch.int32, device=like.device)
    bits = torch.from_numpy(words).to(like.device)[:, :, None] >> places
    return (bits & 1).flatten(1)[:, : like.shape[1]].bool()


def _on_device(edits: Edits, like: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((rows, token ids), values) as tensors."""
    rows, token_ids = torch.from_numpy(edits.rows), torch.from_numpy(edits.token_ids)
    values = torch.from_numpy(edits.values)
    return (rows.to(like.device), token_ids.to(like.device)), values.to(like.device)


def _draw(scores: Tensor, batch: SamplingBatch, rows: Ints) -> Tensor:
    """Tokens for `rows`, whose float32 scores [n, V] these are; changes `scores`."""
    scores -= scores.amax(dim=-1, keepdim=True)  # so that no temperature can overflow
    scores /= _column(batch.temperature[rows], scores)
    _filter_min_p(scores, batch.min_p[rows])
    _filter_top_k(scores, batch.top_k[rows])
    _filter_top_p(scores, batch.top_p[rows])
    # Inverse transform sampling; in float32 a rare token's interval would be mostly rounding.
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # [n, V]
    total = cumulative[:, -1:]
    targets = torch.from_numpy(batch.uniforms[rows]).to(scores.device)[:, None] * total
    # Below the total even after rounding, so that the token found has a probability above zero.
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def _filter_min_p(scores: Tensor, min_p: Floats) -> None:
    """Mask tokens less likely than min_p times the likeliest."""
    (rows,) = np.nonzero(min_p > 0)
    if len(rows):
        index = torch.from_numpy(rows).to(scores.device)
        chosen = scores[index]
        limits = chosen.amax(dim=-1, keepdim=True) + _column(np.log(min_p[rows]), scores)
        scores[index] = chosen.masked_fill(chosen < limits, NEGATIVE_INFINITY)


def _filter_top_k(scores: Tensor, top_k: Ints) -> None:
    """Mask tokens less likely than the k-th."""
    (rows,) = np.nonzero((top_k > 0) & (top_k < scores.shape[1]))
    if len(rows):
        index = torch.from_numpy(rows).to(scores.device)
        chosen = scores[index]
        last = torch.from_numpy(top_k[rows] - 1).to(scores.device)[:, None]
        limits = chosen.topk(int(top_k[rows].max()), dim=-1).values.gather(1, last)
        scores[index] = chosen.masked_fill(chosen < limits, NEGATIVE_INFINITY)


def _filter_top_p(scores: Tensor, top_p: Floats) -> None:
    """Mask all but the likeliest tokens that together reach top_p."""
    (rows,) = np.nonzero(top_p < 1)
    if not len(rows):
        return
    index = torch.from_numpy(rows).to(scores.device)
    chosen = scores[index]
    probs = chosen.softmax(dim=-1)
    wanted = torch.from_numpy(top_p[rows]).to(scores.device)[:, None]
    candidates = min(TOP_P_CANDIDATES, probs.shape[1])
    limits, reached = _top_p_limits(probs.topk(candidates, dim=-1).values, wanted)
    if not bool(reached.all()):
        flat = ~reached[:, 0]
        ordered = probs[flat].sort(dim=-1, descending=True).values
        limits[flat], _ = _top_p_limits(ordered, wanted[flat])
    scores[index] = chosen.masked_fill(probs < limits, NEGATIVE_INFINITY)


def _top_p_limits(ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The least probability to keep, and whether `ordered` [n, K] (descending) reached `wanted`."""
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    last = (cumulative < wanted).sum(dim=-1, keepdim=True).clamp(max=ordered.shape[1] - 1)
    return ordered.gather(1, last), cumulative[:, -1:] >= wanted


def _logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: Ints
) -> tuple[RowLogprobs | None, ...]:
    """For the rows that asked. () if none did."""
    (rows,) = np.nonzero(num_logprobs >= 0)
    if not len(rows):
        return ()
    index = torch.from_numpy(rows).to(logits.device)
    logprobs = logits[index].float().log_softmax(dim=-1)  # [n, V]
    chosen = logprobs.gather(1, token_ids[index][:, None])  # [n, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    num_top = min(int(num_logprobs[rows].max()) + TIE_MARGIN, logprobs.shape[1])
    top = logprobs.topk(num_top, dim=-1)
    values, ids = top.values.cpu().numpy(), top.indices.cpu().numpy().astype(np.int32)
    order = np.lexsort((ids, -values))  # most likely first, equal ones by id
    values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    result: list[RowLogprobs | None] = [None] * len(num_logprobs)
    for place, row in enumerate(rows.tolist()):
        count = int(num_logprobs[row])
        result[row] = RowLogprobs(
            logprob=float(chosen[place, 0]),
            rank=int(ranks[place]),
            top_ids=ids[place, :count].tobytes(),
            top_logprobs=values[place, :count].tobytes(),
        )
    return tuple(result)


def _column(values: Floats, like: Tensor) -> Tensor:
    """[n] -> [n, 1] in the dtype and on the device of `like`."""
    return torch.from_numpy(values).to(like.device, like.dtype)[:, None]
