"""A model as the server runs it, computing whole texts: logits of every token, no sampling.

Owns one loaded model, its program and the blocks of its sequences. Knows no requests, no text and
no scores. Invariant: a token's logits are the bits that the server would compute for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..config import EngineConfig
from ..progress import unwatched
from ..runner.cpu_model import check_finite, load_cpu_model, one_token
from ..runner.kv_cache import MemoryShare
from ..runner.recorder import Recorder, build_program
from ..weights.hub import Checkpoint
from .score import NotFinite
from .text import NUM_PROMPTS, STEP_TOKENS, Lengths, Piece, Window


def sized(config: EngineConfig, lengths: Lengths) -> EngineConfig:
    """The config with room for windows and continuations, and no more."""
    context, continued = lengths.context, lengths.continued
    blocks = max(-(-context // config.block_size), NUM_PROMPTS * -(-continued // config.block_size))
    return msgspec.structs.replace(
        config,
        device="cpu",
        ops="native",
        enforce_eager=False,
        max_model_len=max(context, continued),
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=max(STEP_TOKENS, NUM_PROMPTS * lengths.prompt),
        num_gpu_blocks_override=blocks,
    )


class NativeModel:
    """A checkpoint, loaded. `close` gives its memory back."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """ModelLoadError, ConfigError. `config` is `sized`."""
        self._share = MemoryShare(config, None)
        try:
            self.loaded = load_cpu_model(config, checkpoint, self._share, unwatched)
            with self.loaded.explained_step(config):
                spec = Recorder(max_model_len=self.loaded.plan.max_model_len).record(
                    self.loaded.model
                )
                self._program = build_program(spec, self.loaded.weights, self.loaded.cache)
                self._program.reserve(config.max_num_batched_tokens, max(STEP_TOKENS, NUM_PROMPTS))
                self._logits_buffer = spec.logits
                check_finite(checkpoint, self._run(one_token(self.loaded.cpu)))
        except BaseException:
            self._share.release()
            raise

    @property
    def vocab_size(self) -> int:
        return self.loaded.model.config.vocab_size

    def predictions(self, window: Window) -> Iterator[NDArray[np.float32]]:
        """For each token from `first_scored` on, the logits before it; a piece at a time."""
        for piece in window.pieces():
            logits = self._step([piece], self.loaded.plan.num_blocks)
            if piece.num_wanted:
                yield logits

    def continuations(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> NDArray[np.int32]:
        """The likeliest token after each, one after the other: [prompts, num_tokens]."""
        block_size = self.loaded.plan.block_size
        num_blocks = -(-(len(prompts[0]) + num_tokens) // block_size)
        parts = [Piece(0, prompt, 1) for prompt in prompts]
        found = np.empty((len(prompts), num_tokens), np.int32)
        for index in range(num_tokens):
            logits = self._step(parts, num_blocks)
            if not np.isfinite(logits).all():
                raise NotFinite("a logit isn't a finite number")
            found[:, index] = logits.argmax(axis=1)
            parts = [
                Piece(part.start + len(part.token_ids), [int(token_id)], 1)
                for part, token_id in zip(parts, found[:, index], strict=True)
            ]
        return found

    def close(self) -> None:
        self._share.release()

    def _step(self, parts: Sequence[Piece], num_blocks: int) -> NDArray[np.float32]:
        """Logits of what is wanted. Each sequence has `num_blocks` blocks of its own."""
        size = self.loaded.plan.block_size
        lengths = [len(part.token_ids) for part in parts]
        ends = np.cumsum(lengths)
        positions = [np.arange(p.start, p.start + len(p.token_ids)) for p in parts]
        firsts = [i * num_blocks * size for i in range(len(parts))]
        slots = [first + at for first, at in zip(firsts, positions, strict=True)]
        wanted = [np.arange(end - p.num_wanted, end) for p, end in zip(parts, ends, strict=True)]

        def ints(values: Any) -> NDArray[np.int32]:
            return np.asarray(values, np.int32)

        batch = self.loaded.cpu.Batch(
            ints([token_id for part in parts for token_id in part.token_ids]),
            ints(np.concatenate(positions)),
            ints(np.concatenate(slots)),
            ints([0, *ends]),
            ints([part.start + length for part, length in zip(parts, lengths, strict=True)]),
            ints(np.arange(len(parts) * num_blocks).reshape(len(parts), num_blocks)),
            ints(np.concatenate(wanted)),
        )
        return self._run(batch)

    def _run(self, batch: Any) -> NDArray[np.float32]:
        self._program.run(batch, self.loaded.team)
        logits: NDArray[np.float32] = self._program.read(self._logits_buffer).view(np.float32)
        return logits
