"""Everything that claims to be the vocabulary has exactly its ops."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from streamkv.ops import VOCABULARY, Ops
from streamkv.ops.kernels import KernelTable
from streamkv.ops.reference import REFERENCE
from streamkv.runner.eager import Eager
from streamkv.runner.program import OP_TYPES
from streamkv.runner.recorder import Recorder
from streamkv.runner.torch_ops import TorchOps


def parameters_of(function) -> list[tuple[str, object]]:
    """Names and defaults, without self."""
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.default) for one in parameters if one.name != "self"]


def test_a_kernel_table_has_exactly_the_ops_of_the_vocabulary() -> None:
    fields = [field.name for field in dataclasses.fields(KernelTable)]
    assert tuple(fields) == ("name", "detail", *VOCABULARY)


def test_the_protocol_that_models_see_has_exactly_the_ops_of_the_vocabulary() -> None:
    methods = [name for name in vars(Ops) if not name.startswith("_")]
    assert tuple(methods) == VOCABULARY


def test_a_program_has_a_type_for_each_op_of_the_vocabulary() -> None:
    assert tuple(op.name for op in OP_TYPES) == VOCABULARY


@pytest.mark.parametrize("interpreter", [Recorder, Eager, TorchOps])
def test_every_interpreter_takes_what_the_protocol_says(interpreter: type) -> None:
    for op in VOCABULARY:
        assert parameters_of(getattr(interpreter, op)) == parameters_of(getattr(Ops, op)), op


def test_a_table_says_what_it_runs_on() -> None:
    assert REFERENCE.describe() == f"reference ({REFERENCE.detail})"
    assert REFERENCE.detail.startswith("torch ")
