"""`streamkv bench kernels --tune`: what sizes of items and what prefetching are fastest here.

One number after the other is changed, the rest kept. A round times every candidate and what is in
use, turn by turn, and what counts of each is its fastest turn: other load only ever slows.
Invariant: the defaults stay unless another number wins clearly, in the mean of all steps and
without losing in any, and does so again when it is measured alone.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from ..errors import ConfigError
from ..ops.cpu_count import num_usable_cores
from ..ops.tuning import Measured, Values, keep_tuning, machine_class
from ..runner.program import Linear, LinearSiluMul
from ..words import counted
from .kernels import build, extension
from .options import KernelsConfig
from .profile import Profiled, Step, make_batch, steps_of
from .report import Figures, print_report

CLEAR = 0.03
TRIAL_S = 0.03  # of a step in a turn; one that takes longer runs once
TURNS = 2  # for each of --rounds, which are meant for medians
USUAL_FORMAT = "Q4_1"  # the default model's
CANDIDATES: Mapping[str, Mapping[str, Sequence[int]]] = {  # by the weights they are for
    "quantized": {
        "item_kib": (16, 32, 64, 128, 256),
        "item_tiles": (4, 6, 10, 16),
        "ahead": (1024, 2048, 4096, 8192, 16384),
    },
    "float": {
        "float_item_kib": (32, 64, 128, 256, 512),
        "float_item_tiles": (4, 6, 10, 16),
        "float_ahead": (1024, 2048, 4096, 8192, 16384),
    },
}

Measure = Callable[[Values], list[float]]  # seconds of each step with these numbers


class Trial(NamedTuple):
    """One number, and the speed of each step with it, where 1 is that of what was in use."""

    name: str
    value: int
    speeds: list[float]

    @property
    def mean(self) -> float:
        return math.prod(self.speeds) ** (1 / len(self.speeds))

    @property
    def wins(self) -> bool:
        return self.mean > 1 + CLEAR and min(self.speeds) > 1 - CLEAR


def search(
    measure: Measure,
    start: Values,
    candidates: Mapping[str, Sequence[int]],
    num_rounds: int,
    say: Callable[[str], None],
) -> tuple[Values, list[Trial]]:
    """The numbers to use, and all that was tried."""
    values, trials = dict(start), []
    for name, numbers in candidates.items():
        others = [number for number in numbers if number != values[name]]
        tried = compare(measure, values, name, others, num_rounds)
        trials += tried
        winners = [trial for trial in tried if trial.wins]
        if winners:
            # The best of several is the luckiest, too.
            best = max(winners, key=lambda trial: trial.mean)
            (best,) = compare(measure, values, name, [best.value], num_rounds)
            trials.append(best)
            winners = [best] if best.wins else []
        if not winners:
            say(f"{name}: {values[name]} stays")
            continue
        say(f"{name}: {best.value} instead of {values[name]}, {100 * (best.mean - 1):.1f} % faster")
        values[name] = best.value
    return values, trials


def compare(
    measure: Measure, values: Values, name: str, others: Sequence[int], num_rounds: int
) -> list[Trial]:
    numbers = [values[name], *others]
    rounds: list[dict[int, list[float]]] = []
    for index in range(num_rounds):
        turn = index % len(numbers)  # so that nothing always comes after the same
        order = numbers[turn:] + numbers[:turn]
        rounds.append({number: measure({**values, name: number}) for number in order})
    used_s = _best_s(rounds, values[name])
    return [
        Trial(name, number, [used / s for used, s in zip(used_s, of_other, strict=True)])
        for number, of_other in zip(others, map(partial(_best_s, rounds), others), strict=True)
    ]


def _best_s(rounds: Sequence[dict[int, list[float]]], number: int) -> list[float]:
    return [min(of_step) for of_step in zip(*(one[number] for one in rounds), strict=True)]


def products_s(profiled: Profiled, batch: Any) -> float:
    """Of the products of a step alone: nothing else depends on what is measured."""
    program, team = profiled.program, profiled.team
    program.profile(True)
    program.run(batch, team)
    once_s = max(sum(program.op_ns) / 1e9, 1e-6)
    if once_s < TRIAL_S:
        num_runs = int(TRIAL_S / once_s) + 1
        program.profile(True)  # without that run, which found other weights in the caches
        for _ in range(num_runs):
            program.run(batch, team)
    total_ns: int = sum(
        op_ns
        for op, op_ns in zip(profiled.spec.ops, program.op_ns, strict=True)
        if isinstance(op, (Linear, LinearSiluMul))
    )
    num_profiled_runs: int = program.num_profiled_runs
    return total_ns / 1e9 / num_profiled_runs


def products_of_steps(profiled: Profiled, batches: Sequence[Any], values: Values) -> list[float]:
    profiled.cpu.set_tuning(values)
    return [products_s(profiled, batch) for batch in batches]


def tune(
    cpu: ModuleType, options: KernelsConfig, say: Callable[[str], None]
) -> tuple[Values, list[Trial]]:
    """For float weights, then for quantized ones. The extension's numbers are as before after."""
    before, values, trials = cpu.tuning(), cpu.default_tuning(), []
    steps, num_rounds = steps_of(options), TURNS * options.rounds
    usual = USUAL_FORMAT if options.weight_format == "none" else options.weight_format
    try:
        for kind, weight_format in (("float", "none"), ("quantized", usual)):
            wish = msgspec.structs.replace(options, weight_format=weight_format)
            profiled = build(cpu, wish, steps)
            batches = [make_batch(profiled, step) for step in steps]
            say(f"{profiled.formats.describe()}:")

            measure = partial(products_of_steps, profiled, batches)
            values, tried = search(measure, values, CANDIDATES[kind], num_rounds, say)
            trials += tried
            del profiled, measure  # before the next weights are made
    finally:
        cpu.set_tuning(before)
    return values, trials


def bench_tuning(options: KernelsConfig) -> int:
    """Measure, keep the result for later starts, show it."""
    if not steps_of(options):
        raise ConfigError("--tune: expected --decode-rows or --prompt-len to measure with")
    num_threads = options.threads or num_usable_cores()
    cpu = extension(options.isa, num_threads)
    values, trials = tune(cpu, options, lambda line: print(line, flush=True))
    machine = machine_class(cpu, num_threads)
    measured = Measured(values, datetime.date.today().isoformat())
    try:
        path = keep_tuning(machine, measured)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: the tuning can't be kept there: {error.strerror or error}; "
            "set STREAMKV_CACHE to another folder"
        ) from error
    print(f"kept in {path} for {machine}")
    names = [short_name(step) for step in steps_of(options)]
    rows = [(f"{trial.name} {trial.value}", _figures(trial, names)) for trial in trials]
    details = {
        "config": msgspec.to_builtins(options),
        "machine_class": machine,
        "tuning": values,
        "trials": [[name, figures] for name, figures in rows],
        "file": str(path),
    }
    print_report("tune", "% faster with", rows, details)
    return 0


def short_name(step: Step) -> str:
    is_decode = step.rows[0][0] == 1
    return counted(len(step.rows), "row") if is_decode else f"prompt {step.num_tokens}"


def _figures(trial: Trial, names: Sequence[str]) -> Figures:
    speeds: dict[str, Any] = dict(zip(names, trial.speeds, strict=True))
    return {name: 100 * (speed - 1) for name, speed in (speeds | {"mean": trial.mean}).items()}
