"""Tuning: the same bits whatever it is, where it comes from, and what is said of what is wrong."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ops.arrays import pack, to_inputs
from ops.quantized import FORMATS, Array, pack_blocks, random_blocks

from streamkv import _cpu
from streamkv._cpu import ops
from streamkv.errors import ConfigError
from streamkv.ops import extension, tuning
from streamkv.ops.extension import load_extension, tuning_in_use
from streamkv.ops.tuning import Measured, keep_tuning, machine_class

# The least and the most of each number, and some between.
TUNINGS = [
    {"item_kib": 1, "item_tiles": 1, "ahead": 0}
    | {"float_item_kib": 1, "float_item_tiles": 1, "float_ahead": 0},
    {"item_kib": 3, "item_tiles": 2, "ahead": 64}
    | {"float_item_kib": 37, "float_item_tiles": 3, "float_ahead": 1 << 20},
    {"item_kib": 1 << 16, "item_tiles": 64, "ahead": 1 << 20}
    | {"float_item_kib": 1 << 16, "float_item_tiles": 64, "float_ahead": 64},
]
NUM_ROWS = [1, 2, 4, 5, 8, 13, 40, 130, 300]
GATED, DEPTH = 150, 512


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without numbers from the machine that the tests run on."""
    before, isa = _cpu.tuning(), load_extension().isa()
    monkeypatch.setenv("STREAMKV_CACHE", str(tmp_path))
    monkeypatch.delenv("STREAMKV_TUNING", raising=False)
    monkeypatch.setattr(extension, "_chosen", None)
    monkeypatch.setattr(extension, "_tuning", None)
    yield
    _cpu.set_isa(isa)
    _cpu.set_tuning(before)


def outputs_of(team: _cpu.Team, weights: list[object], inputs: Array) -> list[bytes]:
    plain, paired = weights
    found = []
    for num_rows in NUM_ROWS:
        found.append(ops.linear(team, inputs[:num_rows], plain).tobytes())
        found.append(ops.linear_silu_mul(team, inputs[:num_rows], paired).tobytes())
    return found


def assert_same_bits(team: _cpu.Team, weights: list[object], inputs: Array) -> None:
    _cpu.set_tuning({})
    expected = outputs_of(team, weights, inputs)
    for values in TUNINGS:
        _cpu.set_tuning(values)
        assert _cpu.tuning() == values
        assert outputs_of(team, weights, inputs) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_no_bit_of_a_quantized_product_depends_on_it(isa: str, team: _cpu.Team, name: str) -> None:
    random = np.random.default_rng(5)
    parts = [random_blocks(name, GATED, DEPTH, random) for _ in range(2)]
    weights = [pack_blocks([name] * 2, parts, DEPTH, is_paired=paired) for paired in (False, True)]
    x = random.standard_normal((max(NUM_ROWS), DEPTH)).astype(np.float32)
    assert_same_bits(team, weights, ops.quantize(team, x))


def test_no_bit_of_a_float_product_depends_on_it(isa: str, team: _cpu.Team, dtype: str) -> None:
    numbers = torch.randn(2 * GATED, DEPTH, dtype=getattr(torch, dtype))
    weights = [pack(numbers, is_paired=paired) for paired in (False, True)]
    x = to_inputs(torch.randn(max(NUM_ROWS), DEPTH), weights[0])
    assert_same_bits(team, weights, x)


def test_what_is_not_named_has_its_default() -> None:
    _cpu.set_tuning({"item_kib": 16, "ahead": 128})
    assert _cpu.tuning() == _cpu.default_tuning() | {"item_kib": 16, "ahead": 128}
    _cpu.set_tuning({})
    assert _cpu.tuning() == _cpu.default_tuning()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"item_kb": 16}, "expected names among item_kib, .*float_ahead, got 'item_kb'"),
        ({"item_kib": 0}, "item_kib: expected a whole number from 1 to 65536, got 0"),
        ({"item_tiles": 65}, "item_tiles: expected a whole number from 1 to 64, got 65"),
        ({"ahead": 100}, "ahead: expected a multiple of 64 from 0 to 1048576, got 100"),
        ({"float_ahead": -64}, "float_ahead: expected a multiple of 64 from 0 to .*, got -64"),
        ({"float_item_kib": 2**70}, "float_item_kib: expected a whole number .*, got 1180591"),
        ({"item_kib": 8.0}, "item_kib: expected a whole number from 1 to 65536, got 8.0"),
        ({"item_kib": True}, "item_kib: expected a whole number from 1 to 65536, got True"),
    ],
)
def test_numbers_out_of_range_are_refused_whole(values: dict[str, int], message: str) -> None:
    _cpu.set_tuning({"float_item_tiles": 7})
    with pytest.raises(ValueError, match=message):
        _cpu.set_tuning({"item_tiles": 3} | values)
    assert _cpu.tuning() == _cpu.default_tuning() | {"float_item_tiles": 7}


# --- where it comes from -------------------------------------------------------------------------


def keep(values: dict[str, int], num_threads: int = 3, isa: str | None = None) -> Path:
    _cpu.set_isa(isa or _cpu.available_isas()[0])
    return keep_tuning(machine_class(_cpu, num_threads), Measured(values, "2026-01-31"))


def test_without_a_file_the_defaults_are_used(caplog: pytest.LogCaptureFixture) -> None:
    _cpu.set_tuning({"item_kib": 16})
    assert tuning_in_use(3).describe() == "defaults"
    assert _cpu.tuning() == _cpu.default_tuning()
    assert not caplog.records


def test_what_was_measured_is_used_by_the_same_class_of_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("STREAMKV_CPU_ISA", raising=False)
    keep({"item_kib": 32, "float_ahead": 2048})
    keep({"item_kib": 8}, num_threads=4)
    keep({"item_kib": 4}, isa=_cpu.available_isas()[-1])
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tuning, "cpu_name", lambda: "another")
        keep({"item_kib": 2})
    used = tuning_in_use(3)
    assert used.describe() == ("item 32 KiB, float ahead 2048 bytes (measured here on 2026-01-31)")
    assert _cpu.tuning() == _cpu.default_tuning() | {"item_kib": 32, "float_ahead": 2048}
    assert used.values == _cpu.tuning()
    assert tuning_in_use(4) is used, "it is chosen once"


def test_measured_defaults_are_said_to_be_measured() -> None:
    keep(_cpu.default_tuning())
    assert tuning_in_use(3).describe() == "defaults (measured here on 2026-01-31)"


def test_a_later_measurement_replaces_its_own_class_alone(tmp_path: Path) -> None:
    keep({"item_kib": 32})
    keep({"item_kib": 8}, num_threads=4)
    path = keep({"item_tiles": 6})
    assert path == tmp_path / "tuning.json" and os.listdir(tmp_path) == [path.name]
    machines = json.loads(path.read_text())["machines"]
    assert [one["values"] for one in machines.values()] == [{"item_tiles": 6}, {"item_kib": 8}]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "\0\1\2",
        '{"format": 2, "machines": {}}',
        '{"format": 1, "machines": {}, "more": 1}',
        '{"format": 1, "machines": {"MACHINE": {"values": {"item_kib": "x"}, "date": "d"}}}',
        '{"format": 1, "machines": {"MACHINE": {"values": {"item_kib": 0}, "date": "d"}}}',
        '{"format": 1, "machines": {"MACHINE": {"values": {"foo": 1}, "date": "d"}}}',
    ],
)
def test_a_file_of_no_use_is_left_out_with_one_line_and_replaced(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _cpu.set_isa(_cpu.available_isas()[0])
    path = tmp_path / "tuning.json"
    path.write_text(content.replace("MACHINE", machine_class(_cpu, 3)))
    assert tuning_in_use(3).describe() == "defaults"
    assert _cpu.tuning() == _cpu.default_tuning()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{path}: not used, the kernels keep their defaults: ")
    keep({"item_kib": 32})
    extension._chosen = None
    assert tuning_in_use(3).values["item_kib"] == 32


def test_a_pipe_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "tuning.json")
    assert tuning_in_use(3).describe() == "defaults"
    assert "expected a file, got something else" in caplog.text


def test_the_environment_replaces_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    keep({"item_kib": 32, "item_tiles": 6})
    monkeypatch.setenv("STREAMKV_TUNING", "item_kib=128, ahead=2048")
    assert tuning_in_use(3).describe() == "item 128 KiB, ahead 2048 bytes (STREAMKV_TUNING)"
    assert _cpu.tuning() == _cpu.default_tuning() | {"item_kib": 128, "ahead": 2048}


def test_off_means_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    keep({"item_kib": 32})
    monkeypatch.setenv("STREAMKV_TUNING", "off")
    assert tuning_in_use(3).describe() == "defaults"
    assert _cpu.tuning() == _cpu.default_tuning()


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("on", "expected 'off' or names with numbers such as item_kib=64,ahead=2048, got 'on'"),
        ("item_kib=64,", "expected 'off' or names with numbers .*, got ''"),
        ("item_kib=-1", "expected 'off' or names with numbers .*, got 'item_kib=-1'"),
        ("item_kib=0", "item_kib: expected a whole number from 1 to 65536, got 0"),
        ("items=5", "expected names among item_kib, .*, got 'items'"),
    ],
)
def test_a_wrong_wish_is_an_error_each_time(
    wish: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMKV_TUNING", wish)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"STREAMKV_TUNING: .*{message}"):
            load_extension()


def test_an_arm_cores_name_is_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(text: str) -> str:
        monkeypatch.setattr(Path, "read_text", lambda path: text)
        return tuning.cpu_name()

    assert read("processor: 0\nCPU implementer : 0x41\nCPU part\t: 0xd0c\n\nCPU part : 0x1\n") == (
        "Arm core 0xd0c by 0x41"
    )
    assert read("model name\t: Some CPU @ 2 GHz\nmodel name: Other\n") == "Some CPU @ 2 GHz"
