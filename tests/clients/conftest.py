"""One real server for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
import pytest
from clients.official import sync_client
from clients.real_server import RealServer, real_server
from server.harness import Server, serve

from streamkv.weights.hub import Checkpoint

# Read when litellm is imported: its table of prices comes with it, none is fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


@pytest.fixture(scope="session")
def real(default_checkpoint: Checkpoint) -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One with a fake model."""
    with serve() as running:
        yield running
        running.wait_idle()
        assert running.runner.violations == []


@pytest.fixture(scope="module")
def client(real: RealServer) -> Iterator[openai.OpenAI]:
    with sync_client(real) as one:
        yield one
