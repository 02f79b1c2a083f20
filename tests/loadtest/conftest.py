"""The server that tests of this folder share where they leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.harness import Server, serve


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running
        running.wait_idle()
        assert running.runner.violations == []
