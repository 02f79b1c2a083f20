"""The runners of the CPU: StepInput to StepOutput without torch.

CpuRunner runs a step as one recorded program, and its thread stays in native code; EagerCpuRunner
runs the same operations one by one from Python, with the same bits (`--enforce-eager`). Both own
the model and the native runner, which has the rows, and their share of the memory budget. They
know nothing of requests, text or scheduling. Every method is called on the device thread.
Invariant: a step never raises, and after a failed one the rows are as the next step expects them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..config import EngineConfig
from ..errors import ModelLoadError
from ..progress import Watch
from ..protocol import BlockStore, MaskBoard, RunnerInfo, StepInput, StepOutput
from ..step_bytes import decode_output, encode_step
from ..weights.hub import Checkpoint
from .block_store import open_block_store
from .cpu_model import CpuModel, check_finite, load_cpu_model, one_token
from .eager import Eager
from .kv_cache import MemoryBudget, MemoryShare, max_step_tokens
from .measure import measure_costs
from .recorder import Recorder, build_program

logger = logging.getLogger(__name__)


Parts = TypeVar("Parts")


class _Runner(ABC, Generic[Parts]):
    """What both share: loading, dropping, and that a step without a model is an error. `Parts` is
    what one builds of a loaded model and drops as one.

    `budget` is shared by the models of a process; None: one of its own.
    """

    ops: ClassVar[str]  # how the operations are run, in words

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, budget: MemoryBudget | None = None
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._share = MemoryShare(config, budget)
        self._parts: Parts | None = None
        self.store: BlockStore | None = None
        self.masks: MaskBoard | None = None

    def load(self, progress: Watch) -> RunnerInfo:
        """Load weights, plan and take KV memory, compute one token, measure what steps cost.

        Raises ModelLoadError for what is wrong with the checkpoint and ConfigError for what is
        wrong with the wishes; memory taken before that is given back.
        """
        try:
            loaded = load_cpu_model(self._config, self._checkpoint, self._share, progress)
            with loaded.explained_step(self._config):
                self._parts, logits = self._build(loaded)
            check_finite(self._checkpoint, logits)
            max_tokens = max_step_tokens(self._config, loaded.plan.max_model_len)
            info = loaded.info(self.ops, measure_costs(self.step, loaded.plan, max_tokens))
            self.store = open_block_store(
                self._config, loaded.plan, loaded.host_slots, loaded.fingerprint
            )
            self.masks = loaded.masks
            logger.debug("loaded %s: %s", self._config.model_id, info)
            return info
        except BaseException:
            self.close()
            raise

    def step(self, step: StepInput) -> StepOutput:
        """Run one step; what goes wrong is `error` in the output."""
        if self._parts is None:
            return StepOutput(step_id=step.step_id, sampled=b"", error="no model is loaded")
        return decode_output(self._run(self._parts, step))

    def close(self) -> None:
        """Give back all memory, once the store has written what it was given; idempotent."""
        if self.store is not None:
            self.store.close()
        self.store = self.masks = None
        self._parts = None
        self._share.release()

    @abstractmethod
    def _build(self, loaded: CpuModel) -> tuple[Parts, NDArray[np.float32]]:
        """And the logits of one token."""

    @abstractmethod
    def _run(self, parts: Parts, step: StepInput) -> bytes:
        """The encoded output."""


class _Program(NamedTuple):
    program: Any  # _cpu.Program
    logits_buffer: int
    native: Any  # _cpu.Runner
    loaded: CpuModel


class CpuRunner(_Runner[_Program]):
    """Runs one checkpoint, a step as one program."""

    ops = "native"

    def serve(self, channel: Any, idle_timeout_s: float) -> bool:
        """Answer the steps of a _cpu.Channel without the interpreter, until it is closed (True) or
        nothing has come for so long (False)."""
        if self._parts is None:
            raise ModelLoadError("no model is loaded")
        return bool(self._parts.native.serve(channel, idle_timeout_s))

    def _build(self, loaded: CpuModel) -> tuple[_Program, NDArray[np.float32]]:
        spec = Recorder(max_model_len=loaded.plan.max_model_len).record(loaded.model)
        program = build_program(spec, loaded.weights, loaded.cache)
        native = loaded.runner(self._config, program, spec.logits)
        program.run(one_token(loaded.cpu), loaded.team)
        logits = program.read(spec.logits).view(np.float32)
        return _Program(program, spec.logits, native, loaded), logits

    def _run(self, parts: _Program, step: StepInput) -> bytes:
        return bytes(parts.native.step(encode_step(step)))


class _Eager(NamedTuple):
    ops: Eager
    native: Any  # _cpu.Runner, for the halves around the forward
    loaded: CpuModel


class EagerCpuRunner(_Runner[_Eager]):
    """As CpuRunner, one operation at a time."""

    ops = "native, one by one"

    def _build(self, loaded: CpuModel) -> tuple[_Eager, NDArray[np.float32]]:
        max_model_len = loaded.plan.max_model_len
        ops = Eager(loaded.team, loaded.weights, loaded.cache, max_model_len=max_model_len)
        parts = _Eager(ops, loaded.runner(self._config, None, -1), loaded)
        return parts, self._logits(parts, one_token(loaded.cpu))

    def _run(self, parts: _Eager, step: StepInput) -> bytes:
        try:
            batch = parts.native.prepare(encode_step(step))
            output = parts.native.sample(self._logits(parts, batch))
        except Exception as exc:
            logger.exception("step %d failed", step.step_id)
            output = parts.native.fail(" ".join(f"{type(exc).__name__}: {exc}".split()))
        return bytes(output)

    def _logits(self, parts: _Eager, batch: Any) -> Any:
        """float32 [R, vocab_size]. `batch` None: nothing is scheduled."""
        model = parts.loaded.model
        hidden = None if batch is None else model.forward(parts.ops, batch)
        if batch is None or not batch.num_logit_rows:
            return np.zeros((0, model.config.vocab_size), np.float32)
        return model.logits(parts.ops, hidden)
