"""The server that most tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.harness import Server, serve


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    with serve() as running:
        yield running
        running.wait_idle()
        assert running.runner.violations == []
