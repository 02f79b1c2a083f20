"""KV outside the blocks, on every runner: host slots, the disk, and what moving it costs."""

from __future__ import annotations

import time

import pytest
from drive import load_runner
from msgspec import structs
from runner.support import RUNNERS, greedy, prompts, step

from streamkv.errors import ConfigError, ModelLoadError
from streamkv.protocol import (
    Ask,
    CopyKind,
    StepOutput,
    StoredBlock,
    StoreOp,
    StoreResult,
    unpack_ints,
)
from streamkv.runner.kv_cache import MemoryBudget
from streamkv.runner.kv_plan import KVCachePlan
from streamkv.runner.measure import measure_costs

OUT, IN, BLOCK = CopyKind.OUT, CopyKind.IN, CopyKind.BLOCK
PROMPT = 9  # of 40 tokens: two blocks and a half


@pytest.fixture(params=RUNNERS)
def kind(request) -> dict:
    return RUNNERS[request.param]


def numbers(packed: bytes) -> list[int]:
    return [*unpack_ints(packed)]


def compute(runner, blocks: list[int]) -> None:
    """The prompt's KV."""
    added = [(0, prompts()[PROMPT], blocks)]
    assert runner.step(step(0, [(0, 0, 40, Ask.NONE)], added=added)).error == ""


def last_token(runner, blocks: list[int], copies=()) -> StepOutput:
    """What follows the prompt if these blocks have its KV."""
    added = [(1, prompts()[PROMPT], blocks)]
    return runner.step(step(1, [(1, 39, 1, Ask.SAMPLE)], removed=[0], added=added, copies=copies))


def test_keys_and_values_come_back_from_host_memory(folder, oracle, kind):
    """By way of slots to other blocks, while the blocks they were in are overwritten."""
    runner, info = load_runner(folder, swap_space=0.001, **kind)
    assert (info.num_host_slots, info.block_bytes) == (131, 8192)
    compute(runner, [3, 4, 5])
    copies = [(i, OUT, 3 + i, 20 + i) for i in range(3)]
    copies += [(10 + i, BLOCK, 9, 3 + i) for i in range(3)]
    output = runner.step(step(1, copies=copies))
    assert output.error == "" and 0 < output.copies_s < output.duration_s
    assert numbers(output.copies_done) == [0, 1, 2, 10, 11, 12] and output.copies_failed == b""
    output = last_token(runner, [7, 8, 6], [(20, IN, 20, 7), (21, IN, 21, 8), (22, IN, 22, 6)])
    assert numbers(output.sampled) == greedy(oracle, prompts()[PROMPT], 1)
    assert numbers(output.copies_done) == [20, 21, 22]
    runner.close()


def test_copies_of_a_step_that_fails_are_done_or_not_as_they_were_made(folder, kind):
    runner, info = load_runner(folder, swap_space=0.001, **kind)
    copies = [(7, OUT, 3, 0), (8, IN, 0, 4)]
    output = runner.step(step(0, [(0, 0, 9, Ask.SAMPLE)], copies=copies))
    assert "positions 0 to 9" in output.error
    assert numbers(output.copies_done) == [7, 8] and output.copies_s > 0
    for bad in (
        {"removed": [-1]},
        {"copies": [*copies, (9, OUT, 3, info.num_host_slots)]},
        {"copies": [*copies, (9, IN, -1, 0)]},
    ):
        output = runner.step(step(1, **({"copies": copies} | bad)))
        assert output.error != "" and output.copies_done == output.copies_failed == b""
    assert runner.step(step(2)).copies_s == 0.0


def test_costs_are_measured_and_leave_nothing_behind(folder, kind):
    runner, info = load_runner(folder, swap_space=0.001, **kind)
    assert 0 < info.copy_block_s < 0.05 and 0 < info.token_s < 0.05
    output = runner.step(step(0, [(0, 0, 1, Ask.SAMPLE)]))
    assert "known are 0 tokens in 0 blocks" in output.error
    assert load_runner(folder, **kind)[1].copy_block_s == 0.0


PLAN = KVCachePlan(num_blocks=20, block_size=16, block_bytes=1000, max_model_len=100)


@pytest.mark.parametrize(
    ("token_s", "expected"),
    [(1e-4, [8, 32, 100]), (1e-3, [8, 32]), (2e-3, [8]), (1.0, [8])],
)
def test_a_slow_model_is_measured_with_fewer_tokens(token_s, expected):
    lengths = []

    def run(sent):
        if not sent.scheduled:
            return StepOutput(0, b"")
        _, start, count, ask = unpack_ints(sent.scheduled)
        assert (start, ask, len(sent.added[0].block_ids)) == (0, Ask.NONE, 4 * -(-count // 16))
        lengths.append(count)
        return StepOutput(0, b"", duration_s=count * token_s)

    costs = measure_costs(run, PLAN, 512)
    assert costs.token_s == pytest.approx(token_s) and costs.copy_block_s == 0.0
    assert lengths == expected


def test_a_runner_whose_first_steps_fail_is_not_used():
    with pytest.raises(ModelLoadError, match="a first step has failed: no memory"):
        measure_costs(lambda sent: StepOutput(0, b"", error="no memory"), PLAN, 512)


def test_host_slots_are_of_the_budget(folder, kind):
    budget = MemoryBudget(64 << 20)
    base, _ = load_runner(folder, **kind)
    sizes = []
    for swap_space in (0.0, 0.01):
        config = structs.replace(base._config, swap_space=swap_space)
        runner = type(base)(config, base._checkpoint, budget)
        runner.load(lambda stage, fraction: None)
        sizes.append(budget.free_bytes)
        runner.close()
    assert sizes[0] - sizes[1] == int(0.01 * 2**30) // 8192 * 8192
    assert budget.free_bytes == 64 << 20
    config = structs.replace(base._config, swap_space=1.0)
    with pytest.raises(ConfigError, match=r"--swap-space.: .* take 1.0 GiB, .* MiB are free"):
        type(base)(config, base._checkpoint, budget).load(lambda stage, fraction: None)
    assert budget.free_bytes == 64 << 20


# --- disk -----------------------------------------------------------------------------------------


class Results:
    """Of a store, waited for."""

    def __init__(self, store) -> None:
        self.store, self.found = store, []
        store.on_result(self.found.append)

    def run(self, op: StoreOp) -> StoreResult:
        num_before = len(self.found)
        self.store.submit(op)
        deadline_s = time.monotonic() + 20
        while len(self.found) == num_before and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return self.found[num_before]


def stored(index: int) -> StoredBlock:
    digests = [bytes([i]) * 32 for i in range(4)]
    tokens = prompts()[PROMPT][16 * index : 16 * index + 16]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return StoredBlock(-1, digests[index + 1], digests[index], packed)


def test_keys_and_values_come_back_from_disk_in_another_run(folder, oracle, kind, tmp_path):
    config = kind | {"kv_cache_dir": str(tmp_path / "kv")}
    runner, info = load_runner(folder, **config)
    assert info.num_host_slots == 64
    assert [*runner.store.index()] == []
    compute(runner, [3, 4, 5])
    runner.step(step(1, copies=[(0, OUT, 3, 10), (1, OUT, 4, 63)]))
    results = Results(runner.store)
    assert results.run(StoreOp(0, 10, stored(0), True)).ok
    assert results.run(StoreOp(1, 63, stored(1), True)).ok
    runner.close()
    assert runner.store is None

    runner, _ = load_runner(folder, **config)
    blocks = [*runner.store.index()]
    assert [block[1:] for block in blocks] == [stored(0)[1:], stored(1)[1:]]
    results = Results(runner.store)
    for number, (slot, block) in enumerate(zip((5, 0), blocks, strict=True)):
        assert results.run(StoreOp(number, slot, block, False)).ok
    # The rest of the prompt is computed.
    added = [(0, prompts()[PROMPT], [8, 6, 2])]
    copies = [(0, IN, 5, 8), (1, IN, 0, 6)]
    output = runner.step(step(0, [(0, 32, 8, Ask.SAMPLE)], added=added, copies=copies))
    assert numbers(output.sampled) == greedy(oracle, prompts()[PROMPT], 1)
    runner.close()


def test_another_block_size_finds_nothing_on_disk(folder, kind, tmp_path):
    config = kind | {"kv_cache_dir": str(tmp_path / "kv")}
    runner, _ = load_runner(folder, **config)
    assert Results(runner.store).run(StoreOp(0, 0, stored(0), True)).ok
    runner.close()
    runner, _ = load_runner(folder, **config, block_size=8)
    assert [*runner.store.index()] == []
    runner.close()


def test_without_a_folder_there_is_no_store(folder, kind):
    runner, info = load_runner(folder, **kind)
    assert runner.store is None and info.num_host_slots == 0


def test_a_folder_that_cannot_be_one_is_refused_and_all_memory_given_back(folder, kind, tmp_path):
    (tmp_path / "file").touch()
    budget = MemoryBudget(64 << 20)
    base, _ = load_runner(folder, **kind)
    config = structs.replace(base._config, kv_cache_dir=str(tmp_path / "file"))
    runner = type(base)(config, base._checkpoint, budget)
    with pytest.raises(ConfigError):
        runner.load(lambda stage, fraction: None)
    assert budget.free_bytes == 64 << 20 and runner.store is None
