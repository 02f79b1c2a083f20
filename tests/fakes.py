"""Test doubles that obey the real protocols: a runner without a model, and its oracle.

FakeRunner keeps its KV cache as (token, position) for each place (FakeMemory). It writes what a
step computes through the block table, reads the whole context back through it, and derives the next
token from what it read. Any error in allocation, sharing, copying, preemption or release changes
the output, which `expected_tokens` and `expected_beams` say in a few lines; what can be recognised
as wrong at once is also listed in `FakeRunner.violations`.
"""

from __future__ import annotations

import threading
import time
import zlib
from array import array
from collections.abc import Callable, Collection

from fake_masks import FakeMaskBoard, FakeMatcher
from fake_memory import EMPTY, FakeMemory, FakeStore
from fake_model import (
    expected_beams,
    expected_scores,
    expected_tokens,
    fake_logprobs,
    next_token,
)
from fake_rows import FakeRow, Results, Scheduled, failed_output, groups

from streamkv.protocol import (
    MAX_SCORED,
    Ask,
    RowLogprobs,
    RunnerInfo,
    StepInput,
    StepOutput,
    pack_ints,
    unpack_ints,
)

__all__ = [
    "FakeMaskBoard",
    "FakeMatcher",
    "FakeRunner",
    "FakeStore",
    "expected_beams",
    "expected_scores",
    "expected_tokens",
    "fake_logprobs",
    "next_token",
]

GATE_DEADLINE_S = 60.0
_SAMPLE, _SCORE = int(Ask.SAMPLE), int(Ask.SCORE)  # faster as plain numbers


class FakeRunner:
    """Implements protocol.Runner. Used by one thread, except for `gate` and the counters.

    `memory`: blocks and host slots; it says how to let copies fail or take their time.
    `store`: a FakeStore, which gets this memory.
    `masks`: a FakeMaskBoard. A row whose mask isn't there after `mask_wait_s`, all waits of a step
    together, is deferred. `late_masks`: (slot, position) that are taken for late the first time
    they are asked for.

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
        masks: FakeMaskBoard | None = None,
        mask_wait_s: float = 0.0,
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
        self.rows: dict[int, FakeRow] = {}
        self.memory = FakeMemory(
            num_blocks, num_host_slots, block_size, self._violation, copy_delay=copy_delay
        )
        self.store = store
        self.masks = masks
        self.mask_wait_s = mask_wait_s
        self.late_masks: set[tuple[int, int]] = set()
        self.num_deferrals = 0  # the first of each row that is void then
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
        scheduled = [Scheduled(*row) for row in groups(step.scheduled, 4)]
        scheduled = [one for one in scheduled if self._is_sound(one)]
        self._check_scores(scheduled)
        failure, self.fail_next = self.fail_next, ""
        if step.step_id in self.fail_step_ids:
            failure = failure or f"step {step.step_id} was told to fail"
        done, not_done = self._copy(step, fails=bool(failure))
        if failure:
            self._lose(scheduled)
            return failed_output(step, failure, done, not_done)
        results = self._compute(scheduled)
        if len(self.violations) > num_violations:
            return failed_output(step, "; ".join(self.violations[num_violations:]), done, not_done)
        return StepOutput(
            step_id=step.step_id,
            sampled=pack_ints(results.sampled),
            logprobs=tuple(results.logprobs) if any(results.logprobs) else (),
            failed=pack_ints(results.failed),
            duration_s=0.001,
            copies_done=pack_ints(done),
            copies_failed=pack_ints(not_done),
            copies_s=0.0001 * len(done),
            deferred=pack_ints(results.deferred),
            scored=tuple(results.scored),
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
            if added.row in self.rows:
                self._violation(f"row {added.row} is added but taken")
            self.rows[added.row] = FakeRow(added)
        for row_id, block_id in groups(step.appended, 2):
            if not 0 <= block_id < self.info.num_blocks:
                self._violation(f"block {block_id} is appended but doesn't exist")
            elif row_id not in self.rows:
                self._violation(f"row {row_id} gets block {block_id} but isn't there")
            else:
                self.rows[row_id].block_table.append(block_id)

    def _copy(self, step: StepInput, *, fails: bool) -> tuple[list[int], list[int]]:
        """The numbers of copies that ended with this step: done, and failed."""
        waits = not step.scheduled
        copies = list(groups(step.copies, 4))
        for block_id in self.memory.begin(step.step_id, copies, waits=waits, fails=fails):
            for row in self.rows.values():
                row.is_lost = row.is_lost or block_id in row.block_table
        return self.memory.end(step.step_id, waits=waits)

    def _is_sound(self, one: Scheduled) -> bool:
        row = self.rows.get(one.row_id)
        if row is None:
            self._violation(f"row {one.row_id} is scheduled but not there")
            return False
        num_tokens, num_slots = len(row.token_ids), len(row.block_table) * self.info.block_size
        asks = bool(one.ask & _SAMPLE)
        if row.is_void:  # it was sent before anybody knew, or asks for that token again
            is_sound = asks and num_tokens <= one.end <= num_slots
        else:
            is_sound = one.end <= min(num_tokens, num_slots) and (not asks or one.end == num_tokens)
        if one.count < 1 or not is_sound:
            self._violation(
                f"row {one.row_id} has {num_tokens} tokens and {num_slots} slots, "
                f"scheduled are {one.start}+{one.count} with ask {one.ask}"
            )
            return False
        return True

    def _check_scores(self, scheduled: list[Scheduled]) -> None:
        num_scored = 0
        for row_id, start, count, ask in scheduled:
            if ask & _SCORE:
                row = self.rows[row_id]
                num = row.num_to_score(start, count)
                if num < 1 or row.sampling.num_prompt_logprobs < 0:
                    self._violation(f"row {row_id} has no scores for {start}+{count}")
                num_scored += num
        if num_scored > MAX_SCORED:
            self._violation(f"{num_scored} tokens are to be scored")

    def _lose(self, scheduled: list[Scheduled]) -> None:
        """A step failed. One that is already on its way may still name its rows."""
        for row_id, _, _, ask in scheduled:
            row = self.rows[row_id]
            row.is_lost = True
            if ask & _SAMPLE and not row.is_void:
                row.token_ids.append(0)

    def _compute(self, scheduled: list[Scheduled]) -> Results:
        results = Results()
        deadline_s = time.monotonic() + self.mask_wait_s
        # All writes come before all reads, as on a device that runs layer by layer.
        for one in scheduled:
            row = self.rows[one.row_id]
            row.is_void = row.is_void and one.end > len(row.token_ids)
            self._write(row, one.start, one.count, EMPTY if row.is_void else None)
            self.num_computed_tokens += one.count
        for one in scheduled:
            row = self.rows[one.row_id]
            if row.is_void:
                results.pass_over(results.deferred)
                continue
            context_crc = self._read_context(row, one.row_id, one.end)
            is_broken = bool(one.ask) and not self.broken_token_ids.isdisjoint(row.token_ids)
            if is_broken:
                self._write(row, one.start, one.count, EMPTY)
                row.is_lost = True
            if one.ask & _SCORE:
                results.scored += self._score(row, one, is_finite=not is_broken)
            if one.ask & _SAMPLE:
                self._sample(row, one, context_crc, deadline_s, results)
        return results

    def _sample(
        self,
        row: FakeRow,
        one: Scheduled,
        context_crc: int,
        deadline_s: float,
        results: Results,
    ) -> None:
        vocab_size, sampling = self.info.vocab_size, row.sampling
        mask = None
        if sampling.mask_slot >= 0 and not row.is_lost:
            mask = self._mask(sampling.mask_slot, one.end, deadline_s)
            if mask is None:
                row.is_void = True
                self.num_deferrals += 1
                results.pass_over(results.deferred)
                return
        if not self.broken_token_ids.isdisjoint(row.token_ids):
            self._lose([one])
            results.pass_over(results.failed)
            return
        token_id = row.sample(context_crc, vocab_size, self.avoid, mask)
        logprobs = None
        if sampling.num_logprobs >= 0:
            logprobs = fake_logprobs(token_id, sampling.num_logprobs, vocab_size)
        results.add(token_id, logprobs)

    def _mask(self, slot: int, position: int, deadline_s: float) -> frozenset[int] | None:
        """None: it isn't there in time."""
        if self.masks is None or slot not in self.masks:
            self._violation(f"a row samples with the mask of slot {slot}, which isn't there")
            return frozenset()
        if (slot, position) in self.late_masks:
            self.late_masks.remove((slot, position))
            return None
        return self.masks.wait(slot, position, deadline_s)

    def _score(self, row: FakeRow, one: Scheduled, *, is_finite: bool) -> list[RowLogprobs]:
        block_ids = row.block_table[: -(-one.end // self.info.block_size)]
        token_ids, _ = self.memory.read(block_ids)
        vocab_size = self.info.vocab_size
        return row.score(token_ids, one.start, one.count, vocab_size, is_finite=is_finite)

    def _write(self, row: FakeRow, start: int, count: int, token_id: int | None = None) -> None:
        """Store the row's tokens of these positions, or `token_id` for all of them."""
        block_size = self.info.block_size
        for position in range(start, start + count):
            block_id = row.block_table[position // block_size]
            stored = row.token_ids[position] if token_id is None else token_id
            self.memory.write(block_id, position % block_size, stored, position)

    def _read_context(self, row: FakeRow, row_id: int, num_tokens: int) -> int:
        """CRC-32 of positions 0 .. num_tokens-1 as the cache has them."""
        block_ids = row.block_table[: -(-num_tokens // self.info.block_size)]
        token_ids, positions = (places[:num_tokens] for places in self.memory.read(block_ids))
        if row.is_lost:
            return 0
        if positions != array("i", range(num_tokens)) or token_ids != row.token_ids[:num_tokens]:
            self._violation(
                f"row {row_id} wants tokens {row.token_ids[:num_tokens].tolist()}, its blocks "
                f"{row.block_table} hold {token_ids.tolist()} at positions {positions.tolist()}"
            )
        return zlib.crc32(token_ids.tobytes())
