"""A device without a model: every step takes the same time and gives tokens of a given text.

For benchmarks of what stands around a model. Knows the protocol of a runner alone. Its own work is
a few microseconds a step, whatever the number of rows.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from ..protocol import (
    BlockStore,
    MaskBoard,
    RunnerInfo,
    StepInput,
    StepOutput,
    pack_ints,
    unpack_ints,
)

_MAX_MODEL_LEN = 4096
_BLOCK_SIZE = 16


class FakeRunner:
    """Implements protocol.Runner for up to `max_num_seqs` rows."""

    store: BlockStore | None = None
    masks: MaskBoard | None = None

    def __init__(
        self, token_ids: Sequence[int], *, vocab_size: int, step_s: float, max_num_seqs: int
    ) -> None:
        self._token_ids = array("i", token_ids) * (2 + max_num_seqs // len(token_ids))
        self._period = len(token_ids)
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._ready_s = 0.0  # when the step before had ended

    def load(self, progress: Callable[[str, float], None]) -> RunnerInfo:
        return RunnerInfo(
            device="cpu",
            dtype="float32",
            formats="none",
            max_model_len=_MAX_MODEL_LEN,
            vocab_size=self._vocab_size,
            block_size=_BLOCK_SIZE,
            num_blocks=self._max_num_seqs * _MAX_MODEL_LEN // _BLOCK_SIZE,
            kv_bytes_per_token=1,
            weight_bytes=0,
            ops="none",
        )

    def step(self, step: StepInput) -> StepOutput:
        """Steps follow each other without a gap, as those of a busy device do."""
        now_s = time.monotonic()
        self._ready_s = max(self._ready_s, now_s - self._step_s) + self._step_s
        time.sleep(max(self._ready_s - now_s, 0.0))
        num_rows = sum(unpack_ints(step.scheduled)[3::4])  # the asks, 0 or 1 each
        start = step.step_id % self._period
        return StepOutput(step.step_id, pack_ints(self._token_ids[start : start + num_rows]))

    def close(self) -> None:
        pass
