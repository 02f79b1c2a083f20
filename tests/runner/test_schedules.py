"""Random schedules on the native runners: the bits of all logits depend on the sequence alone.

A schedule is everything that mustn't matter: which requests run together and in which order, chunk
sizes, overlap, blocks (their size, how many there are, who shares them), preemption, threads, and
whether a recorded program runs or the same operations one by one. What each sequence computes
alone, on one thread, is the oracle, for weights and keys and values of every kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from drive import build_scheduler, load_runner, request, run_requests
from runner.quantized import save_quantized_checkpoint
from tiny import save_tiny_checkpoint

from streamkv import _cpu
from streamkv.ops.extension import load_extension
from streamkv.protocol import Request, RowAdded, StepInput, StepOutput
from streamkv.weights.hub import Checkpoint

VOCAB_SIZE = 339
NUM_TOKENS = 10
LONGEST = 160  # prompt and answer: more than two partitions of attention
SAMPLING = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "n": 2},
    {"temperature": 1.0, "repetition_penalty": 1.4, "top_k": 40},
)


class Case(NamedTuple):
    """A model and the formats of its numbers."""

    checkpoint: Checkpoint
    config: dict[str, Any]
    formats: str  # as the runner says


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of an architecture with every op; widths that are no multiples of panels and vectors, nor of
    groups."""
    return save_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        architecture="Qwen3ForCausalLM",
        head_dim=16,
        hidden_size=72,
        intermediate_size=90,
    )


@pytest.fixture(scope="module")
def cases(folder, tmp_path_factory) -> dict[str, Case]:
    plain = Checkpoint(folder, "huggingface")
    small = save_quantized_checkpoint(
        tmp_path_factory.mktemp("small"),
        lambda name: "Q8_0" if "embed" in name else "Q4_1",
        head_dim=16,
        hidden_size=96,
        intermediate_size=96,
    )
    super_ = save_quantized_checkpoint(
        tmp_path_factory.mktemp("super"),
        lambda name: "Q6_K" if "v_proj" in name or "embed" in name else "Q4_K",
        head_dim=64,
        hidden_size=256,
        intermediate_size=256,
    )
    return {
        "float32": Case(plain, {"dtype": "float32"}, "float32 weights, float32 inputs, float32 KV"),
        "bfloat16": Case(plain, {"dtype": "bfloat16"}, "bfloat16 weights, "),
        "int8": Case(
            plain,
            {"dtype": "bfloat16", "quantization": "int8"},
            "int8 weights, int8 inputs, bfloat16 KV",
        ),
        "Q4_1": Case(
            small.checkpoint,
            {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
            "Q4_1 + Q8_0 weights, int8 inputs, int8 KV",
        ),
        "Q4_K": Case(
            super_.checkpoint, {"dtype": "bfloat16"}, "Q4_K + Q6_K weights, int8 inputs, bfloat16"
        ),
    }


class Place(NamedTuple):
    """A sequence, and which of its tokens."""

    prompt: bytes
    seed: int
    choice: int
    position: int


class Watched:
    """A runner whose logits are kept, by the place they belong to."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._rows: dict[int, RowAdded] = {}
        self._eager_logits: list[np.ndarray] = []
        if not hasattr(runner, "serve"):
            self._watch_eager()
        self.logits: dict[Place, list[bytes]] = {}

    def step(self, step: StepInput) -> StepOutput:
        self._rows.update({added.row: added for added in step.added})
        output = self._runner.step(step)
        assert output.error == ""
        scheduled = np.frombuffer(step.scheduled, np.int32).reshape(-1, 4).tolist()
        asking = [self._place(row, start + n) for row, start, n, ask in scheduled if ask]
        if asking:
            logits = self._read()
            assert logits.shape == (len(asking), VOCAB_SIZE)
            for place, row in zip(asking, logits, strict=True):
                self.logits.setdefault(place, []).append(row.tobytes())
        return output

    def _place(self, row: int, position: int) -> Place:
        added = self._rows[row]
        prompt = added.token_ids[: 4 * added.num_prompt_tokens]
        return Place(prompt, added.sampling.seed, added.sampling.choice, position)

    def _read(self) -> np.ndarray:
        """Of the step that ran last."""
        if self._eager_logits:
            return self._eager_logits.pop()
        parts = self._runner._parts
        data = parts.program.read(parts.logits_buffer)
        return data.view(np.float32)

    def _watch_eager(self) -> None:
        compute = self._runner._logits

        def keep(parts: Any, batch: Any) -> np.ndarray:
            logits = compute(parts, batch)
            self._eager_logits = [logits] if len(logits) else []
            return logits

        self._runner._logits = keep


def requests() -> list[Request]:
    """15 prompts of 1 to 150 tokens; 6 of them begin with the same 100."""
    generator = np.random.default_rng(11)
    shared = generator.integers(3, VOCAB_SIZE, 100).tolist()
    lengths = (1, 2, 5, 17, 31, 64, 65, 129, 150)
    drawn = [generator.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    drawn += [shared + generator.integers(3, VOCAB_SIZE, n).tolist() for n in (1, 2, 20, 33, 50)]
    drawn.append(shared)
    return [
        request(str(i), prompt, NUM_TOKENS, seed=i, **SAMPLING[i % len(SAMPLING)])
        for i, prompt in enumerate(drawn)
    ]


class Answers(NamedTuple):
    logits: dict[Place, list[bytes]]
    token_ids: dict[str, list[list[int]]]


def run(runner: Any, info: Any, chosen: list[Request], **options: Any) -> Answers:
    watched = Watched(runner)
    results = run_requests(watched, info, chosen, **options)
    tokens = {name: [choice.token_ids for choice in found] for name, found in results.items()}
    return Answers(watched.logits, tokens)


def alone(case: Case) -> Answers:
    """Each sequence on its own: no neighbours, no chunks, no cached prefix, one thread."""
    runner, info = load_runner(case.checkpoint, ops="native", threads=1, **case.config)
    assert info.formats.startswith(case.formats)
    logits: dict[Place, list[bytes]] = {}
    tokens: dict[str, list[list[int]]] = {}
    for one in requests():
        found = run(runner, info, [one], depth=0, max_num_seqs=1, enable_prefix_caching=False)
        logits |= found.logits
        tokens |= found.token_ids
    assert all(len(bits) == 1 for bits in logits.values())
    runner.close()
    return Answers(logits, tokens)


class Schedule(NamedTuple):
    load: dict[str, Any]
    scheduler: dict[str, Any]
    depth: int
    rounds: list[list[Request]]


def draw(rng: random.Random) -> Schedule:
    block_size = rng.choice((1, 3, 8, 16, 16, 17, 32, 64))
    num_blocks = int(-(-LONGEST // block_size) * rng.choice((1, 1.2, 1.5, 2, 6)))
    num_batched_tokens = rng.choice((3, 16, 33, 64, 100, 512))
    return Schedule(
        load={
            "threads": rng.choice((1, 2, 2, 3)),
            "enforce_eager": rng.random() < 0.25,
            "block_size": block_size,
            "num_gpu_blocks_override": num_blocks,
            "max_num_batched_tokens": num_batched_tokens,
        },
        scheduler={
            "max_num_seqs": min(rng.choice((1, 4, 8, 32)), num_batched_tokens),
            "max_num_batched_tokens": num_batched_tokens,
            "enable_prefix_caching": rng.random() < 0.75,
        },
        depth=rng.choice((0, 1)),
        rounds=[rng.sample(requests(), rng.randint(4, 15)) for _ in range(2)],
    )


class Seen(NamedTuple):
    """What a schedule had in it."""

    num_preemptions: int
    num_hit_tokens: int


def check(case: Case, expected: Answers, seed: int) -> Seen:
    schedule = draw(random.Random(seed))
    runner, info = load_runner(case.checkpoint, ops="native", **case.config, **schedule.load)
    scheduler = build_scheduler(info, **schedule.scheduler)
    for chosen in schedule.rounds:  # in the second much may be cached
        found = run(runner, info, chosen, depth=schedule.depth, scheduler=scheduler)
        what = f"seed {seed}: {schedule.load} {schedule.scheduler} depth {schedule.depth}"
        names = [one.request_id for one in chosen]
        assert found.token_ids == {name: expected.token_ids[name] for name in names}, what
        assert found.logits, what
        for place, bits in found.logits.items():
            assert set(bits) == {*expected.logits[place]}, f"{what}: {place.position}"
    runner.close()
    return Seen(scheduler.num_preemptions, scheduler.num_prefix_hit_tokens)


@pytest.fixture
def instruction_set() -> Iterator[Any]:
    """Sets it for what is loaded from now on."""
    before = load_extension().isa()
    yield _cpu.set_isa
    _cpu.set_isa(before)


NAMES = ("float32", "bfloat16", "int8", "Q4_1", "Q4_K")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_depends_on_the_schedule(cases, name):
    """25 schedules each."""
    expected = alone(cases[name])
    seen = [check(cases[name], expected, seed) for seed in range(25)]
    assert sum(one.num_preemptions > 0 for one in seen) >= 5
    assert sum(one.num_hit_tokens > 0 for one in seen) >= 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("isa", _cpu.available_isas()[1:])
def test_nor_on_any_other_instruction_set(cases, name, isa, instruction_set):
    instruction_set(isa)
    expected = alone(cases[name])
    for seed in range(100, 104):
        check(cases[name], expected, seed)


def test_the_oracle_has_logits_for_every_token(cases):
    """So that no comparison above is of nothing."""
    expected = alone(cases["float32"])
    num_sequences = sum(one.sampling.n for one in requests())
    assert len(expected.logits) == num_sequences * NUM_TOKENS
    # A greedy answer may repeat itself to the bit; most tokens have logits of their own.
    assert len({bits for (bits,) in expected.logits.values()}) > num_sequences * NUM_TOKENS * 0.7
