"""What every test may use: the default model's checkpoint, and a header that says what ran."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import pytest

from streamkv.config import DEFAULT_MODEL
from streamkv.weights.hub import Checkpoint, resolve_checkpoint


def pytest_report_header() -> str:
    names = ("torch", "transformers", "tokenizers")
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    isa = os.environ.get("STREAMKV_CPU_ISA", "auto")
    return f"streamkv: {packages}, {os.cpu_count()} x {platform.machine()}, isa {isa}"


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    """The default model on disk; downloaded once per machine, then found in the cache."""
    return resolve_checkpoint(DEFAULT_MODEL)
