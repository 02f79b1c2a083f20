"""The server stops: short answers finish, long ones are ended and told so, nobody holds it up."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import expected_tokens
from server.harness import DEADLINE_S, VOCAB_SIZE, Server, fake_runner, serve
from server.raw_client import NEXT, Client
from tiny import save_tiny_checkpoint
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from streamkv.server import http_protocol

TEXT = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 400}
TESTS = Path(__file__).parents[1]

# A server as the command line runs it; its runner takes as many steps as stdin says.
SCRIPT = """
import logging, socket, sys, threading, uvloop
from server.harness import MODEL, fake_runner
from streamkv.commands.serve import run_server
from streamkv.config import ServerConfig
from streamkv.engine.async_engine import AsyncEngine
from streamkv.server.serving import Server
from tiny import tiny_tokenizer

logging.basicConfig(level="INFO")
gate = threading.Semaphore(0)

def read():
    for line in sys.stdin:
        gate.release(int(line))
    gate.release(100_000)

async def main():
    engine = AsyncEngine(runner=fake_runner(gate=gate), tokenizer=tiny_tokenizer(), model=MODEL)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    server = Server(engine, ServerConfig(), grace_s=float(sys.argv[1]))
    return await run_server(server, engine, listener)

threading.Thread(target=read, daemon=True).start()
sys.exit(uvloop.run(main()))
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"


class Process:
    """SCRIPT in a process of its own."""

    def __init__(self, grace_s: float) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(grace_s)],
            env={"PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        self.port = int(self.popen.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self.websocket_url = f"ws://127.0.0.1:{self.port}/v1/responses"

    def steps(self, num: int) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{num}\n")
        self.popen.stdin.flush()

    def stop(self) -> None:
        """Send SIGTERM, and wait until it has begun to stop."""
        self.popen.send_signal(signal.SIGTERM)
        wait_for(self._is_closed)

    def _is_closed(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) != 0

    def wait(self) -> tuple[int, str]:
        """Exit code and log, once it has ended. The end of its stdin lets all steps go."""
        _, log = self.popen.communicate(timeout=DEADLINE_S)
        return self.popen.returncode, log


@contextmanager
def running(grace_s: float) -> Iterator[tuple[Process, httpx.Client]]:
    process = Process(grace_s)
    try:
        with httpx.Client(base_url=process.url, timeout=DEADLINE_S, verify=False) as client:
            wait_for(lambda: client.get("/health").status_code == 200)
            yield process, client
    finally:
        process.popen.kill()
        process.popen.communicate()


def wait_until_admitted(process: Process, num: int) -> None:
    """Until so many requests run or wait."""
    names = ("streamkv:num_requests_running{", "streamkv:num_requests_waiting{")
    with httpx.Client(base_url=process.url, timeout=DEADLINE_S, verify=False) as client:

        def admitted() -> bool:
            lines = client.get("/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith(names)) == num

        wait_for(admitted)


class Asking(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._body = url, body
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=DEADLINE_S, verify=False) as client:
            self._answer = client.post(TEXT, json=self._body)

    def answer(self) -> httpx.Response:
        self.join(DEADLINE_S)
        return self._answer


@contextmanager
def streaming(client: httpx.Client, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The data of a stream whose first event has come."""
    with client.stream("POST", TEXT, json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        yield chain([next(data)], data)


def create(websocket: ClientConnection, num_tokens: int) -> None:
    """Ask for a response, and wait until it has begun."""
    body = {"input": "the fox", "max_output_tokens": num_tokens, "ignore_eos": True}
    websocket.send(json.dumps({"type": "response.create"} | body))
    assert json.loads(websocket.recv())["type"] == "response.created"


def read_to_end(websocket: ClientConnection) -> tuple[dict[str, Any], int]:
    """The last event, and the code of the close that came after it."""
    event: dict[str, Any] = {}
    try:
        while True:
            event = json.loads(websocket.recv(DEADLINE_S))
    except ConnectionClosed as closed:
        assert closed.rcvd is not None
        return event, closed.rcvd.code


def assert_quiet(log: str) -> None:
    assert "ERROR" not in log and "Traceback" not in log, log


# --- signals ---------------------------------------------------------------------------------


def test_a_signal_lets_short_answers_finish_over_sse_websocket_and_json() -> None:
    expected = expected_tokens([5, 6, 7], 8, VOCAB_SIZE)
    with (
        running(grace_s=DEADLINE_S) as (process, client),
        connect(process.websocket_url, proxy=None) as websocket,
    ):
        process.steps(4)
        with streaming(client, BODY | {"return_token_ids": True}) as data:
            create(websocket, 8)
            asking = Asking(process.url, BODY)
            wait_until_admitted(process, 3)
            process.stop()
            process.steps(1000)
            *chunks, done = data
        last, code = read_to_end(websocket)
        answer = asking.answer()
        exit_code, log = process.wait()
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert sum((choice["token_ids"] for choice in choices), []) == expected
    assert (choices[-1]["finish_reason"], done) == ("length", "[DONE]")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["usage"]["output_tokens"] == 8
    assert code == 1012
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert exit_code == -signal.SIGTERM
    assert_quiet(log)
    waiting = f"shutting down: waiting for 3 answers, {DEADLINE_S:g} s at most; a second signal"
    assert waiting in log and log.rstrip().endswith(":shut down")


def test_after_the_grace_long_answers_are_ended_and_told_so() -> None:
    with (
        running(grace_s=0.3) as (process, client),
        connect(process.websocket_url, proxy=None) as websocket,
    ):
        process.steps(4)
        with streaming(client, LONG) as data:
            create(websocket, 400)
            # Nothing of these has been sent.
            asking = [Asking(process.url, LONG | {"stream": stream}) for stream in (False, True)]
            wait_until_admitted(process, 4)
            process.stop()
            *_, error = data
        last, code = read_to_end(websocket)
        answers = [thread.answer() for thread in asking]
        exit_code, log = process.wait()
    assert json.loads(error)["error"]["code"] == "engine_dead"
    assert "shutting down" in json.loads(error)["error"]["message"]
    assert (last["type"], code) == ("response.failed", 1012)
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "service_unavailable_error"
        assert int(answer.headers["retry-after"]) >= 1
    assert exit_code == -signal.SIGTERM
    assert_quiet(log)


def test_a_second_signal_waits_for_nobody() -> None:
    with running(grace_s=10 * DEADLINE_S) as (process, client):
        process.steps(4)
        with streaming(client, LONG) as data:
            process.stop()
            process.popen.send_signal(signal.SIGINT)
            exit_code, log = process.wait()
            with pytest.raises(httpx.RemoteProtocolError):
                list(data)
    assert exit_code == -signal.SIGTERM
    assert_quiet(log)


def test_ctrl_c_ends_the_command_with_130_even_while_the_model_loads(tmp_path: Path) -> None:
    model = save_tiny_checkpoint(tmp_path / "tiny")
    command = [sys.executable, "-m", "streamkv", "serve", "--ops", "reference", "--port", "0"]
    with subprocess.Popen([*command, str(model)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        with httpx.Client(base_url=url, timeout=DEADLINE_S, verify=False) as client:
            assert client.get("/version").status_code == 200  # the port is open already
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "Traceback" not in log


# --- who can't hold it up --------------------------------------------------------------------


def test_idle_connections_do_not_hold_the_exit() -> None:
    with serve(grace_s=10 * DEADLINE_S) as server, server.client() as client:
        assert client.get("/health").status_code == 200, "and the connection is kept alive"
        silent = socket.create_connection(("127.0.0.1", server.port))  # never says a word
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"GET /health HTTP/1.1\r\n")
        deaf = _upgraded(server.host, server.port)  # never answers a close
        with connect(f"ws://{server.host}/v1/responses", proxy=None) as websocket, silent, half:
            began_s = time.monotonic()
            server.close()
            assert time.monotonic() - began_s < 5
            assert read_to_end(websocket) == ({}, 1012)
            with deaf:
                assert deaf.makefile("rb").read()[:4] == b"\x88\x1d\x03\xf4"  # close, 1012


def _upgraded(host: str, port: int) -> socket.socket:
    client = socket.create_connection((host.split(":")[0], port), timeout=DEADLINE_S)
    client.sendall(
        f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n".encode()
    )
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        received += client.recv(1)
    return client


def test_readers_that_do_not_read_hold_the_exit_for_the_grace_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve(grace_s=0.2, end_s=0.2) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = json.dumps(LONG | {"n": 16, "stream": True, "logprobs": 5})
        asking = socket.socket()
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.connect(("127.0.0.1", server.port))
        asking.sendall(
            f"POST {TEXT} HTTP/1.1\r\nHost: {server.host}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        with asking, connect(f"ws://{server.host}/v1/responses", proxy=None):
            server.wait_until(lambda: server.engine.stats().request_success_total["length"] == 16)
            [stuck] = [
                connection.transport
                for connection in server.serving.server_state.connections
                if connection.transport.get_write_buffer_size()
            ]
            began_s = time.monotonic()
            server.close()
            assert time.monotonic() - began_s < 5
        assert stuck.is_closing()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
PARTS = {
    "part of a head": HEAD,
    "a head": HEAD + b"Content-Length: 99\r\n\r\n",
    "part of a body": HEAD + b"Content-Length: 99\r\n\r\n{",
    "a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
}


def send_parts(server: Server, parts: Iterable[bytes]) -> list[socket.socket]:
    """A connection for each of these beginnings of a request, which the server has read."""
    clients = [Client(server, "bytes", data=part) for part in parts]
    other = Client(server, "bytes", data=NEXT)
    other.receive_until(b"\r\n\r\n")
    other.leave()
    return [client.socket for client in clients]


def assert_refused(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in head and b"retry-after: " in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "engine_dead")
    assert "shutting down" in error["message"]


def test_requests_that_are_not_whole_are_refused_while_answers_finish(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Semaphore(4)
    with (
        serve(fake_runner(gate=gate), grace_s=10 * DEADLINE_S) as server,
        server.client() as client,
        streaming(client, BODY) as data,
    ):
        sockets = send_parts(server, [PARTS["part of a head"], PARTS["part of a body"]])
        server.serving.should_exit = True
        for asking in sockets:
            with asking, asking.makefile("rb") as answer:
                assert_refused(answer.read())
        gate.release(1000)
        assert [*data][-1] == "[DONE]"
    assert caplog.records == []


def test_requests_that_never_become_whole_are_refused_and_do_not_hold_the_exit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.05)
    with serve(grace_s=10 * DEADLINE_S) as server:
        sockets = send_parts(server, PARTS.values())
        server.close()
        for asking in sockets:
            with asking, asking.makefile("rb") as answer:
                assert_refused(answer.read())
    assert caplog.records == []


# --- new requests ----------------------------------------------------------------------------


def test_while_draining_requests_are_refused_and_health_says_so() -> None:
    gate = threading.Semaphore(4)
    with serve(fake_runner(gate=gate)) as server, server.client() as client:
        with streaming(client, BODY) as data:
            server.engine_call(server.engine.drain)
            with server.client() as other:
                health = other.get("/health")
                assert (health.status_code, health.json()["status"]) == (503, "draining")
                for path, body in (
                    (TEXT, BODY),
                    (TEXT, BODY | {"stream": True}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                    ("/v1/responses", {"input": "hi"}),
                    ("/tokenize", {"prompt": "hi"}),
                ):
                    answer = other.post(path, json=body)
                    assert answer.status_code == 503, path
                    assert answer.json()["error"]["code"] == "engine_dead"
                    assert "shutting down" in answer.json()["error"]["message"]
                    assert int(answer.headers["retry-after"]) >= 1
            gate.release(1000)
            assert [*data][-1] == "[DONE]"


def test_an_engine_that_drains_while_it_loads_never_becomes_ready() -> None:
    gate = threading.Event()
    with serve(fake_runner(load_gate=gate), ready=False) as server, server.client() as client:
        server.wait_until(lambda: "loading weights" in server.engine.status_detail)
        server.engine_call(server.engine.drain)
        gate.set()
        assert client.post(TEXT, json=BODY).json()["error"]["code"] == "engine_dead"
        server.close()
        assert server.engine.status == "closed"
