"""A batch of requests on the engine's event loop: checked, then fed to it as places get free.

Owns how far ahead the engine is fed. It must not know threads, or who waits for the answers.
Invariant: each job has one answer, or the batch ends with one error, and then none of its requests
runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import EngineDeadError, GenerationError
from ..protocol import FinishReason, SamplingParams
from .async_engine import AsyncEngine
from .llm_prompts import Prompt, naming
from .outputs import Completion, TokenLogprob
from .request_output import RequestMetrics

# Of requests that run or wait for a place, a multiple of max_num_seqs: whenever a step ends
# sequences, as many as there may be, others are there to take their places in the next.
FEED = 2
CHECKS_PER_TURN = 64
CLOSED = "the LLM was closed while it generated"


class Job(NamedTuple):
    """One request of a batch."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    priority: int


class Answer(NamedTuple):
    """What came of a job: choices, or an error."""

    job: Job
    completions: list[Completion]
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str
    # Described when called, which takes its time; any thread may do that.
    prompt_logprobs: Callable[[], Sequence[TokenLogprob | None]]


async def check_batch(engine: AsyncEngine, jobs: Sequence[Job]) -> list[Job]:
    """The jobs with seeds, drawn in their order. An error names the prompt at fault."""
    checked = []
    for job in jobs:
        with naming(job.prompt.name):
            checked.append(await _checked(engine, job))
        if len(checked) % CHECKS_PER_TURN == 0:
            await asyncio.sleep(0)
    return checked


async def run_batch(
    engine: AsyncEngine, jobs: Sequence[Job], put: Callable[[Answer], None]
) -> None:
    """Keep the engine fed with jobs that were checked, until all are done."""
    waiting = iter(sorted(jobs, key=lambda job: job.priority))

    async def work() -> None:
        for job in waiting:
            put(await _answer(engine, job))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(jobs), FEED * engine.config.max_num_seqs)):
                group.create_task(work())
    except ExceptionGroup as errors:  # the first of them has ended the others
        raise errors.exceptions[0] from None


async def _checked(engine: AsyncEngine, job: Job) -> Job:
    """The job with a seed, and no more tokens to generate than the context has room for."""
    sampling, token_ids = job.sampling, job.prompt.token_ids
    if sampling.max_tokens is not None:
        room = engine.info.max_model_len - len(token_ids)
        sampling = sampling.clone(max_tokens=min(sampling.max_tokens, max(room, 1)))
    return job._replace(sampling=await engine.check(token_ids, sampling))


async def _answer(engine: AsyncEngine, job: Job) -> Answer:
    stream = engine.generate(
        job.prompt.token_ids,
        job.sampling,
        request_id=job.request_id,
        priority=job.priority,
        cache_salt=job.prompt.cache_salt,
        queue_places=0,  # only so many jobs are fed: there is always room, or will be
    )
    completions: list[Completion] = []
    error = ""
    try:
        completions = await stream.collect()
    except GenerationError as exc:
        error = str(exc)
    if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
        raise EngineDeadError(CLOSED)
    metrics = RequestMetrics(
        arrival_time=stream.arrival_s or 0.0,
        first_token_time=stream.first_token_s,
        finished_time=stream.finish_s,
    )
    num_cached_tokens = stream.usage.num_cached_tokens
    return Answer(
        job, completions, num_cached_tokens, metrics, error, lambda: stream.prompt_logprobs
    )
