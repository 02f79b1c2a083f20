"""The client that counts: its counts against a server whose counts are known."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes import FakeRunner
from server.harness import fake_runner, serve

from loadtest import face
from loadtest.face_client import APIS, Counter, run_streams
from loadtest.stream import RequestFailed
from streamkv.bench.bare_app import serve_bare

STEP_S = 0.001


@pytest.fixture(scope="module")
def bare_url() -> Iterator[str]:
    """A server that gives every stream a frame a millisecond."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve_bare(listener, STEP_S))

    def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


def count(url: str, api: str, *, streams: int, length: int, connections: int = 0) -> Any:
    marks: list[int] = []

    async def main() -> Counter:
        return await run_streams(
            APIS[api],
            url,
            num_streams=streams,
            num_connections=connections or streams,
            output_len=length,
            model=None,
            api_key="none",
            mark=lambda counter: marks.append(counter.num_events),
        )

    return asyncio.run(main()), marks


@pytest.mark.parametrize(
    ("api", "connections", "num_others"),
    [("chat", 0, 1), ("completions", 0, 1), ("responses-ws", 0, 0), ("responses-ws", 3, 0)],
)
def test_every_event_and_token_is_counted(
    bare_url: str, api: str, connections: int, num_others: int
) -> None:
    counter, marks = count(bare_url, api, streams=12, length=300, connections=connections)
    assert counter.num_tokens == 3600
    assert counter.num_events == 3600 + 12 * num_others, "usage is an event of its own"
    begun, steady, late, ended = marks
    assert begun == 0 <= steady < 2700 <= late < ended == counter.num_events


@pytest.mark.parametrize("api", APIS)
def test_tokens_of_a_real_server_are_counted_too(api: str) -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate), engine={"max_num_seqs": 16}) as server:
        with ThreadPoolExecutor(1) as pool:
            counting = pool.submit(count, server.url, api, streams=8, length=300)
            load = server.engine.stats
            server.wait_until(
                lambda: load().num_requests_running + load().num_requests_waiting == 8
            )
            gate.release(10_000)  # now that all have come
            counter, _ = counting.result()
    assert counter.num_tokens == 2400
    assert 600 < counter.num_events <= 2400 + 3 * 8, "some tokens are half a character"


def test_cpu_time_is_that_of_the_process_and_grows_with_its_work() -> None:
    before_s, began_s = face.cpu_s([os.getpid()]), time.process_time()
    while time.process_time() < began_s + 0.2:
        pass
    assert face.cpu_s([os.getpid()]) - before_s == pytest.approx(0.2, abs=0.1)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        while face.cpu_s([process.pid]) < 0.05:
            pass
        process.kill()
    with pytest.raises(RequestFailed, match="can't read the CPU time"):
        face.cpu_s([process.pid])


def test_a_round_divides_cpu_time_by_tokens(bare_url: str) -> None:
    options = argparse.Namespace(
        url=bare_url, pid=[os.getpid()], streams=8, connections=None, output_len=200, model=None
    )
    options.api_key = "none"
    figures = face.run_round(options, "completions")
    # The client is in the same process: it does most of it.
    assert 1 < figures["us_per_token"] < 2000
    assert figures["tokens_per_event"] == pytest.approx(200 / 201)
    assert figures["cpu_share"] < 1.2


def test_what_goes_wrong_is_said_in_a_line(bare_url: str) -> None:
    command = [sys.executable, "-m", "loadtest.face", "--pid", str(os.getpid()), "--rounds", "1"]
    short = [*command, "--url", bare_url, "--streams", "4", "--output-len", "1", "--api", "chat"]
    nobody = [*command, "--url", "http://127.0.0.1:9", "--api", "responses-ws"]
    for arguments, message in ((short, "ask for longer ones"), (nobody, "can't connect")):
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


def test_a_server_that_refuses_is_quoted() -> None:
    runner: FakeRunner = fake_runner()
    with serve(runner) as server:
        with pytest.raises(RequestFailed, match="max_tokens"):
            count(server.url, "completions", streams=2, length=5000)
        with pytest.raises(RequestFailed, match="max_output_tokens"):
            count(server.url, "responses-ws", streams=2, length=5000)
        with pytest.raises(RequestFailed, match="ended before"):
            count(server.url, "chat", streams=2, length=1)
