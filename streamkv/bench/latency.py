"""`streamkv bench latency`: times to the first token and between tokens, as percentiles."""

from __future__ import annotations

from ..config import EngineConfig
from .load import LATENCY, run
from .options import LatencyConfig
from .throughput import loads_of


def bench_latency(engine_config: EngineConfig, options: LatencyConfig) -> int:
    return run(
        "latency",
        engine_config,
        loads_of(options),
        num_rounds=options.rounds,
        seed=options.prompt_seed,
        shown=LATENCY,
    )
