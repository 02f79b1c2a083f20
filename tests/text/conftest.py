"""The default model's tokenizer, built once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_tiny_checkpoint

from streamkv.text.tokenizer import Tokenizer
from streamkv.weights.gguf import GGUFFile
from streamkv.weights.hub import Checkpoint


@pytest.fixture(scope="session")
def default_metadata(default_checkpoint: Checkpoint) -> dict[str, object]:
    file = GGUFFile(default_checkpoint.path)
    try:
        return dict(file.metadata)
    finally:
        file.close()


@pytest.fixture(scope="session")
def default_tokenizer(default_metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(default_metadata)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
