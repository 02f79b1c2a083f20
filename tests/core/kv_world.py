"""KVWorld: a KVManager, a memory that does what it says, and sequences that check their contents.

Device memory, host slots and records on disk are lists of rows. The row of a token holds the whole
prefix that ends with it, as the KV of a model would; so whoever reads a context through a block
table sees any mistake made in allocating, copying, evicting, loading or sharing. Copies fail, and
are acknowledged late, steps fail, the store drops records, all as `rng` says.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass, field

from streamkv.core.kv.manager import Copy, Keep, KVManager
from streamkv.protocol import (
    CopyKind,
    FinishReason,
    Request,
    SamplingParams,
    StepOutput,
    StoreResult,
    pack_ints,
    unpack_ints,
)

GARBAGE = "garbage"


def make_request(name: str, salt: str = "", session_id: str = "") -> Request:
    return Request(
        request_id=name,
        model="m",
        prompt_token_ids=(0,),
        sampling=SamplingParams(),
        seed=0,
        max_tokens=1,
        cache_salt=salt,
        session_id=session_id,
        session_ttl_s=2.0,
    )


@dataclass(eq=False)
class Tokens:
    """What KVManager knows of a Sequence; `script` are the tokens it will have in the end."""

    request: Request
    script: list[int]
    token_ids: list[int] | array[int]
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    prefix_node: object = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    num_in_flight: int = 0
    is_lost: bool = False
    is_running: bool = False
    is_loading: bool = False
    leaves: Keep | None = None  # once no step names it any more
    num_tries: int = 0
    num_prompt_tokens: int = 0  # there are no scores
    num_scored_tokens: int = 0
    is_gated: bool = False

    def __post_init__(self) -> None:
        self.token_ids = array("i", self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens


@dataclass
class Step:
    step_id: int
    copies: list[Copy]
    scheduled: list[tuple[Tokens, int, int, bool, list[int]]]  # start, end, asks, table


class KVWorld:
    def __init__(self, rng: random.Random, *, block_size: int, num_blocks: int, **options) -> None:
        self.rng = rng
        self.kv = KVManager(num_blocks, block_size, **options)
        self.is_shared = options["enable_prefix_caching"]
        self.num_slots = options.get("num_host_slots", 0)
        self.block_size = block_size
        self.blocks = {b: [GARBAGE] * block_size for b in range(num_blocks)}
        self.slots = {s: [GARBAGE] * block_size for s in range(self.num_slots)}
        self.records: dict[int, list] = {}
        self.sequences: list[Tokens] = []  # that have not ended, or are still named by a step
        self.plan: list[tuple[Tokens, int, int, bool, list[int]]] = []
        self.in_flight: deque[Step] = deque()
        self.late: list[tuple[int, bool]] = []  # copies to be acknowledged by a later step
        self.ops: deque = deque()
        self.next_step = self.next_record = self.next_request = 0
        self.now_s = 0.0
        self.failures = 0.0  # how likely things fail
        self.num_hits = 0

    # --- sequences ---------------------------------------------------------------------------

    def add(self, script: list[int], num_prompt: int, salt: str = "", session: str = "") -> Tokens:
        request = make_request(f"r{self.next_request}", salt, session)
        self.next_request += 1
        sequence = Tokens(request, script, script[:num_prompt])
        self.sequences.append(sequence)
        return sequence

    def row(self, sequence: Tokens, position: int) -> tuple:
        root = sequence.request.cache_salt if self.is_shared else sequence.request.request_id
        return (root, *sequence.script[: position + 1])

    def running(self) -> list[Tokens]:
        return [s for s in self.sequences if s.is_running and s.leaves is None]

    def waiting(self) -> list[Tokens]:
        return [
            s
            for s in self.sequences
            if not (s.is_running or s.is_loading or s.finish_reason or s.num_in_flight)
        ]

    def admit(self, sequence: Tokens) -> bool:
        kv = self.kv
        match = kv.match(sequence)
        num_hit = len(match.nodes) * self.block_size + match.num_tail_tokens
        assert num_hit < sequence.num_tokens
        if kv.num_free_blocks_needed(sequence, match) > kv.pool.num_free:
            return False
        sequence.num_tries += 1
        if kv.load(sequence, match):
            assert sequence.num_tries == 1, "it waits a second time"
            sequence.is_loading = True
            return True
        sequence.num_tries = 0
        kv.share(sequence, match)
        self.num_hits += sequence.num_computed_tokens
        kv.unpin(sequence)
        sequence.is_running = True
        return self.compute(sequence, self.block_size)

    def take_loaded(self) -> None:
        for sequence in self.kv.take_loaded():
            assert sequence.is_loading
            sequence.is_loading = False

    def compute(self, sequence: Tokens, count: int) -> bool:
        """Its next tokens, in the step being built."""
        kv = self.kv
        start = sequence.num_computed_tokens
        num_tokens = sequence.num_tokens
        end = min(start + count, num_tokens, len(sequence.script) - 1)
        if end <= start or any(entry[0] is sequence for entry in self.plan):
            return False
        before, num_new = kv.pool.num_free, kv.num_new_blocks(sequence, end)
        former = list(sequence.block_table)
        result = kv.grow(sequence, end)
        if num_new > before:
            assert result is None and (sequence.block_table, kv.pool.num_free) == (former, before)
            return False
        appended, is_rewritten = result
        assert len(appended) + is_rewritten == num_new == before - kv.pool.num_free
        kept = sequence.block_table[: len(former)]
        assert (kept != former) == is_rewritten
        assert sequence.block_table[len(former) :] == appended
        asks = end == num_tokens
        if asks:
            sequence.num_pending_tokens += 1
        sequence.num_computed_tokens = end
        sequence.num_in_flight += 1
        self.plan.append((sequence, start, end, asks, list(sequence.block_table)))
        return True

    def fork(self, parent: Tokens, script: list[int]) -> Tokens | None:
        """A beam: the same so far, other tokens from now on."""
        if parent.num_in_flight or parent.num_pending_tokens:
            return None
        if parent.block_table and parent.block_table[-1] in self.kv._copying:
            return None
        num = len(parent.token_ids)
        child = Tokens(parent.request, parent.script[:num] + script, list(parent.token_ids))
        self.kv.fork(parent, child)
        child.is_running = True
        self.sequences.append(child)
        return child

    def leave(self, sequence: Tokens, keep: Keep) -> None:
        """Preempted or ended; its table goes once no step names it."""
        if sequence.leaves is None and sequence.is_running:
            sequence.leaves = keep
            if keep is Keep.CACHE or keep is Keep.FORGET:
                sequence.finish_reason = FinishReason.STOP
                sequence.num_pending_tokens = 0
            self._release_if_free(sequence)

    def end_waiting(self, sequence: Tokens) -> None:
        self.kv.cancel_load(sequence)
        self.kv.unpin(sequence)
        self._end(sequence)

    def _end(self, sequence: Tokens) -> None:
        sequence.finish_reason = FinishReason.STOP
        self.sequences.remove(sequence)
        if not any(s.request is sequence.request for s in self.sequences):
            self.kv.end_request(sequence.request)

    def _release_if_free(self, sequence: Tokens) -> None:
        if sequence.leaves is None or sequence.num_in_flight:
            return
        keep = Keep.FORGET if sequence.is_lost else sequence.leaves
        if not sequence.is_lost:
            num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
            self.kv.publish(sequence, num_known, tail=self.rng.random() < 0.7)
            if keep is Keep.CACHE:
                self.kv.keep_session(sequence.request, sequence, self.now_s)
        self.kv.release(sequence, keep=keep)
        assert sequence.block_table == [] and sequence.num_computed_tokens == 0
        sequence.is_running, sequence.leaves = False, None
        sequence.num_preemptions += 1
        if sequence.finish_reason is not None:
            self._end(sequence)

    # --- steps -------------------------------------------------------------------------------

    def send(self) -> bool:
        self.take_loaded()
        copies = self.kv.take_copies()
        if not (copies or self.plan):
            return False
        self.in_flight.append(Step(self.next_step, copies, self.plan))
        self.next_step += 1
        self.plan = []
        return True

    def commit(self) -> None:
        """The oldest step is run, and its results are taken in."""
        if not self.in_flight:
            return
        step, rng = self.in_flight.popleft(), self.rng
        fails = rng.random() < self.failures
        done, failed = [], []
        for number, ok in self.late:
            (done if ok else failed).append(number)
        self.late = []
        for copy in step.copies:
            ok = rng.random() >= self.failures
            if fails and (not ok or rng.random() < 0.5):
                self._copy(copy, False)  # the error says so
                continue
            self._copy(copy, ok)
            if copy.kind is not CopyKind.BLOCK and rng.random() < 0.3 and not fails:
                self.late.append((copy.number, ok))
            else:
                (done if ok else failed).append(copy.number)
        for sequence, start, end, _, table in step.scheduled:
            for position in range(start, end):
                row = GARBAGE if fails else self.row(sequence, position)
                self.blocks[table[position // self.block_size]][position % self.block_size] = row
        output = StepOutput(
            step_id=step.step_id,
            sampled=b"",
            error="broken" if fails else "",
            copies_done=pack_ints(done),
            copies_failed=pack_ints(failed),
        )
        self._take_in(step, output)

    def _copy(self, copy: Copy, ok: bool) -> None:
        source = self.slots if copy.kind is CopyKind.IN else self.blocks
        target = self.slots if copy.kind is CopyKind.OUT else self.blocks
        content = list(source[copy.source])
        target[copy.target] = content if ok else [GARBAGE] * self.block_size

    def _take_in(self, step: Step, output: StepOutput) -> None:
        lost = self.kv.acknowledge(step.copies, output)
        for sequence in lost:
            sequence.is_lost = True
        for sequence, _, end, asks, table in step.scheduled:
            sequence.num_in_flight -= 1
            if output.error:
                sequence.is_lost = True
            if not sequence.is_lost:
                for position in range(end):
                    block = self.blocks[table[position // self.block_size]]
                    found = block[position % self.block_size]
                    assert found == self.row(sequence, position), (position, found, table)
            if asks and sequence.finish_reason is None and not sequence.is_lost:
                sequence.num_pending_tokens -= 1
                sequence.token_ids.append(sequence.script[len(sequence.token_ids)])
        for sequence in {entry[0]: None for entry in step.scheduled} | dict.fromkeys(lost):
            if sequence.is_lost:
                self.leave(sequence, Keep.FORGET)
                sequence.finish_reason = FinishReason.ERROR
            elif sequence.leaves is None and sequence.block_table:
                num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
                num_known = min(num_known, max(e[2] for e in step.scheduled if e[0] is sequence))
                self.kv.publish(sequence, num_known, tail=self.rng.random() < 0.2)
            self._release_if_free(sequence)

    # --- store -------------------------------------------------------------------------------

    def submit_ops(self) -> None:
        self.ops.extend(self.kv.take_store_ops())

    def end_op(self) -> None:
        if not self.ops:
            return
        op, rng = self.ops.popleft(), self.rng
        ok, record, dropped = rng.random() >= self.failures, -1, []
        if self.records and rng.random() < self.failures:
            dropped.append(rng.choice(list(self.records)))
            del self.records[dropped[0]]
        if op.is_write and ok:
            record = dropped[0] if dropped and rng.random() < 0.5 else self.next_record
            self.next_record += 1
            self.records[record] = (op.block.digest, list(self.slots[op.slot]))
        elif not op.is_write:
            digest, content = self.records.get(op.block.record, (b"", None))
            ok = ok and digest == op.block.digest
            self.slots[op.slot] = list(content) if ok else [GARBAGE] * self.block_size
        self.kv.on_store_result(StoreResult(op.number, ok, record, tuple(dropped)))

    def resize(self, num_blocks: int) -> None:
        for block_id in range(num_blocks):
            self.blocks.setdefault(block_id, [GARBAGE] * self.block_size)
        self.kv.resize(num_blocks)

    # --- checks ------------------------------------------------------------------------------

    def check(self) -> None:
        self.kv.check_integrity([s for s in self.sequences if s.is_running])
        if self.in_flight or self.plan or self.kv._copies.has_queued:
            return
        tree = self.kv.tree
        for node in tree.nodes():
            tokens = b"".join(n.key for n in node.path())
            prefix = list(unpack_ints(tokens))
            begin = len(prefix) - len(node.key) // 4
            places = [(self.blocks, node.block_id), (self.slots, node.slot)]
            if node.record >= 0:
                places.append(({node.record: self.records[node.record][1]}, node.record))
            for memory, number in places:
                if number >= 0:
                    rows = memory[number][: len(prefix) - begin]
                    expected = [tuple(prefix[: p + 1]) for p in range(begin, len(prefix))]
                    assert [row[1:] for row in rows] == expected, (node, rows)

    def finish(self) -> None:
        """Everything ends by itself, and nothing is left."""
        self.failures = 0.0
        for turn in range(1000):
            if turn > 30:
                self.kv.expire_sessions(float("inf"))
            if not self.sequences and not self.in_flight and not self.ops and not self.plan:
                if not (self.kv.is_busy or self.kv.has_copies_to_make or self.late):
                    break
            self.take_loaded()
            for sequence in self.running():
                self.compute(sequence, 3)
                if sequence.num_computed_tokens == len(sequence.script) - 1:
                    self.leave(sequence, Keep.CACHE)
            waiting = self.waiting()
            if waiting:
                admitted = self.admit(waiting[0])
                busy = self.running() or self.in_flight or self.kv.is_busy or self.ops
                assert admitted or busy or len(waiting) < len(self.sequences), "it can't run alone"
            blocked = len(self.plan) == 0 and len(self.running()) > 1
            if blocked and not (self.in_flight or self.kv.is_busy):
                self.leave(self.running()[-1], Keep.SWAP)
            self.send()
            self.submit_ops()
            self.commit()
            if self.late and not self.in_flight:  # the device says it with a step of nothing
                self.in_flight.append(Step(self.next_step, [], []))
                self.commit()
            self.end_op()
            self.check()
        else:
            raise AssertionError(f"it doesn't end: {self.sequences}, {self.in_flight}, {self.ops}")
        kv = self.kv
        if len(kv._sessions):
            kv.expire_sessions(float("inf"))
            return self.finish()
        assert kv.pool.num_free == kv.pool.num_blocks and kv.pool.num_held == 0
        assert kv._tiers.slots.num_free == self.num_slots
        assert all(not n.num_users and not n.pins and not n.is_queued for n in kv.tree.nodes())
        assert kv.pool.num_pinned == kv._tiers.slots.num_pinned == 0
        assert not kv._pinned and not kv._tails and not kv._loading._done
        self.check()
