"""The runners of the CPU: StepInput to StepOutput without torch.

CpuRunner runs a step as one recorded program, and its thread stays in native code; EagerCpuRunner
runs the same operations one by one from Python, with the same bits (`--enforce-eager`). Both own
the model and the native runner, which has the rows, and their share of the memory budget. They
know nothing of requests, text or scheduling. Every method is called on the device thread.
Invariant: a step never raises, and after a failed one the rows are as the next step expects them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..config import EngineConfig
from ..errors import ModelLoadError
from ..protocol import RunnerInfo, StepInput, StepOutput, decode_output, encode_step
from ..weights.hub import Checkpoint
from .cpu_model import CpuModel, check_finite, load_cpu_model, one_token
from .eager import Eager
from .kv_cache import MemoryBudget, MemoryShare
from .recorder import Recorder, build_program

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


class _Program(NamedTuple):
    """What CpuRunner loads and drops, as one."""

    loaded: CpuModel
    program: Any  # _cpu.Program
    logits_buffer: int
    native: Any  # _cpu.Runner


class CpuRunner:
    """Runs one checkpoint. `budget` is shared by the models of a process; None: one of its own."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, budget: MemoryBudget | None = None
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._share = MemoryShare(config, budget)
        self._parts: _Program | None = None

    def load(self, progress: Progress) -> RunnerInfo:
        """Load weights, plan and take KV memory, record the program.

        Raises ModelLoadError for what is wrong with the checkpoint and ConfigError for what is
        wrong with the wishes; memory taken before that is given back.
        """
        try:
            loaded = load_cpu_model(self._config, self._checkpoint, self._share, progress)
            self._parts = self._record(loaded)
            info = loaded.info("native")
            logger.debug("loaded %s: %s", self._config.model_id, info)
            return info
        except BaseException:
            self.close()
            raise

    def step(self, step: StepInput) -> StepOutput:
        """Run one step; what goes wrong is `error` in the output."""
        if self._parts is None:
            return _not_loaded(step)
        return decode_output(self._parts.native.step(encode_step(step)))

    def serve(self, channel: Any, idle_timeout_s: float) -> bool:
        """Answer the steps of a _cpu.Channel without the interpreter, until it is closed (True) or
        nothing has come for so long (False)."""
        if self._parts is None:
            raise ModelLoadError("no model is loaded")
        return bool(self._parts.native.serve(channel, idle_timeout_s))

    def close(self) -> None:
        """Give back all memory; idempotent."""
        self._parts = None
        self._share.release()

    def _record(self, loaded: CpuModel) -> _Program:
        spec = Recorder(max_model_len=loaded.plan.max_model_len).record(loaded.model)
        with loaded.explained_step(self._config):
            program = build_program(spec, loaded.weights, loaded.cache)
            native = loaded.runner(self._config, program, spec.logits)
            program.run(one_token(loaded.cpu), loaded.team)
            logits = program.read(spec.logits).view(np.float32)
        check_finite(self._checkpoint, logits)
        return _Program(loaded, program, spec.logits, native)


class _Eager(NamedTuple):
    """What EagerCpuRunner loads and drops, as one."""

    loaded: CpuModel
    ops: Eager
    native: Any  # _cpu.Runner, for the halves around the forward


class EagerCpuRunner:
    """As CpuRunner, one operation at a time."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, budget: MemoryBudget | None = None
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._share = MemoryShare(config, budget)
        self._parts: _Eager | None = None

    def load(self, progress: Progress) -> RunnerInfo:
        """As CpuRunner's."""
        try:
            loaded = load_cpu_model(self._config, self._checkpoint, self._share, progress)
            ops = Eager(
                loaded.team,
                loaded.weights,
                loaded.cache,
                max_model_len=loaded.plan.max_model_len,
            )
            with loaded.explained_step(self._config):
                self._parts = _Eager(loaded, ops, loaded.runner(self._config, None, -1))
                logits = self._logits(one_token(loaded.cpu))
            check_finite(self._checkpoint, logits)
            return loaded.info("native, one by one")
        except BaseException:
            self.close()
            raise

    def step(self, step: StepInput) -> StepOutput:
        """Run one step; what goes wrong is `error` in the output."""
        if self._parts is None:
            return _not_loaded(step)
        native = self._parts.native
        try:
            batch = native.prepare(encode_step(step))
            logits = self._no_logits() if batch is None else self._logits(batch)
            output = native.sample(logits)
        except Exception as exc:
            logger.exception("step %d failed", step.step_id)
            output = native.fail(" ".join(f"{type(exc).__name__}: {exc}".split()))
        return decode_output(output)

    def close(self) -> None:
        """Give back all memory; idempotent."""
        self._parts = None
        self._share.release()

    def _logits(self, batch: Any) -> Any:
        """float32 [R, vocab_size]."""
        assert self._parts is not None
        model, ops = self._parts.loaded.model, self._parts.ops
        hidden = model.forward(ops, batch)
        if not batch.num_logit_rows:
            return self._no_logits()
        return model.logits(ops, hidden)

    def _no_logits(self) -> Any:
        assert self._parts is not None
        return np.zeros((0, self._parts.loaded.model.config.vocab_size), np.float32)


def _not_loaded(step: StepInput) -> StepOutput:
    return StepOutput(step_id=step.step_id, sampled=b"", error="no model is loaded")
