from __future__ import annotations

import dataclasses
import inspect

from streamkv.ops import VOCABULARY, Ops
from streamkv.ops.kernels import KernelTable


def test_a_kernel_table_has_exactly_the_ops_of_the_vocabulary() -> None:
    fields = [field.name for field in dataclasses.fields(KernelTable)]
    assert tuple(fields) == ("name", "detail", *VOCABULARY)


def test_the_protocol_that_models_see_has_exactly_the_ops_of_the_vocabulary() -> None:
    methods = [name for name in vars(Ops) if not name.startswith("_")]
    assert tuple(methods) == VOCABULARY


def test_every_implementation_takes_the_arguments_of_the_reference(
    kernels: KernelTable, reference: KernelTable
) -> None:
    for op in VOCABULARY:
        expected = list(inspect.signature(getattr(reference, op)).parameters)
        assert list(inspect.signature(getattr(kernels, op)).parameters) == expected, op


def test_a_table_says_what_it_runs_on(kernels: KernelTable) -> None:
    assert kernels.describe() == f"{kernels.name} ({kernels.detail})"
    assert kernels.detail
