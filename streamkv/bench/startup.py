"""`streamkv bench startup`: how long a fresh process takes to its first token, and its memory.

The files were read before, if only by the run before: nothing is measured from a cold disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import msgspec

from ..config import EngineConfig
from ..errors import StreamkvError
from .options import StartupConfig
from .report import Figures, medians, print_report


def start_once(config: EngineConfig, input_len: int) -> Figures:
    """Start a process, wait for its end; its figures. StreamkvError if it fails."""
    asked = json.dumps({"config": msgspec.to_builtins(config), "input_len": input_len})
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "streamkv.bench.first_token"],
        input=asked + "\n",
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        *_, reason = done.stderr.strip().splitlines() or ["no message"]
        raise StreamkvError(f"a fresh process ended with {done.returncode}: {reason}")
    got = json.loads(done.stdout.splitlines()[-1])
    return {
        "python_s": got["began_s"] - started_s,
        "imports_s": got["imported_s"] - got["began_s"],
        "load_s": got["ready_s"] - got["imported_s"],
        "first_answer_s": got["first_token_s"] - got["ready_s"],
        "first_token_s": got["first_token_s"] - started_s,
        "cpu_s": got["cpu_s"],
        "peak_rss_mib": got["peak_rss_bytes"] / 2**20,
        "weights_mib": got["weight_bytes"] / 2**20,
    }


def bench_startup(engine_config: EngineConfig, options: StartupConfig) -> int:
    rounds = [start_once(engine_config, options.input_len) for _ in range(options.runs)]
    middle = medians(rounds)
    details = {
        "config": msgspec.to_builtins(engine_config),
        "medians": middle,
        "rounds": rounds,
    }
    print_report("startup", "fresh process", [(engine_config.model_id, middle)], details)
    return 0
