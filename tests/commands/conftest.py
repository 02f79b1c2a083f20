"""What the tests of the commands share: a checkpoint that the native kernels run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context is so long that an answer without an end token goes on for minutes."""
    folder = tmp_path_factory.mktemp("commands") / "tiny"
    return save_tiny_checkpoint(folder, hidden_size=64, max_position_embeddings=1 << 20)
