"""Runs requests to their end through the real Scheduler and a runner, on the calling thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamkv.config import EngineConfig
from streamkv.core.scheduler import Scheduler
from streamkv.protocol import FinishReason, Request, RowLogprobs, Runner, RunnerInfo, SamplingParams
from streamkv.runner.select import build_runner
from streamkv.weights.hub import Checkpoint


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def load_runner(checkpoint: Checkpoint | Path, **config: Any) -> tuple[Any, RunnerInfo]:
    """A loaded runner: float32, reference ops and few rows unless `config` says otherwise."""
    if isinstance(checkpoint, Path):
        checkpoint = Checkpoint(checkpoint, "huggingface")
    fields = {
        "model": "test",
        "dtype": "float32",
        "device": "cpu",
        "ops": "reference",
        "max_num_seqs": 32,
        "num_gpu_blocks_override": 512,
        "packed_cache_gib": 0.0,
    } | config
    runner: Any = build_runner(EngineConfig(**fields), checkpoint)
    return runner, runner.load(lambda stage, fraction: None)


def request(name: str, prompt: Sequence[int], max_tokens: int = 16, **sampling: Any) -> Request:
    """Greedy unless `sampling` says otherwise."""
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | sampling))
    return Request(
        request_id=name,
        model="test",
        prompt_token_ids=tuple(prompt),
        sampling=params,
        seed=params.seed or 0,
        max_tokens=max_tokens,
    )


def run_requests(
    runner: Runner,
    info: RunnerInfo,
    requests: Sequence[Request],
    *,
    depth: int = 1,
    eos_token_ids: frozenset[int] = frozenset(),
    scheduler: Scheduler | None = None,
    **options: Any,
) -> dict[str, list[Generated]]:
    """What each request's choices generated. `depth` 1 sends a step while one is uncommitted."""
    scheduler = scheduler or build_scheduler(info, eos_token_ids=eos_token_ids, **options)
    results: dict[str, list[Generated]] = {}
    for one in requests:
        results[one.request_id] = [Generated() for _ in scheduler.add(one)]
    outputs = deque()
    while scheduler.has_work:
        planned = scheduler.schedule() if len(outputs) <= depth else None
        if planned is not None:
            outputs.append(runner.step(planned.step))
        if planned is None or len(outputs) > depth:
            committed = scheduler.commit(outputs.popleft())
            for event in [*committed, *scheduler.take_answers(100_000)]:
                choice = results[event.sequence.request.request_id][event.sequence.choice]
                if event.token_id >= 0:
                    choice.token_ids.append(event.token_id)
                    choice.logprobs.append(event.logprobs)
                choice.finish_reason = event.finish_reason
        scheduler.check_integrity()
    return results


def build_scheduler(info: RunnerInfo, **options: Any) -> Scheduler:
    fields = {
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": info.max_model_len,
        "eos_token_ids": frozenset(),
        "min_lookahead": 0,  # preempt as often as can be
    } | options
    return Scheduler(**fields)
