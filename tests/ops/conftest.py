"""The native ops under each instruction set that this CPU runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from streamkv import _cpu


@pytest.fixture(autouse=True)
def seeded_on_one_torch_thread() -> Iterator[None]:
    """The oracle's matrices are tiny: sharing them out costs far more than it saves."""
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=_cpu.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use. Weights and caches are to be made inside the test."""
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(_cpu.available_isas()[0])


@pytest.fixture
def team() -> _cpu.Team:
    return _cpu.Team(2)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Of weights and caches."""
    return request.param
