"""`python -m loadtest.fuzz`: a sample of it against a real server, and faults it has to find."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_masks import FakeMaskBoard
from server.harness import VOCAB_SIZE, Server, fake_runner, serve
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loadtest.fuzz import conversation
from loadtest.fuzz.__main__ import build_parser, run
from loadtest.fuzz.cases import make_case
from loadtest.fuzz.conversation import Conversation
from loadtest.fuzz.http import Target
from loadtest.fuzz.run import Result, check_rest
from loadtest.stream import RequestFailed
from streamkv.server import serving

ROOT = Path(__file__).parents[2]


def fuzz(server: Server, *arguments: str) -> Result:
    usual = ["--url", server.url, "--seed", "1", "--rest-s", "30"]
    return asyncio.run(run(build_parser().parse_args([*usual, *arguments])))


def test_whatever_comes_is_answered_in_shape_and_nothing_is_held() -> None:
    runner = fake_runner(masks=FakeMaskBoard(VOCAB_SIZE))
    with serve(runner, resume_window=1.0) as server:
        result = fuzz(server, "--cases", "1500", "--faults", "50")
        assert "\n".join(map(str, result.faults)) == ""
        assert result.unrest == ""
        assert server.runner.violations == []
    assert result.num_played == 1500
    assert set(result.kinds) == {
        *("bodies", "grammars", "paths", "lives", "malformed", "leaving"),
        *("talk", "broken", "departure", "lanes", "handshake"),
    }
    seen = {*map(str, (101, 200, 400, 403, 404, 405)), "close 1002", "close 1007", "close 1009"}
    assert seen | {"response.incomplete", "error event 400", "hung up"} <= set(result.outcomes)


def test_a_socket_that_nobody_read_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(url: str) -> tuple[Any, Any, Any]:
        talks = Conversation(Target(url, "none", 10.0), Counter())
        sockets = []
        for limit_s in (10.0, 10.0, 0.0):
            monkeypatch.setattr(conversation, "_MAX_IDLE_S", limit_s)
            await talks.talk(b"")
            sockets.append(talks._socket)
        await talks.drop()
        return tuple(sockets)

    with serve() as server:
        first, second, third = asyncio.run(main(server.url))
        assert first is second is not third


def test_the_same_seed_and_number_make_the_same_case() -> None:
    target = Target("http://127.0.0.1:8000", "none", 1.0)
    for number in range(300):
        assert make_case(3, number, target) == make_case(3, number, target)
    others = sum(make_case(3, n, target) == make_case(4, n, target) for n in range(300))
    assert others < 10  # a few have nothing in them that could differ


# --- planted faults ---------------------------------------------------------------------------

Plant = Callable[[ASGIApp, Scope, Receive, Send], Any]


@contextmanager
def planted(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server around whose application stands `plant`."""
    create_app = serving.create_app

    def create(*args: Any) -> ASGIApp:
        app = create_app(*args)

        async def faulty(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                return await app(scope, receive, send)
            await plant(app, scope, receive, send)

        return faulty

    monkeypatch.setattr(serving, "create_app", create)
    with serve(grace_s=0.1, end_s=0.1, resume_window=1.0) as server:
        yield server


async def fails_on_a_field(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Who sends `min_p` meets a bug."""
    messages: deque[Message] = deque()
    while scope["type"] == "http":
        messages.append(await receive())
        if not messages[-1].get("more_body"):
            break
    if b'"min_p"' in b"".join(message.get("body", b"") for message in messages):
        error = {"message": "a bug", "type": "server_error", "param": None, "code": None}
        return await JSONResponse({"error": error}, 500)(scope, receive, send)

    async def replayed() -> Message:
        return messages.popleft() if messages else await receive()

    await app(scope, replayed, send)


def rewriting(old: bytes, new: bytes) -> Plant:
    """Bytes of answers are replaced by as many others."""
    assert len(old) == len(new)

    async def plant(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        async def rewritten(message: Message) -> None:
            if message.get("body"):
                message["body"] = bytes(message["body"]).replace(old, new)
            if message.get("text"):
                message["text"] = message["text"].replace(old.decode(), new.decode())
            await send(message)

        # Without extensions everything goes through `send`.
        await app({**scope, "extensions": {}}, receive, rewritten)

    return plant


async def dies_of_an_event(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    async def watched() -> Message:
        message = await receive()
        if '"response.steer"' in (message.get("text") or ""):
            await send({"type": "websocket.close", "code": 1011})
            return {"type": "websocket.disconnect", "code": 1011}
        return message

    await app(scope, watched, send)


async def never_answers_deletes(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    if scope.get("method") == "DELETE":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    await app(scope, receive, send)


@pytest.mark.parametrize(
    ("plant", "reason", "sent"),
    [
        (fails_on_a_field, "500: expected no failure", '"min_p"'),
        (rewriting(b'"error":', b'"oops!":'), "expected OpenAI's error object", ""),
        (rewriting(b'"type":"in', b'"type": 11'), "expected strict JSON", ""),
        (rewriting(b'"logprobs":null', b'"logprobs":NaN '), "NaN is no JSON", "/v1/"),
        (rewriting(b"[DONE]", b'"done"'), "expected", '"stream":true'),
        (dies_of_an_event, "expected the connection to stay open", "WebSocket frames"),
        (never_answers_deletes, "no end within 0.5 s", "DELETE"),
    ],
    ids=["500", "shape", "broken JSON", "NaN", "no end", "a dead socket", "no answer"],
)
def test_a_planted_fault_is_found_and_can_be_repeated_alone(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, reason: str, sent: str
) -> None:
    some = ["--deadline-s", "0.5", "--faults", "500"]
    many = ["--cases", "4" if plant is never_answers_deletes else "300"]
    with planted(plant, monkeypatch) as server:
        faults = fuzz(server, *some, *many).faults
        found = [one for one in faults if reason in one.reason and sent in one.shown]
        assert found, faults
        (number,) = found[0].numbers
        alone = fuzz(server, *some, "--only", str(number))
    assert alone.num_played == 1
    assert [fault.shown for fault in alone.faults] == [found[0].shown]


def test_a_request_that_is_still_held_is_told() -> None:
    gate = threading.Semaphore(3)
    with serve(fake_runner(gate=gate)) as server, server.client() as client:
        target = Target(server.url, "none", 5.0)
        body = {"prompt": "hi", "max_tokens": 30, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            said = asyncio.run(check_rest(target, 0.1))
            assert "nothing to run" in said and '"num_requests_running": 1' in said
            assert "kv_cache_blocks_held" in said
            gate.release(100)
        assert asyncio.run(check_rest(target, 20)) == ""


def test_a_case_that_does_lasting_harm_is_found_by_looking_after_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harmed = False

    async def breaks_for_good(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Once somebody sent a DELETE, it isn't healthy any more."""
        nonlocal harmed
        harmed = harmed or scope.get("method") == "DELETE"
        if harmed and scope["path"] == "/health":
            return await JSONResponse({"status": "failed"}, 503)(scope, receive, send)
        await app(scope, receive, send)

    with planted(breaks_for_good, monkeypatch) as server:
        result = fuzz(server, "--cases", "200", "--careful")
        with pytest.raises(RequestFailed, match="before the first case: /health: expected 200"):
            fuzz(server, "--cases", "1")
    (fault,) = result.faults
    assert "DELETE /" in fault.shown and "/health: expected 200, got 503" in fault.reason
    assert result.num_played == fault.numbers[0] + 1


def test_the_command_says_what_it_found_how_to_repeat_it_and_ends_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with planted(fails_on_a_field, monkeypatch) as server:
        command = [sys.executable, "-m", "loadtest.fuzz", "--url", server.url, "--seed", "1"]
        done = subprocess.run(
            [*command, "--cases", "600"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1, done.stderr
        document = json.loads(done.stdout.splitlines()[-1])
        (number,) = document["faults"][0]["numbers"]
        assert f"again: --seed 1 --only {number}" in done.stdout
        again = subprocess.run(
            [*command, "--only", str(number)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert json.loads(again.stdout.splitlines()[-1])["faults"] == document["faults"][:1]


def test_a_server_that_is_not_there_is_one_line() -> None:
    command = [sys.executable, "-m", "loadtest.fuzz", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("loadtest: http://127.0.0.1:9: can't connect")
