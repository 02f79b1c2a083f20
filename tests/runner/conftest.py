"""A tiny model, made once for each module, and transformers' answer to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny import save_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture(scope="module")
def oracle(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
