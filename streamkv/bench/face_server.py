"""What `bench face` starts: a server without a model, in a process of its own.

Reads a JSON line from stdin ({"kind": "server" | "bare", "model", "step_ms", "streams"}), writes
its port as one when it serves, and ends when stdin does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Coroutine
from typing import Any

from ..config import EngineConfig, ServerConfig
from ..engine.async_engine import AsyncEngine
from ..engine.background import new_event_loop
from ..engine.loading import read_text_side
from ..server.serving import Server
from ..weights.hub import checkpoint_of
from .bare_app import serve_bare
from .fake_runner import FakeRunner

TEXT = (
    "The old clock in the mill had stopped long ago, but the river went on: past the wheel, under "
    "the bridge, and out to the sea. “Who winds it now?” asked the girl. Nobody knew; or if they "
    "did, they weren't telling. In 1873 (or was it '74?) a miller named Žofie kept 12 cats there.\n"
)


def serving(
    listener: socket.socket, model: str, step_s: float, num_streams: int
) -> Coroutine[Any, Any, Any]:
    """streamkv with a device that only takes its time."""
    config = EngineConfig(model=model, max_num_seqs=num_streams, max_num_batched_tokens=8192)
    tokenizer = read_text_side(config, checkpoint_of(config)).tokenizer
    runner = FakeRunner(
        tokenizer.encode(TEXT, add_special_tokens=False),
        vocab_size=tokenizer.vocab_size,
        step_s=step_s,
        max_num_seqs=num_streams,
    )

    async def run() -> None:
        engine = AsyncEngine(config, runner=runner, tokenizer=tokenizer)
        server = asyncio.create_task(Server(engine, ServerConfig()).serve(sockets=[listener]))
        await engine.wait_ready()
        gc.collect()
        gc.freeze()  # as `streamkv serve` does
        report(listener)
        await server

    return run()


async def serving_bare(listener: socket.socket, step_s: float) -> None:
    report(listener)
    await serve_bare(listener, step_s)


def report(listener: socket.socket) -> None:
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    step_s, num_streams = asked["step_ms"] / 1e3, asked["streams"]
    running = (
        serving_bare(listener, step_s)
        if asked["kind"] == "bare"
        else serving(listener, asked["model"], step_s, num_streams)
    )

    def wait_for_end() -> None:
        sys.stdin.read()
        os._exit(0)  # nobody is left to be served

    threading.Thread(target=wait_for_end, daemon=True).start()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(running)


if __name__ == "__main__":
    main()
