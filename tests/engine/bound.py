"""Answers that a grammar binds, on the fake device: how the tests ask for them."""

from __future__ import annotations

from typing import Any

from engine.support import (
    VOCAB_SIZE,
    check_nothing_is_held,
    make_runner,
    until,
    until_idle,
)
from fakes import FakeMaskBoard, FakeRunner

from streamkv.engine.async_engine import AsyncEngine
from streamkv.protocol import SamplingParams
from streamkv.sampling import StructuredOutputs

PROMPT = [10, 20, 30]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["the quick brown fox", "the lazy dog"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
CHOICE = StructuredOutputs(choice=["the quick brown fox jumps over the lazy dog"])


def bound(structured: StructuredOutputs = JSON, **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 90, "temperature": 1.0, "seed": 1, "structured_outputs": structured}
        | params
    )


def make_bound_runner(**options: Any) -> FakeRunner:
    """Waits for masks as long as it takes, unless `options` say otherwise."""
    board = FakeMaskBoard(VOCAB_SIZE)
    return make_runner(
        **{"masks": board, "mask_wait_s": 10.0, "max_model_len": 200, "avoid": ()} | options
    )


async def check_all_is_given_back(engine: AsyncEngine, runner: FakeRunner) -> None:
    await until_idle(engine)
    board = runner.masks
    await until(lambda: board.num_slots == 0)  # the thread gives them back
    assert board.violations == []
    check_nothing_is_held(engine, runner)
