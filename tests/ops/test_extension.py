"""Which instruction set the native kernels use, and what is said where they can't be used."""

from __future__ import annotations

import sys

import pytest

from streamkv import _cpu
from streamkv.errors import ConfigError
from streamkv.ops import extension
from streamkv.ops.extension import load_extension


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch):
    before = load_extension().isa()
    monkeypatch.setattr(extension, "_chosen", None)
    yield
    _cpu.set_isa(before)


def test_the_best_instruction_set_is_chosen_unless_the_environment_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("STREAMKV_CPU_ISA", raising=False)
    best, *others = _cpu.available_isas()
    assert load_extension().isa() == best
    for isa in others:
        monkeypatch.setattr(extension, "_chosen", None)
        monkeypatch.setenv("STREAMKV_CPU_ISA", isa)
        assert load_extension() is _cpu
        assert _cpu.isa() == isa


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (_cpu.available_isas() * 2)[1:3]
    monkeypatch.setenv("STREAMKV_CPU_ISA", first)
    assert load_extension().isa() == first
    assert load_extension().isa() == first
    if second != first:
        monkeypatch.setenv("STREAMKV_CPU_ISA", second)
        expected = f"STREAMKV_CPU_ISA: expected '{first}', .*, got '{second}'; .* once per process"
        with pytest.raises(ConfigError, match=expected):
            load_extension()
    monkeypatch.setenv("STREAMKV_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="expected an instruction set .*, got 'sse9'"):
        load_extension()
    assert _cpu.isa() == first
    monkeypatch.delenv("STREAMKV_CPU_ISA")
    assert load_extension().isa() == first, "no name is no wish"


def test_an_unknown_instruction_set_is_an_error_that_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STREAMKV_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="STREAMKV_CPU_ISA: expected .*, got 'sse9'") as caught:
        load_extension()
    assert all(isa in caught.value.message for isa in _cpu.available_isas())


def test_a_missing_extension_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "streamkv._cpu", None)
    monkeypatch.delattr("streamkv._cpu")
    with pytest.raises(ConfigError, match="build them with `pip install .`"):
        load_extension()
