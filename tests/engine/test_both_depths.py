"""Every feature on the CPU's own runner, with the next step sent while one runs and without: equal
answers, to the last bit of their log-probabilities.

Each row of the table is one request; all run at once, for more rows and blocks than there are.
An answer that its feature didn't change would show nothing, so that is checked too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine.support import TOKENIZER, run
from tiny import save_tiny_checkpoint

from streamkv.engine.async_engine import AsyncEngine
from streamkv.engine.outputs import Completion, TokenLogprob
from streamkv.protocol import SamplingParams
from streamkv.sampling import StructuredOutputs

PROMPT = TOKENIZER.encode("the quick brown fox jumps over the lazy dog. " * 4)
PLAIN: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
CALL = {"begin": "<call>", "schema": SCHEMA, "end": "</call>"}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": "[a-f ]{3,40}"},
    "choice": {"choice": ["the quick brown fox", "the lazy dog"]},
    "grammar": {"grammar": 'root ::= ("ab" | "cd" root) " end"'},
    "structural_tag": {
        "structural_tag": {"type": "structural_tag", "structures": [CALL], "triggers": ["<call>"]}
    },
}


class Answer(NamedTuple):
    """All that a client is told, but for times and what was cached."""

    choices: list[Completion]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    num_prompt_tokens: int


def features(plain: Completion) -> dict[str, dict[str, Any]]:
    """What each request says besides PLAIN, whose answer `plain` is."""
    seen = plain.token_ids
    ends = {"ignore_eos": False, "stop_token_ids": [seen[6]]}
    return {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 3.0},
        "top_k": {"top_k": 3},
        "top_p": {"top_p": 0.3},
        "min_p": {"min_p": 0.2},
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 2.0},
        "repetition_penalty": {"repetition_penalty": 3.0},
        "logit_bias": {"logit_bias": {40: 30.0}},
        "seed": {"seed": 4},
        "max_tokens": {"max_tokens": 40},
        "stop": {"stop": [plain.text[8:11]]},
        "stop, included": {"stop": [plain.text[8:11]], "include_stop_str_in_output": True},
        "stop_token_ids": ends,
        "min_tokens": ends | {"min_tokens": 12},
        "n": {"n": 3},
        "best_of": {"n": 1, "best_of": 3},
        "beams": {"n": 2, "use_beam_search": True, "best_of": 4, "temperature": 0.0},
        "logprobs": {"logprobs": 3},
        "prompt_logprobs": {"prompt_logprobs": 2},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
        "allowed_token_ids": {"allowed_token_ids": [40, 41, 42, 43]},
        "bad_words": {"bad_words": [TOKENIZER.decode([seen[3]]), TOKENIZER.decode(seen[8:10])]},
        **{
            f"structured_outputs: {kind}": {
                "structured_outputs": StructuredOutputs(**fields),
                "ignore_eos": False,
                "max_tokens": 60,
            }
            for kind, fields in GRAMMARS.items()
        },
    }


async def answer(engine: AsyncEngine, **params: Any) -> Answer:
    async with engine.generate(PROMPT, SamplingParams(**PLAIN | params)) as stream:
        choices = await stream.collect()
        return Answer(choices, stream.prompt_logprobs, stream.usage.num_prompt_tokens)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(path, hidden_size=64)  # heads of 16
    return path


def answers(checkpoint: Path, **options: Any) -> dict[str, Answer]:
    async def main() -> dict[str, Answer]:
        async with AsyncEngine(str(checkpoint), dtype="float32", **options) as engine:
            plain = await answer(engine)
            asked = features(plain.choices[0])
            given = await asyncio.gather(*(answer(engine, **one) for one in asked.values()))
            stats = engine.stats()
            assert stats.num_free_blocks == stats.num_blocks
            return {"plain": plain} | dict(zip(asked, given, strict=True))

    return run(main)


@pytest.fixture(scope="module")
def at_depth_0(checkpoint: Path) -> dict[str, Answer]:
    return answers(checkpoint, async_scheduling=False)


def test_each_feature_changes_the_answer(at_depth_0: dict[str, Answer]):
    plain = at_depth_0["plain"]
    assert [name for name, one in at_depth_0.items() if one == plain] == ["plain"]


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 6, "num_gpu_blocks_override": 40}])
def test_both_depths_give_equal_answers(checkpoint, at_depth_0, options: dict[str, Any]):
    at_depth_1 = answers(checkpoint, async_scheduling=True, **options)
    differing = [name for name, one in at_depth_0.items() if one != at_depth_1[name]]
    assert differing == []
