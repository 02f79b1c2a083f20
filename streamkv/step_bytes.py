"""Steps and their outputs as messages of bytes: what crosses to the device side.

Owns the layout, byte by byte; cuda_ext/src/cpu/step.cpp reads and writes the same. What the numbers
mean is protocol.py's. Invariant: what was encoded decodes to an equal value, and what is not one
whole message is a ValueError.

Numbers are little-endian; int is 4 bytes, long 8, double 8. Nothing is padded but where it says.
"""

from __future__ import annotations

import struct
from typing import Any

from .protocol import RowAdded, RowLogprobs, RowSampling, StepInput, StepOutput

_STEP_MAGIC = b"SKI3"  # the digit grows with each change of the layout
_OUTPUT_MAGIC = b"SKO3"
_STEP_HEAD = struct.Struct("<4siq4i")
_ADDED_HEAD = struct.Struct("<14iq6d")
_OUTPUT_HEAD = struct.Struct("<4siqdd8i")
_LOGPROBS_HEAD = struct.Struct("<iid")
_NO_LOGPROBS = _LOGPROBS_HEAD.pack(-1, 0, 0.0)


def encode_step(step: StepInput) -> bytes:
    """The step as one message.

    offset
    0       "SKI3"
    4       int num_removed
    8       long step_id
    16      int num_added, num_appended, num_copies, num_scheduled
    32      the arrays removed, appended, copies, scheduled; then each added row:
    + 0     int row, num_prompt_tokens, num_tokens, num_blocks, num_stop_ids, num_biases
    + 24    int choice, min_tokens, num_logprobs, top_k
    + 40    int num_allowed_ids, length of bad_words, mask_slot, num_prompt_logprobs
    + 56    long seed
    + 64    double temperature, top_p, min_p, presence_, frequency_, repetition_penalty
    + 112   the arrays token_ids, block_ids, min_tokens_stop_ids, bias_ids, bias_values,
            allowed_ids, bad_words
    """
    parts = [
        _STEP_HEAD.pack(
            _STEP_MAGIC,
            len(step.removed) // 4,
            step.step_id,
            len(step.added),
            len(step.appended) // 8,
            len(step.copies) // 16,
            len(step.scheduled) // 16,
        ),
        step.removed,
        step.appended,
        step.copies,
        step.scheduled,
    ]
    for added in step.added:
        parts += _encode_added(added)
    return b"".join(parts)


def _encode_added(added: RowAdded) -> tuple[bytes, ...]:
    sampling = added.sampling
    head = _ADDED_HEAD.pack(
        added.row,
        added.num_prompt_tokens,
        len(added.token_ids) // 4,
        len(added.block_ids) // 4,
        len(sampling.min_tokens_stop_ids) // 4,
        len(sampling.bias_ids) // 4,
        sampling.choice,
        sampling.min_tokens,
        sampling.num_logprobs,
        sampling.top_k,
        len(sampling.allowed_ids) // 4,
        len(sampling.bad_words) // 4,
        sampling.mask_slot,
        sampling.num_prompt_logprobs,
        sampling.seed,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    return (
        head,
        added.token_ids,
        added.block_ids,
        sampling.min_tokens_stop_ids,
        sampling.bias_ids,
        sampling.bias_values,
        sampling.allowed_ids,
        sampling.bad_words,
    )


def decode_step(data: bytes) -> StepInput:
    """The inverse of `encode_step`. ValueError if it is not one step from end to end."""
    reader = _Reader("step", data)
    magic, num_removed, step_id, num_added, num_appended, num_copies, num_scheduled = (
        reader.numbers(_STEP_HEAD)
    )
    reader.check_magic(magic, _STEP_MAGIC)
    removed = reader.take(4 * num_removed)
    appended = reader.take(8 * num_appended)
    copies = reader.take(16 * num_copies)
    scheduled = reader.take(16 * num_scheduled)
    added = tuple(_decode_added(reader) for _ in range(num_added))
    reader.check_end()
    return StepInput(step_id, removed, added, appended, scheduled, copies)


def _decode_added(reader: _Reader) -> RowAdded:
    head = reader.numbers(_ADDED_HEAD)
    row, num_prompt_tokens, num_tokens, num_blocks, num_stop_ids, num_biases = head[:6]
    choice, min_tokens, num_logprobs, top_k = head[6:10]
    num_allowed, num_bad_words, mask_slot, num_prompt_logprobs, seed, *floats = head[10:]
    temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty = floats
    token_ids, block_ids = reader.take(4 * num_tokens), reader.take(4 * num_blocks)
    sampling = RowSampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        choice=choice,
        min_tokens=min_tokens,
        num_logprobs=num_logprobs,
        min_tokens_stop_ids=reader.take(4 * num_stop_ids),
        bias_ids=reader.take(4 * num_biases),
        bias_values=reader.take(4 * num_biases),
        allowed_ids=reader.take(4 * num_allowed),
        bad_words=reader.take(4 * num_bad_words),
        mask_slot=mask_slot,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    return RowAdded(row, num_prompt_tokens, token_ids, block_ids, sampling)


def encode_output(output: StepOutput) -> bytes:
    """The output as one message.

    offset
    0       "SKO3"
    4       int num_sampled
    8       long step_id
    16      double duration_s, copies_s
    32      int num_failed, num_deferred, num_logprobs (0 or num_sampled), num_scored
    48      int num_copies_done, num_copies_failed, error_bytes, 0
    64      the arrays sampled, failed, deferred, copies_done, copies_failed; then each entry of
            logprobs, then of scored:
    + 0     int num_top (-1: the entry is None), rank
    + 8     double logprob
    + 16    the arrays top_ids, top_logprobs
    last    error in UTF-8
    """
    error = output.error.encode("utf-8", "backslashreplace")
    parts = [
        _OUTPUT_HEAD.pack(
            _OUTPUT_MAGIC,
            len(output.sampled) // 4,
            output.step_id,
            output.duration_s,
            output.copies_s,
            len(output.failed) // 4,
            len(output.deferred) // 4,
            len(output.logprobs),
            len(output.scored),
            len(output.copies_done) // 4,
            len(output.copies_failed) // 4,
            len(error),
            0,
        ),
        output.sampled,
        output.failed,
        output.deferred,
        output.copies_done,
        output.copies_failed,
    ]
    for row in (*output.logprobs, *output.scored):
        if row is None:
            parts.append(_NO_LOGPROBS)
        else:
            head = _LOGPROBS_HEAD.pack(len(row.top_ids) // 4, row.rank, row.logprob)
            parts += (head, row.top_ids, row.top_logprobs)
    parts.append(error)
    return b"".join(parts)


def decode_output(data: bytes) -> StepOutput:
    """The inverse of `encode_output`. ValueError if it is not one output from end to end."""
    reader = _Reader("output", data)
    magic, num_sampled, step_id, duration_s, copies_s, *counts = reader.numbers(_OUTPUT_HEAD)
    num_failed, num_deferred, num_logprobs, num_scored = counts[:4]
    num_copies_done, num_copies_failed, error_bytes, _ = counts[4:]
    reader.check_magic(magic, _OUTPUT_MAGIC)
    output = StepOutput(
        step_id=step_id,
        duration_s=duration_s,
        copies_s=copies_s,
        sampled=reader.take(4 * num_sampled),
        failed=reader.take(4 * num_failed),
        deferred=reader.take(4 * num_deferred),
        copies_done=reader.take(4 * num_copies_done),
        copies_failed=reader.take(4 * num_copies_failed),
        logprobs=tuple(_decode_logprobs(reader) for _ in range(num_logprobs)),
        scored=tuple(_decode_score(reader) for _ in range(num_scored)),
        error=reader.take(error_bytes).decode("utf-8", "replace"),
    )
    reader.check_end()
    return output


def _decode_logprobs(reader: _Reader) -> RowLogprobs | None:
    num_top, rank, logprob = reader.numbers(_LOGPROBS_HEAD)
    if num_top < 0:
        return None
    return RowLogprobs(logprob, rank, reader.take(4 * num_top), reader.take(4 * num_top))


def _decode_score(reader: _Reader) -> RowLogprobs:
    score = _decode_logprobs(reader)
    if score is None:
        raise ValueError("output message: expected as many scores as it says, got an entry of none")
    return score


class _Reader:
    """Takes one thing after another off a message."""

    __slots__ = ("_data", "_offset", "_what")

    def __init__(self, what: str, data: bytes) -> None:
        self._what = what
        self._data = data
        self._offset = 0

    def take(self, num_bytes: int) -> bytes:
        start, end = self._offset, self._offset + num_bytes
        if not start <= end <= len(self._data):
            raise self._error(f"{num_bytes} bytes at {start}, got {len(self._data) - start}")
        self._offset = end
        return self._data[start:end]

    def numbers(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def check_magic(self, magic: bytes, expected: bytes) -> None:
        if magic != expected:
            raise self._error(f"it to begin with {expected!r}, got {magic!r}; update both sides")

    def check_end(self) -> None:
        if self._offset != len(self._data):
            raise self._error(f"its end at {self._offset}, got {len(self._data)} bytes")

    def _error(self, expected: str) -> ValueError:
        return ValueError(f"{self._what} message: expected {expected}")
