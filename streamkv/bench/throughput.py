"""`streamkv bench throughput`: tokens per second of closed loops, prompts included."""

from __future__ import annotations

from ..config import EngineConfig
from .load import THROUGHPUT, Load, run
from .options import LoadConfig


def loads_of(options: LoadConfig) -> list[Load]:
    """Every input length with every concurrency."""
    return [
        Load(
            concurrency,
            input_len,
            options.output_len,
            options.shared_prefix_len,
            concurrency * options.requests_per_stream,
        )
        for input_len in options.input_len
        for concurrency in options.concurrency
    ]


def bench_throughput(engine_config: EngineConfig, options: LoadConfig) -> int:
    return run(
        "throughput",
        engine_config,
        loads_of(options),
        num_rounds=options.rounds,
        seed=options.prompt_seed,
        shown=THROUGHPUT,
    )
