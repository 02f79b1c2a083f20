"""Test doubles that obey the real protocols: a runner without a model, and its oracle.

FakeRunner keeps its KV cache as (token, position) for each place (FakeMemory). It writes what a
step computes through the block table, reads the whole context back through it, and derives the next
token from what it read. Any error in allocation, sharing, copying, preemption or release changes
the output, which `expected_tokens` and `expected_beams` say in a few lines; what can be recognised
as wrong at once is also listed in `FakeRunner.violations`.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from fake_memory import EMPTY, FakeMemory, FakeStore
from fake_model import expected_beams, expected_tokens, fake_logprobs, next_token

from streamkv.protocol import (
    Ask,
    MaskBoard,
    RowAdded,
    RowLogprobs,
    RowSampling,
    RunnerInfo,
    StepInput,
    StepOutput,
    pack_ints,
    unpack_ints,
)

__all__ = [
    "FakeRunner",
    "FakeStore",
    "expected_beams",
    "expected_tokens",
    "fake_logprobs",
    "next_token",
]

GATE_DEADLINE_S = 60.0


@dataclass
class _Row:
    token_ids: array[int]
    block_table: list[int]
    num_prompt_tokens: int
    sampling: RowSampling
    lost: bool = False  # a step with it failed; what it samples from now on means nothing
    stop_ids: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_ids = unpack_ints(self.sampling.min_tokens_stop_ids)


class FakeRunner:
    """Implements protocol.Runner. Used by one thread, except for `gate` and the counters.

    `memory`: blocks and host slots; it says how to let copies fail or take their time.
    `store`: a FakeStore, which gets this memory.

    `gate`: a Semaphore is acquired by each step, an Event waited for, before it begins.
    `fail_next`: not empty: the next step applies its changes, then fails with this message.
    `fail_step_ids`: steps that fail in the same way.
    `broken_token_ids`: a row whose context holds one has no finite logits, nor KV, when it asks.
    `crash_next`: raised by the next step, as no runner should.
    `load_error`: raised by `load`; `load_gate` is waited for first.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        vocab_size: int = 64,
        avoid: Collection[int] = (),
        gate: threading.Semaphore | threading.Event | None = None,
        load_gate: threading.Event | None = None,
        load_error: Exception | None = None,
        num_host_slots: int = 0,
        copy_delay: int = 0,
        copy_block_s: float = 0.0,
        token_s: float = 0.0,
        store: FakeStore | None = None,
    ) -> None:
        self.info = RunnerInfo(
            device="cpu",
            dtype="float32",
            formats="",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_bytes_per_token=8,
            weight_bytes=0,
            ops="fake",
            num_host_slots=num_host_slots,
            block_bytes=8 * block_size,
            copy_block_s=copy_block_s,
            token_s=token_s,
        )
        self.avoid = frozenset(avoid)
        self.gate = gate
        self.load_gate = load_gate
        self.load_error = load_error
        self.fail_next = ""
        self.fail_step_ids: frozenset[int] = frozenset()
        self.broken_token_ids: frozenset[int] = frozenset()
        self.crash_next: BaseException | None = None
        self.closed = False
        self.violations: list[str] = []
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.rows: dict[int, _Row] = {}
        self.memory = FakeMemory(
            num_blocks, num_host_slots, block_size, self._violation, copy_delay=copy_delay
        )
        self.store = store
        self.masks: MaskBoard | None = None
        if store is not None:
            store.attach(self.memory)

    # --- protocol.Runner ---------------------------------------------------------------------

    def load(self, progress: Callable[[str, float], None]) -> RunnerInfo:
        progress("loading weights", 0.5)
        if self.load_gate is not None and not self.load_gate.wait(GATE_DEADLINE_S):
            raise TimeoutError("the test never opened load_gate")
        if self.load_error is not None:
            raise self.load_error
        progress("loading weights", 1.0)
        return self.info

    def step(self, step: StepInput) -> StepOutput:
        self._pass_gate()
        if self.crash_next is not None:
            crash, self.crash_next = self.crash_next, None
            raise crash
        num_violations = len(self.violations)
        if step.step_id != self.num_steps:
            self._violation(f"expected step {self.num_steps}, got step {step.step_id}")
        self.num_steps = step.step_id + 1
        self._apply_changes(step)
        scheduled = [row for row in _groups(step.scheduled, 4) if self._is_sound(*row)]
        failure, self.fail_next = self.fail_next, ""
        if step.step_id in self.fail_step_ids:
            failure = failure or f"step {step.step_id} was told to fail"
        done, not_done = self._copy(step, fails=bool(failure))
        if failure:
            self._lose(scheduled)
            return _failed_output(step, failure, done, not_done)
        sampled, logprobs, failed = self._compute(scheduled)
        if len(self.violations) > num_violations:
            return _failed_output(step, "; ".join(self.violations[num_violations:]), done, not_done)
        return StepOutput(
            step_id=step.step_id,
            sampled=pack_ints(sampled),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            failed=pack_ints(failed),
            duration_s=0.001,
            copies_done=pack_ints(done),
            copies_failed=pack_ints(not_done),
            copies_s=0.0001 * len(done),
        )

    def close(self) -> None:
        self.closed = True

    # --- a step ------------------------------------------------------------------------------

    def _violation(self, message: str) -> None:
        self.violations.append(message)

    def _pass_gate(self) -> None:
        if self.gate is None:
            return
        pass_gate = self.gate.wait if isinstance(self.gate, threading.Event) else self.gate.acquire
        if not pass_gate(timeout=GATE_DEADLINE_S):
            self._violation("the test never opened the gate")

    def _apply_changes(self, step: StepInput) -> None:
        for row_id in unpack_ints(step.removed):
            if self.rows.pop(row_id, None) is None:
                self._violation(f"row {row_id} is removed but not there")
        for added in step.added:
            self._add_row(added)
        for row_id, block_id in _groups(step.appended, 2):
            if not 0 <= block_id < self.info.num_blocks:
                self._violation(f"block {block_id} is appended but doesn't exist")
            elif row_id not in self.rows:
                self._violation(f"row {row_id} gets block {block_id} but isn't there")
            else:
                self.rows[row_id].block_table.append(block_id)

    def _add_row(self, added: RowAdded) -> None:
        if added.row in self.rows:
            self._violation(f"row {added.row} is added but taken")
        self.rows[added.row] = _Row(
            token_ids=unpack_ints(added.token_ids),
            block_table=list(unpack_ints(added.block_ids)),
            num_prompt_tokens=added.num_prompt_tokens,
            sampling=added.sampling,
        )

    def _copy(self, step: StepInput, *, fails: bool) -> tuple[list[int], list[int]]:
        """The numbers of copies that ended with this step: done, and failed."""
        waits = not step.scheduled
        copies = list(_groups(step.copies, 4))
        for block_id in self.memory.begin(step.step_id, copies, waits=waits, fails=fails):
            for row in self.rows.values():
                row.lost = row.lost or block_id in row.block_table
        return self.memory.end(step.step_id, waits=waits)

    def _is_sound(self, row_id: int, start: int, count: int, ask: int) -> bool:
        row = self.rows.get(row_id)
        if row is None:
            self._violation(f"row {row_id} is scheduled but not there")
            return False
        end, num_tokens = start + count, len(row.token_ids)
        num_slots = len(row.block_table) * self.info.block_size
        if count < 1 or end > min(num_tokens, num_slots) or (ask and end != num_tokens):
            self._violation(
                f"row {row_id} has {num_tokens} tokens and {num_slots} slots, "
                f"scheduled are {start}+{count} with ask {ask}"
            )
            return False
        return True

    def _lose(self, scheduled: list[tuple[int, ...]]) -> None:
        """A step failed. One that is already on its way may still name its rows."""
        for row_id, _, _, ask in scheduled:
            row = self.rows[row_id]
            row.lost = True
            if ask == Ask.SAMPLE:
                row.token_ids.append(0)

    def _compute(
        self, scheduled: list[tuple[int, ...]]
    ) -> tuple[list[int], list[RowLogprobs | None], list[int]]:
        """Tokens and logprobs of those who asked, and the places among them that failed."""
        sampled: list[int] = []
        logprobs: list[RowLogprobs | None] = []
        failed: list[int] = []
        # All writes come before all reads, as on a device that runs layer by layer.
        for row_id, start, count, _ in scheduled:
            self._write(self.rows[row_id], start, count)
            self.num_computed_tokens += count
        for row_id, start, count, ask in scheduled:
            row = self.rows[row_id]
            context_crc = self._read_context(row, row_id, start + count)
            if ask == Ask.SAMPLE and not self.broken_token_ids.isdisjoint(row.token_ids):
                self._write(row, start, count, EMPTY)
                self._lose([(row_id, start, count, ask)])
                failed.append(len(sampled))
                sampled.append(0)
                logprobs.append(None)
            elif ask == Ask.SAMPLE:
                token_id = self._sample(row, context_crc)
                num_logprobs = row.sampling.num_logprobs
                sampled.append(token_id)
                logprobs.append(
                    fake_logprobs(token_id, num_logprobs, self.info.vocab_size)
                    if num_logprobs >= 0
                    else None
                )
        return sampled, logprobs, failed

    def _write(self, row: _Row, start: int, count: int, token_id: int | None = None) -> None:
        """Store the row's tokens of these positions, or `token_id` for all of them."""
        block_size = self.info.block_size
        for position in range(start, start + count):
            block_id = row.block_table[position // block_size]
            stored = row.token_ids[position] if token_id is None else token_id
            self.memory.write(block_id, position % block_size, stored, position)

    def _read_context(self, row: _Row, row_id: int, num_tokens: int) -> int:
        """CRC-32 of positions 0 .. num_tokens-1 as the cache has them."""
        block_ids = row.block_table[: -(-num_tokens // self.info.block_size)]
        token_ids, positions = (places[:num_tokens] for places in self.memory.read(block_ids))
        if row.lost:
            return 0
        if positions != array("i", range(num_tokens)) or token_ids != row.token_ids[:num_tokens]:
            self._violation(
                f"row {row_id} wants tokens {row.token_ids[:num_tokens].tolist()}, its blocks "
                f"{row.block_table} hold {token_ids.tolist()} at positions {positions.tolist()}"
            )
        return zlib.crc32(token_ids.tobytes())

    def _sample(self, row: _Row, context_crc: int) -> int:
        sampling = row.sampling
        num_output_tokens = len(row.token_ids) - row.num_prompt_tokens
        masked = num_output_tokens < sampling.min_tokens
        token_id = next_token(
            context_crc,
            self.info.vocab_size,
            avoid={*self.avoid, *row.stop_ids} if masked else self.avoid,
            temperature=sampling.temperature,
            seed=sampling.seed,
            choice=sampling.choice,
        )
        row.token_ids.append(token_id)
        return token_id


def _failed_output(step: StepInput, error: str, done: list[int], not_done: list[int]) -> StepOutput:
    return StepOutput(
        step_id=step.step_id,
        sampled=b"",
        error=error,
        copies_done=pack_ints(done),
        copies_failed=pack_ints(not_done),
    )


def _groups(packed: bytes, size: int) -> Iterator[tuple[int, ...]]:
    values = iter(unpack_ints(packed))
    return zip(*[values] * size, strict=True)
