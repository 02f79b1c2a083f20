"""Engines that build their own runner and tokenizer, from a folder on disk."""

from __future__ import annotations

import asyncio

import pytest
from continuation import continued_ids
from engine.support import TOKENIZER, greedy, run, until_idle
from tiny import save_tiny_checkpoint

from streamkv.engine.async_engine import AsyncEngine
from streamkv.errors import ModelLoadError

PROMPTS = ["the quick brown fox", "user", "what is the answer to this question", "the the the"]


def test_an_engine_loads_a_folder_and_answers_as_transformers_does(tmp_path):
    save_tiny_checkpoint(tmp_path)
    expected = [continued_ids(tmp_path, prompt, 8) for prompt in PROMPTS]

    async def main() -> None:
        options = {"dtype": "float32", "num_gpu_blocks_override": 64, "ops": "reference"}
        async with AsyncEngine(str(tmp_path), **options) as engine:
            assert engine.info.num_blocks == 64
            assert engine.tokenizer.eos_token_ids >= TOKENIZER.eos_token_ids
            streams = [engine.generate(prompt, greedy(max_tokens=8)) for prompt in PROMPTS]
            results = await asyncio.gather(*(stream.collect() for stream in streams))
            assert [list(completion.token_ids) for (completion,) in results] == expected
            await until_idle(engine)
            assert engine.stats().num_free_blocks == 64

    run(main)


def test_a_folder_without_weights_is_a_load_error(tmp_path):
    save_tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    async def main() -> None:
        with pytest.raises(ModelLoadError):
            async with AsyncEngine(str(tmp_path)):
                pass

    run(main)
