"""Times of a program's ops beside what the machine allows: `bench kernels`, `info --profile`.

Owns the steps that are tried and the comparison; what an op costs is runner/cost.py's, what the
machine can do is peaks.py's. Invariant: an op's share is that of the tightest of its limits, and
limits and times come from the same rounds.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from ..runner.cost import Cost, StepShape, cost_of, label
from ..runner.formats import ModelFormats
from ..runner.program import Linear, LinearSiluMul, Op, PagedAttention, ProgramSpec
from ..words import counted, format_bytes
from .options import StepsConfig
from .peaks import Peaks, best_of, measure_peaks, shown
from .report import Figures, print_report

ROUND_S = 0.2  # of each step in a round
MAX_RUNS = 200
LEAST_PEAKS = 3  # measurements, so that a moment's load isn't taken for a limit
DISTURBED = 105.0  # % of limit

OpName = tuple[str, str]  # the op and what it works with, the same in all layers


class Step(NamedTuple):
    """A step to try: of each row the tokens computed and the context after it."""

    name: str
    rows: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.rows)

    def num_blocks(self, block_size: int) -> int:
        return sum(-(-context // block_size) for _, context in self.rows)


def decode_step(num_rows: int, context: int) -> Step:
    name = f"{counted(num_rows, 'row')} of 1 token, context {context}"
    return Step(name, ((1, context),) * num_rows)


def prompt_step(num_tokens: int) -> Step:
    return Step(f"a prompt of {counted(num_tokens, 'token')}", ((num_tokens, num_tokens),))


def steps_of(options: StepsConfig) -> list[Step]:
    return [
        *(decode_step(num_rows, options.context) for num_rows in options.decode_rows),
        *(prompt_step(num_tokens) for num_tokens in options.prompt_len),
    ]


def check_steps(options: StepsConfig, max_model_len: int) -> None:
    """ConfigError for a step beyond the context of the model."""
    lengths = [("--context", options.context), *(("--prompt-len", n) for n in options.prompt_len)]
    for flag, length in lengths:
        if length > max_model_len:
            raise ConfigError(
                f"{flag}: expected at most the {max_model_len} tokens of the model's context, "
                f"got {length}"
            )


def check_memory(spec: ProgramSpec, steps: Sequence[Step], free_bytes: int) -> None:
    """ConfigError for a step whose activations don't fit in the memory."""
    layout = spec.layout()
    for step in steps:
        num_bytes = step.num_tokens * layout.bytes_per_token
        num_bytes += len(step.rows) * layout.bytes_per_logit_row
        if num_bytes > free_bytes:
            raise ConfigError(
                f"{step.name}: needs {format_bytes(num_bytes)}, {format_bytes(free_bytes)} are "
                "free; ask for less with --decode-rows or --prompt-len"
            )


class Profiled(NamedTuple):
    """A program with what is needed to run and to judge it."""

    cpu: ModuleType
    team: Any  # _cpu.Team
    spec: ProgramSpec  # its inputs resolved
    program: Any  # _cpu.Program of the spec
    formats: ModelFormats
    vocab_size: int
    block_size: int


def make_batch(profiled: Profiled, step: Step) -> Any:
    """Random tokens; each row has blocks of its own, and its last token wants logits."""
    source, block_size = random.Random(0), profiled.block_size
    token_ids, positions, slots, query_start, tables = [], [], [], [0], []
    next_block = 0
    for num_tokens, context in step.rows:
        blocks = list(range(next_block, next_block + -(-context // block_size)))
        next_block = blocks[-1] + 1
        for position in range(context - num_tokens, context):
            token_ids.append(source.randrange(profiled.vocab_size))
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        query_start.append(len(token_ids))
        tables.append(blocks)
    width = max(map(len, tables))
    padded = [blocks + [0] * (width - len(blocks)) for blocks in tables]

    def ints(values: Sequence[Any]) -> Any:
        return np.array(values, np.int32)

    return profiled.cpu.Batch(
        ints(token_ids),
        ints(positions),
        ints(slots),
        ints(query_start),
        ints([context for _, context in step.rows]),
        ints(padded),
        ints(query_start[1:]) - 1,
    )


def op_names(spec: ProgramSpec) -> list[OpName]:
    return [(op.name, label(op)) for op in spec.ops]


def time_step(profiled: Profiled, step: Step) -> dict[OpName, float]:
    """One round: seconds of each op, the layers' together."""
    batch = make_batch(profiled, step)
    program, team = profiled.program, profiled.team
    program.run(batch, team)
    program.profile(True)
    program.run(batch, team)
    once_s = sum(program.op_ns) / 1e9
    for _ in range(min(MAX_RUNS, int(ROUND_S / max(once_s, 1e-6)))):
        program.run(batch, team)
    times: dict[OpName, float] = {}
    for name, total_ns in zip(op_names(profiled.spec), program.op_ns, strict=True):
        times[name] = times.get(name, 0.0) + total_ns / 1e9 / program.num_profiled_runs
    program.profile(False)
    return times


class Bounds(NamedTuple):
    """Of the ops of one name together."""

    cost: Cost
    least_s: float  # the least time that the machine allows


def step_bounds(profiled: Profiled, step: Step, peaks: Peaks) -> dict[OpName, Bounds]:
    shape = StepShape.of_rows(step.rows, len(step.rows))
    bounds: dict[OpName, Bounds] = {}
    for name, op in zip(op_names(profiled.spec), profiled.spec.ops, strict=True):
        cost = cost_of(profiled.spec, op, shape, profiled.formats)
        before = bounds.get(name, Bounds(Cost(0, 0), 0.0))
        least_s = limit_s(op.name, cost, peaks, product_dtype(profiled.spec, op))
        bounds[name] = Bounds(before.cost.plus(cost), before.least_s + least_s)
    return bounds


def product_dtype(spec: ProgramSpec, op: Op) -> str:
    """Of what an op multiplies: the inputs of a product, else float32."""
    if isinstance(op, (Linear, LinearSiluMul)):
        return spec.buffers[op.x].dtype
    return "float32"


def limit_s(op: str, cost: Cost, peaks: Peaks, dtype: str) -> float:
    """The least time for an op that multiplies numbers of `dtype`. Weights and contexts come from
    memory, what other ops move was written a moment before and is in the cache of a thread."""
    from_memory = op in (Linear.name, LinearSiluMul.name, PagedAttention.name)
    bandwidth = peaks.memory if from_memory else peaks.own_cache
    dots = {"bfloat16": peaks.bf16_dot, "int8": peaks.int8_dot}
    operations = dots.get(dtype) or peaks.fma
    return max(cost.num_bytes / bandwidth, cost.num_operations / operations)


class Profile(NamedTuple):
    """Medians over the rounds, beside the best that the machine did meanwhile."""

    peaks: Peaks
    steps: dict[str, list[tuple[str, Figures]]]  # by step: op, figures; the last is the whole


def profile(profiled: Profiled, steps: Sequence[Step], num_rounds: int) -> Profile:
    """Every step in every round, and the peaks before each."""
    measured: list[Peaks] = []
    rounds: list[list[dict[OpName, float]]] = []
    for _ in range(num_rounds):
        rounds.append([])
        for step in steps:
            measured.append(measure_peaks(profiled.cpu, profiled.team))
            rounds[-1].append(time_step(profiled, step))
    while len(measured) < LEAST_PEAKS:
        measured.append(measure_peaks(profiled.cpu, profiled.team))
    peaks = best_of(measured)
    tables = {}
    for index, step in enumerate(steps):
        times = [times[index] for times in rounds]
        median_s = {name: statistics.median(one[name] for one in times) for name in times[0]}
        tables[step.name] = _rows(profiled, step, median_s, peaks)
    return Profile(peaks, tables)


def _rows(
    profiled: Profiled, step: Step, times: dict[OpName, float], peaks: Peaks
) -> list[tuple[str, Figures]]:
    whole_s = sum(times.values())
    rows, least_s, everything = [], 0.0, Cost(0, 0)
    for (op, of), (cost, limit) in step_bounds(profiled, step, peaks).items():
        seconds = times[op, of]
        rows.append((f"{op} {of}", _figures(cost, seconds, limit, whole_s)))
        least_s, everything = least_s + limit, everything.plus(cost)
    rows.append(("all", _figures(everything, whole_s, least_s, whole_s)))
    return rows


def _figures(cost: Cost, seconds: float, limit: float, whole_s: float) -> Figures:
    seconds = max(seconds, 1e-9)
    return {
        "us": 1e6 * seconds,
        "% of step": 100 * seconds / max(whole_s, 1e-9),
        "GB/s": cost.num_bytes / seconds / 1e9,
        "GFLOP/s": cost.num_operations / seconds / 1e9,
        "% of limit": 100 * limit / seconds,
    }


def disturbance(measured: Profile) -> str:
    """What to say where a kernel beat its limit; empty where none did."""
    shares = [figures["% of limit"] for ops in measured.steps.values() for _, figures in ops]
    if max(shares, default=0.0) <= DISTURBED:
        return ""
    return (
        f"kernels reached {max(shares):.0f} % of their limit: the peaks were disturbed by other "
        "load, or a cache held what was counted as memory; don't trust '% of limit' here"
    )


def print_profile(
    benchmark: str, title: str, measured: Profile, details: Mapping[str, Any]
) -> None:
    """A table of the ops of each step, under the machine's limits; then the document."""
    rows: list[tuple[str, Figures]] = []
    for name, ops in measured.steps.items():
        rows += [(f"{name}:", {}), *((f"  {op}", figures) for op, figures in ops)]
    print("  ".join(f"{name} {value:.0f}" for name, value in shown(measured.peaks).items()))
    if warning := disturbance(measured):
        print(warning)
    document = {
        **details,
        "peaks": {name: value for name, value in measured.peaks._asdict().items() if value},
        "steps": {name: dict(ops) for name, ops in measured.steps.items()},
    }
    print_report(benchmark, title, rows, document)
