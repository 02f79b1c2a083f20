"""`bench kernels --tune`: a number is changed for a clear gain alone; what was found is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamkv import _cpu
from streamkv.bench import kernels, peaks, profile, tune
from streamkv.cli import main
from streamkv.ops import Parameter, extension
from streamkv.ops.extension import load_extension
from streamkv.runner.program import Linear, LinearSiluMul, SelectRows

START = {"item_kib": 64, "ahead": 100}


class Clock:
    """Seconds of two steps by a formula; load that doubles them comes and goes."""

    def __init__(self, seconds_of: dict[tuple[str, int], tuple[float, float]]) -> None:
        self.factors = seconds_of
        self.asked: list[dict[str, int]] = []

    def __call__(self, values: dict[str, int]) -> list[float]:
        self.asked.append(values)
        load = 1 + len(self.asked) // 7 % 2
        seconds = [1.0 * load, 2.0 * load]
        for item in values.items():
            for step, factor in enumerate(self.factors.get(item, (1.0, 1.0))):
                seconds[step] *= factor
        return seconds


def search(clock: Clock, **candidates: tuple[int, ...]) -> tuple[dict[str, int], list[str]]:
    said: list[str] = []
    values, _ = tune.search(clock, START, candidates, 5, said.append)
    return values, said


def test_a_clear_winner_is_taken_and_the_next_number_is_tried_with_it():
    clock = Clock({("item_kib", 32): (0.8, 0.9), ("item_kib", 16): (0.9, 0.9)})
    values, said = search(clock, item_kib=(16, 32, 64), ahead=(100, 200))
    assert values == {"item_kib": 32, "ahead": 100}
    assert said == ["item_kib: 32 instead of 64, 17.9 % faster", "ahead: 100 stays"]
    assert {"item_kib": 32, "ahead": 200} in clock.asked
    assert {"item_kib": 64, "ahead": 200} not in clock.asked


@pytest.mark.parametrize(
    ("factors", "is_taken"),
    [
        ((0.97, 0.98), False),  # 2.6 % faster: not clear
        ((0.96, 0.96), True),
        ((0.5, 1.04), False),  # one step loses
        ((0.9, 1.02), True),
        ((1.0, 1.0), False),
    ],
)
def test_it_takes_three_percent_and_no_step_that_loses(factors, is_taken):
    values, said = search(Clock({("item_kib", 32): factors}), item_kib=(32, 64))
    assert values["item_kib"] == (32 if is_taken else 64)
    assert len(said) == 1


def test_who_was_only_lucky_is_found_out():
    class Lucky(Clock):
        def __call__(self, values: dict[str, int]) -> list[float]:
            seconds = super().__call__(values)
            if len(self.asked) <= 5 * 3 and values["item_kib"] == 32:
                return [0.8 * one for one in seconds]
            return seconds

    clock = Lucky({})
    values, said = search(clock, item_kib=(16, 32, 64))
    assert values == START and said == ["item_kib: 64 stays"]
    assert len(clock.asked) == 5 * 3 + 5 * 2


def test_turns_change_from_round_to_round():
    clock = Clock({})
    search(clock, item_kib=(16, 32, 64))
    orders = [[one["item_kib"] for one in clock.asked[i : i + 3]] for i in range(0, 15, 3)]
    assert orders == [[64, 16, 32], [16, 32, 64], [32, 64, 16], [64, 16, 32], [16, 32, 64]]


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Quick, and as in new processes that know no tuning."""
    before = load_extension().isa(), _cpu.tuning()
    monkeypatch.setattr(profile, "ROUND_S", 0.0)
    monkeypatch.setattr(tune, "TRIAL_S", 0.001)
    monkeypatch.setattr(peaks, "MEMORY_BYTES", 4 << 20)
    monkeypatch.setitem(kernels.SHAPES["small"], "num_hidden_layers", 2)
    monkeypatch.setenv("STREAMKV_CACHE", str(tmp_path))
    monkeypatch.delenv("STREAMKV_TUNING", raising=False)
    monkeypatch.setattr(extension, "_chosen", None)
    monkeypatch.setattr(extension, "_tuning", None)
    monkeypatch.setattr(tune, "CANDIDATES", {"float": {"float_ahead": (128, 256)},
                                             "quantized": {"ahead": (192, 320)}})  # fmt: skip
    yield tmp_path
    _cpu.set_isa(before[0])
    _cpu.set_tuning(before[1])


def test_what_was_found_is_kept_shown_and_used(own_cache, monkeypatch, capsys):
    """With a clock that likes 256 bytes for floats and 320 for quantized weights best."""
    measured: list[str] = []

    time_products = tune.products_s

    def products_s(profiled: profile.Profiled, batch: object) -> float:
        measured.append(profiled.formats.describe())
        assert time_products(profiled, batch) > 0
        used = _cpu.tuning()
        return 1 / (used["float_ahead"] % 512 + used["ahead"] % 512 + 1)

    monkeypatch.setattr(tune, "products_s", products_s)
    steps = ["--decode-rows", "1", "--prompt-len", "20", "--context", "40", "--rounds", "1"]
    command = ["bench", "kernels", *steps, "--threads", "1"]
    before = _cpu.tuning()
    assert main([*command, "--tune"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    got = json.loads(last)
    expected = _cpu.default_tuning() | {"float_ahead": 256, "ahead": 320}
    assert got["benchmark"] == "tune" and got["tuning"] == expected
    assert [name for name, _ in got["trials"]][0] == "float_ahead 128"
    assert {"1 row", "prompt 20", "mean"} == set(got["trials"][0][1])
    assert len(set(measured)) == 2 and "Q4_1" in measured[-1] and "Q4_1" not in measured[0]
    assert _cpu.tuning() == before
    kept = json.loads((own_cache / "tuning.json").read_text())
    assert [one["values"] for one in kept["machines"].values()] == [expected]

    extension._chosen = None
    assert main(command) == 0
    assert last_document(capsys)["tuning"]["changed"] == {"float_ahead": 256, "ahead": 320}
    assert _cpu.tuning() == expected


def last_document(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_only_products_are_timed(monkeypatch):
    """The mean of the runs after the first, which found other weights in the caches."""

    class Program:
        num_profiled_runs = 0

        def profile(self, on: bool) -> None:
            self.op_ns, self.num_profiled_runs = [0] * 3, 0

        def run(self, batch: object, team: object) -> None:
            self.num_runs = getattr(self, "num_runs", 0) + 1
            self.num_profiled_runs += 1
            slow = 10 if self.num_runs == 1 else 1
            for i, ms in enumerate((1, 4, 2)):
                self.op_ns[i] += ms * slow * 1_000_000

    weight = Parameter("w", (2, 2), ())
    ops = [Linear(0, weight, None, 0, 1), SelectRows(1, 2), LinearSiluMul(0, weight, None, 1)]
    monkeypatch.setattr(tune, "TRIAL_S", 0.1)
    program = Program()
    spec = SimpleNamespace(ops=ops)
    profiled = SimpleNamespace(program=program, team=None, spec=spec)
    assert tune.products_s(profiled, None) == pytest.approx(0.003)
    assert program.num_runs == 1 + 2


def test_a_folder_that_cannot_be_written_is_one_line(own_cache, monkeypatch, capsys):
    (own_cache / "file").write_text("")
    monkeypatch.setenv("STREAMKV_CACHE", str(own_cache / "file" / "below"))
    monkeypatch.setattr(tune, "CANDIDATES", {"float": {}, "quantized": {}})
    assert main(["bench", "kernels", "--tune", "--threads", "1", "--prompt-len", "4"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the tuning can't be kept there" in line
