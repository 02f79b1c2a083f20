"""Clients that leave, or cancel, at every stage of every endpoint: nothing runs on for nobody.

Raw sockets, so that a client is gone at once. The device takes as many steps as the test says, and
two more after an abort are all that it may take until every block is free.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from fakes import FakeMaskBoard, FakeRunner, expected_tokens
from server.harness import DEADLINE_S, VOCAB_SIZE, Server, fake_runner, read_events, serve
from server.raw_client import CHAT, RESPONSES, TEXT, Client, Device, Gate
from websockets.sync.client import connect

from streamkv.engine.grammars import GrammarCompilations
from streamkv.engine.reception import Reception
from streamkv.server.generation import Generation

BUDGET = 64  # tokens of a step
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
# Each has a prompt that takes several steps; how many sequences it becomes.
ASKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": (TEXT, LONG | {"prompt": [5, 6, 7] * 60}, 1),
    "completions": (TEXT, LONG | {"prompt": [[5, 6, 7] * 60, [7, 6] * 90], "n": 2}, 4),
    "chat": (CHAT, LONG | {"messages": [{"role": "user", "content": "fox " * 40}]}, 1),
    "chats": (CHAT, LONG | {"messages": [{"role": "user", "content": "fox " * 40}], "n": 3}, 3),
    "response": (
        RESPONSES,
        {"input": "fox " * 40, "max_output_tokens": 300, "ignore_eos": True, "temperature": 0},
        1,
    ),
}
FULL = LONG | {"prompt": [9, 9], "n": 8}  # takes all rows
WAYS = ["json", "sse", "websocket"]
STAGES = ["queued", "prefill", "midway"]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    gate = Gate()
    runner: FakeRunner = fake_runner(gate=gate.semaphore)
    engine = {
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,  # a prompt takes its steps each time
    }
    with serve(runner, engine=engine) as server:
        yield Device(server, gate)
        gate.let(10_000)
        server.wait_idle()
        assert runner.violations == []


def cases() -> list[Any]:
    return [
        pytest.param(name, way, stage, id=f"{name}-{way}-{stage}")
        for name, (path, _, _) in ASKS.items()
        for way in WAYS
        if way != "websocket" or path == RESPONSES
        for stage in STAGES
    ]


class Asked:
    """A request that has come as far as a stage, and those that it waits behind."""

    def __init__(self, device: Device, name: str, way: str, stage: str, **more: Any) -> None:
        path, body, self.num = ASKS[name]
        self._others: list[Client] = []
        self._device = device
        if stage == "queued":  # another one holds all rows, and the device
            self._others.append(device.client("sse", TEXT, FULL))
            device.gate.let(2)  # its first choice leads, the others follow
            device.wait(lambda: device.stats.num_requests_running == FULL["n"])
        self.num_aborted_before = device.num_aborted
        self.client = device.client(way, path, body | more)
        num_held = FULL["n"] if self._others else 0
        device.wait(lambda: device.num_inside == num_held + self.num)
        if stage == "prefill":
            num_steps = device.runner.num_steps
            device.gate.let(1)
            device.wait(lambda: device.runner.num_steps > num_steps)
        elif stage == "midway":
            num_tokens = device.stats.generation_tokens_total
            device.gate.let(9 * self.num)
            device.wait(lambda: device.stats.generation_tokens_total >= num_tokens + 2 * self.num)

    def check_abort(self) -> None:
        """All of it is aborted, and two steps later nothing of it is left."""
        device = self._device
        device.wait(lambda: device.num_aborted == self.num_aborted_before + self.num)
        for other in self._others:
            assert device.stats.num_requests_waiting == 0
            other.leave()
            device.wait(
                lambda: device.num_aborted == self.num_aborted_before + self.num + FULL["n"]
            )
        device.gate.close()  # steps it was allowed and has not taken
        device.gate.let(2)
        device.wait_idle()


# --- leaving ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "way", "stage"), cases())
def test_who_leaves_aborts_within_two_steps(
    device: Device, name: str, way: str, stage: str
) -> None:
    asked = Asked(device, name, way, stage, on_disconnect="abort")
    asked.client.leave()
    asked.check_abort()


def test_a_websocket_that_is_closed_on_purpose_aborts_its_responses(device: Device) -> None:
    num_before = device.num_aborted
    body = ASKS["response"][1] | {"type": "response.create"}
    with connect(f"ws://{device.server.host}{RESPONSES}", proxy=None) as websocket:
        for lane in range(3):
            websocket.send(json.dumps(body | {"stream_id": f"lane {lane}"}))
        device.wait(lambda: device.num_inside == 3)
    device.wait(lambda: device.num_aborted == num_before + 3)
    device.gate.let(2)
    device.wait_idle()


def test_leaving_while_prompts_are_still_admitted_leaves_none_behind(device: Device) -> None:
    num_prompts = 600
    for _ in range(3):
        body = LONG | {"prompt": ["the fox"] * num_prompts}
        client = device.client("sse", TEXT, body)
        device.wait(lambda: 0 < device.num_inside)
        client.leave()
        device.gate.let(10_000)
        device.wait_idle()


def test_leaving_after_the_end_changes_nothing(device: Device) -> None:
    device.gate.let(1000)
    num_before = device.num_aborted
    client = device.client("sse", TEXT, {"prompt": [5, 6, 7], "max_tokens": 3})
    received = b""
    while b"data: [DONE]" not in received:
        received += client.socket.recv(1 << 16)
    client.leave()
    device.wait_idle()
    assert device.num_aborted == num_before


def test_an_answer_that_is_to_go_on_does_so_and_says_what_came_of_it(device: Device) -> None:
    asked = Asked(device, "chats", "json", "midway", on_disconnect="continue", request_id="go-on")
    asked.client.leave()
    with device.server.client() as client:
        assert client.get("/v1/requests/go-on").json()["status"] == "running"
        device.gate.let(10_000)
        device.wait_idle()
        result = client.get("/v1/requests/chatcmpl-go-on").json()
    assert result["status"] == "finished"
    assert [one["finish_reason"] for one in result["choices"]] == ["length"] * 3
    assert result["usage"]["completion_tokens"] == 900
    assert device.num_aborted == asked.num_aborted_before


# --- cancelling ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "way", "stage"), cases())
def test_delete_aborts_within_two_steps_and_gives_what_there_is(
    device: Device, name: str, way: str, stage: str
) -> None:
    asked = Asked(device, name, way, stage, request_id="wanted")
    num_tokens = device.stats.generation_tokens_total
    with device.server.client() as client:
        answer = client.delete("/v1/requests/wanted")
        again = client.delete("/v1/requests/wanted")
    assert answer.status_code == 200, answer.text
    result = answer.json()
    assert (result["object"], result["status"]) == ("request", "cancelled")
    assert result["id"].endswith("wanted")
    assert [one["index"] for one in result["choices"]] == list(range(asked.num))
    assert {one["finish_reason"] for one in result["choices"]} == {"abort"}
    usage = result["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] <= num_tokens
    if stage == "midway":
        assert usage["completion_tokens"] >= 2 * asked.num
        assert any(one["text"] for one in result["choices"])
    else:
        assert usage["completion_tokens"] == 0
    assert again.json() == result, "it is idempotent"
    if way == "json":
        device.wait(lambda: device.num_aborted == asked.num_aborted_before + asked.num)
        head = asked.client.socket.recv(1 << 16)
        assert head.startswith(b"HTTP/1.1 200 OK")
    asked.check_abort()


def test_delete_gives_the_text_that_was_streamed(device: Device) -> None:
    asked = Asked(device, "completion", "sse", "midway", request_id="text", return_token_ids=True)
    with device.server.client() as client:
        result = client.delete("/v1/requests/cmpl-text").json()
    received = b""
    while b"data: [DONE]" not in received:
        received += asked.client.socket.recv(1 << 16)
    text, token_ids = "", []
    for line in received.decode().splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            text += choice["text"]
            token_ids += choice["token_ids"]
    asked.check_abort()
    assert result["choices"] == [{"index": 0, "text": text, "finish_reason": "abort"}]
    prompt = ASKS["completion"][1]["prompt"]
    assert token_ids == expected_tokens(prompt, len(token_ids), VOCAB_SIZE)
    assert text == device.server.text(token_ids)
    assert result["usage"]["completion_tokens"] == len(token_ids)


def test_delete_of_what_has_ended_gives_its_result_and_of_what_never_was_a_404(
    device: Device,
) -> None:
    device.gate.let(1000)
    body = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "request_id": "done"}
    with device.server.client() as client:
        text = client.post(TEXT, json=body).json()["choices"][0]["text"]
        result = client.delete("/v1/requests/done").json()
        missing = client.delete("/v1/requests/never")
    device.wait_idle()
    assert result["status"] == "finished"
    assert result["choices"] == [{"index": 0, "text": text, "finish_reason": "length"}]
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


TOOL = {"type": "function", "function": {"name": "go", "parameters": {"properties": {}}}}


class Held:
    """A request whose `num`-th call of an engine's method is held up until `release`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, server: Server, owner: type, name: str, num: int
    ) -> None:
        self._server, self._left = server, num
        self._is_held, self._gate = False, asyncio.Event()
        call = getattr(owner, name)

        async def held(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._is_held = True
                await self._gate.wait()
            return await call(*args, **kwargs)

        monkeypatch.setattr(owner, name, held)

    def wait(self) -> Generation:
        """Until it is held up."""
        self._server.wait_until(lambda: self._is_held)
        [generation] = self._server.serving.app.state.answers._running.values()
        return cast("Generation", generation)

    def release(self) -> None:
        self._server.engine_call(self._gate.set)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "more", "held"),
    [
        (TEXT, {"prompt": ["a", "b", "the"]}, (Reception, "admit", 3)),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [TOOL],
                "tool_choice": "required",
            },
            (GrammarCompilations, "open", 1),
        ),
    ],
    ids=["prompts", "grammar"],
)
def test_a_cancelled_request_that_is_still_admitted_has_the_counts_of_its_answer(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    more: dict[str, Any],
    held: tuple[type, str, int],
    stream: bool,
) -> None:
    gate = threading.Semaphore(0)
    with (
        serve(fake_runner(gate=gate, masks=FakeMaskBoard(VOCAB_SIZE))) as server,
        server.client() as client,
        ThreadPoolExecutor() as threads,
    ):
        held_up = Held(monkeypatch, server, *held)
        body = more | {"request_id": "it", "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = threads.submit(client.post, path, json=body)
        generation = held_up.wait()
        results = [threads.submit(client.delete, "/v1/requests/it")]
        server.wait_until(lambda: generation.is_cancelled)
        results.append(threads.submit(client.get, "/v1/requests/it"))
        held_up.release()
        text = answer.result(DEADLINE_S).text
        told = [result.result(DEADLINE_S).json() for result in results]
        told.append(client.get("/v1/requests/it").json())
        gate.release(1000)
    usage = (read_events(text)[-2] if stream else json.loads(text))["usage"]
    assert usage["prompt_tokens"] > 2 and usage["completion_tokens"] == 0
    for result in told:
        assert result["status"] == "cancelled"
        assert {one["finish_reason"] for one in result["choices"]} == {"abort"}
        assert result["usage"].items() <= usage.items()


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_that_is_not_admitted_has_failed_with_nothing(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serve() as server, server.client() as client, ThreadPoolExecutor() as threads:
        held_up = Held(monkeypatch, server, Reception, "admit", 2)
        body = {"prompt": [[5], [VOCAB_SIZE]], "request_id": "it", "stream": stream}
        answer = threads.submit(client.post, TEXT, json=body)
        generation = held_up.wait()
        deleting = threads.submit(client.delete, "/v1/requests/it")
        server.wait_until(lambda: generation.is_cancelled)
        held_up.release()
        assert answer.result(DEADLINE_S).status_code == 400
        result = deleting.result(DEADLINE_S).json()
        server.wait_idle()
    assert (result["status"], result["choices"]) == ("failed", [])
    assert result["usage"]["total_tokens"] == 0


# --- slow readers ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["sse", "websocket"])
def test_a_reader_that_does_not_read_costs_little_and_delays_nobody(way: str) -> None:
    with serve(engine={"max_num_seqs": 64}) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        path, name, more = TEXT, "max_tokens", {"prompt": [5, 6, 7], "n": 16, "logprobs": 5}
        if way == "websocket":
            path, name, more = RESPONSES, "max_output_tokens", {"input": "fox", "top_logprobs": 5}
            more["include"] = ["message.output_text.logprobs"]
        body = more | {name: 400, "ignore_eos": True, "temperature": 0, "request_id": "slow"}
        slow = Client(server, way, path, body, receive_buffer=4096)
        server.wait_until(lambda: server.engine.stats().num_requests_running > 0)
        with server.client() as client:
            fast = client.post(TEXT, json=LONG | {"prompt": [9, 9, 9], "max_tokens": 200})
            assert fast.status_code == 200
            server.wait_until(lambda: server.engine.stats().num_requests_running == 0)
            [waiting] = [
                connection.transport.get_write_buffer_size()
                for connection in server.serving.server_state.connections
                if connection.transport.get_write_buffer_size()
            ]
            assert waiting < 1 << 20, "the rest is merged, and waits as tokens"
            assert client.get("/v1/requests/slow").json()["status"] == "running"
            received = b""
            while not any(end in received for end in (b"data: [DONE]", b"response.incomplete")):
                received += slow.socket.recv(1 << 16)
            slow.leave()
        if way == "sse":
            lines = received.decode().split("\ndata: {")[1:]
            assert len(lines) < 400 * 16 // 4, "deltas were merged"
            server.wait_idle()


def test_one_paused_connection_does_not_stop_the_others_lanes() -> None:
    with serve(engine={"max_num_seqs": 64}) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"input": "fox", "max_output_tokens": 400, "ignore_eos": True, "temperature": 0}
        slow = Client(server, "websocket", RESPONSES, body, receive_buffer=4096)
        with connect(f"ws://{server.host}{RESPONSES}", proxy=None) as websocket:
            for lane in range(3):
                create = body | {"type": "response.create", "stream_id": f"lane {lane}"}
                websocket.send(json.dumps(create))
            ended: set[str] = set()
            while len(ended) < 3:
                event = json.loads(websocket.recv(DEADLINE_S))
                if event["type"] == "response.incomplete":
                    ended.add(event["stream_id"])
        slow.leave()
        server.wait_idle()
