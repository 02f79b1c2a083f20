"""What every test may use: the default model's checkpoint, and a header that says what ran."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import pytest

from streamkv.config import DEFAULT_MODEL, EngineConfig, ServerConfig
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


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What every `streamkv serve` would serve."""
    seen: list[tuple[EngineConfig, ServerConfig]] = []
    monkeypatch.setattr(
        "streamkv.commands.serve.serve",
        lambda engine_config, server_config: seen.append((engine_config, server_config)) or 0,
    )
    return seen
