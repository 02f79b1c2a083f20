"""Every kernel table there is: plain torch, and the native one under each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from streamkv import _cpu
from streamkv.ops import native
from streamkv.ops.kernels import KernelTable
from streamkv.ops.reference import REFERENCE

NATIVE = [f"native-{isa}" for isa in _cpu.available_isas()]


@pytest.fixture(autouse=True)
def seeded_on_one_torch_thread() -> Iterator[None]:
    """The oracle's matrices are tiny: sharing them out costs far more than it saves."""
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def reference() -> KernelTable:
    return REFERENCE


@pytest.fixture(params=NATIVE)
def native_table(request: pytest.FixtureRequest) -> Iterator[KernelTable]:
    yield from _native(request.param, num_threads=1)


@pytest.fixture(params=["reference", *NATIVE])
def kernels(request: pytest.FixtureRequest) -> Iterator[KernelTable]:
    if request.param == "reference":
        yield REFERENCE
    else:
        yield from _native(request.param, num_threads=2)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def _native(name: str, num_threads: int) -> Iterator[KernelTable]:
    table = native.load(num_threads)
    _cpu.set_isa(name.removeprefix("native-"))
    yield table
    _cpu.set_isa(_cpu.available_isas()[0])
    _cpu.set_num_threads(1)
