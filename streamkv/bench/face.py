"""`streamkv bench face`: what streaming a token costs the server, whatever makes the tokens.

Owns the processes: a server whose device only takes its time, a bare one (`bare_app.py`), and a
client (`loadtest/face.py`), which counts tokens and reads the CPU time of the server's process.
What the bare one takes is the price of the sockets; the rest is Python's. The rounds take turns.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError, StreamkvError
from .options import FaceConfig
from .report import Figures, medians, print_report

TARGET_US = {"chat": 12.0, "completions": 12.0, "responses-ws": 15.0}  # a token
SHOWN = ("us_per_token", "bare_us", "python_us", "us_per_token_all", "tokens_per_s", "cpu_share")


@contextmanager
def server(
    kind: Literal["server", "bare"], model: str, options: FaceConfig
) -> Iterator[tuple[str, int]]:
    """URL and process id of a server. StreamkvError if it doesn't start."""
    asked = {"kind": kind, "model": model, "step_ms": options.step_ms, "streams": options.streams}
    process = subprocess.Popen(
        [sys.executable, "-m", "streamkv.bench.face_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:  # it ends when its stdin is closed
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
        if not said:
            raise StreamkvError(f"the server without a model ended with {process.wait()}")
        yield f"http://127.0.0.1:{json.loads(said)['port']}", process.pid


def count(url: str, pid: int, api: str, options: FaceConfig) -> Figures:
    """One round of loadtest's client, in a process of its own. StreamkvError if it fails."""
    command = [sys.executable, "-m", "loadtest.face", "--url", url, "--pid", str(pid)]
    command += ["--api", api, "--streams", str(options.streams), "--rounds", "1"]
    command += ["--output-len", str(options.output_len)]
    if options.connections:
        command += ["--connections", str(options.connections)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise StreamkvError(done.stderr.strip().rpartition("\n")[2] or "the client failed")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])["rounds"][api][0]
    return figures


def measure(model: str, options: FaceConfig) -> dict[str, list[Figures]]:
    """API → the figures of each round."""
    rounds: dict[str, list[Figures]] = {api: [] for api in options.api}
    with server("server", model, options) as ours, server("bare", model, options) as bare:
        for _ in range(options.rounds):
            for api, runs in rounds.items():
                bare_us = count(*bare, api, options)["us_per_token"]
                figures = count(*ours, api, options)
                python_us = figures["us_per_token"] - bare_us
                runs.append({**figures, "bare_us": bare_us, "python_us": python_us})
    return rounds


def bench_face(engine_config: EngineConfig, options: FaceConfig) -> int:
    if importlib.util.find_spec("loadtest") is None:
        raise ConfigError(
            "bench face: expected the folder loadtest/, which is in a checkout of the repository, "
            "got none; run it there"
        )
    rounds = measure(engine_config.model, options)
    middle = {api: medians(runs) for api, runs in rounds.items()}
    print_report("face", _title(options), _rows(middle), _details(options, middle, rounds))
    return 0


def _title(options: FaceConfig) -> str:
    return f"{options.streams} streams, a step takes {options.step_ms:g} ms"


def _rows(middle: dict[str, Figures]) -> Sequence[tuple[str, Figures]]:
    return [
        (f"{api}: {_verdict(api, figures)}", {key: figures[key] for key in SHOWN})
        for api, figures in middle.items()
    ]


def _verdict(api: str, figures: Figures) -> str:
    target_us = TARGET_US[api]
    word = "met" if figures["us_per_token"] <= target_us else "MISSED"
    return f"{target_us:.0f} us {word}"


def _details(
    options: FaceConfig, middle: dict[str, Figures], rounds: dict[str, list[Figures]]
) -> dict[str, Any]:
    config = msgspec.to_builtins(options)
    return {"config": config, "target_us": TARGET_US, "medians": middle, "rounds": rounds}
