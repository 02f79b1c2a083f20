"""Clients that leave, or cancel, at every stage of every endpoint: nothing runs on for nobody.

Raw sockets, so that a client is gone at once. The device takes as many steps as the test says, and
two more after an abort are all that it may take until every block is free.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeRunner, expected_tokens
from server.harness import DEADLINE_S, VOCAB_SIZE, fake_runner, serve
from server.raw_client import CHAT, RESPONSES, TEXT, Client, Device, Gate
from websockets.sync.client import connect

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
