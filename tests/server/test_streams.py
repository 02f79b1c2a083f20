"""Streams under load: many at once, readers that leave, errors midway, characters in pieces."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import httpx
import pytest
from fakes import FakeRunner
from server.harness import DEADLINE_S, ScriptedRunner, Server, fake_runner, serve
from tiny import tiny_tokenizer

import streamkv.server.sse as sse

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def read_events(response: httpx.Response) -> list[Any]:
    """The events' data, comments left out; [DONE] as a string."""
    events = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def test_64_streams_at_once_are_each_complete_and_in_order(server: Server) -> None:
    async def ask(client: httpx.AsyncClient, i: int) -> None:
        prompt, num = [3 + i, 40, 41, 42], 1 + 3 * i
        body = {
            "prompt": prompt,
            "max_tokens": num,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", TEXT, json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            *chunks, done = await read_events(response)
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        expected = server.answer(prompt, num)
        assert sum((choice["token_ids"] for choice in choices), []) == expected
        assert "".join(choice["text"] for choice in choices) == server.text(expected)
        finished = [choice["finish_reason"] for choice in choices]
        assert finished[:-1] == [None] * (len(choices) - 1)
        assert finished[-1] in ("stop", "length")

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(ask(client, i) for i in range(64)))

    asyncio.run(main())
    server.wait_idle()


def test_readers_that_leave_at_any_moment_leave_no_block_behind() -> None:
    rng = random.Random(5)

    async def ask(client: httpx.AsyncClient, i: int, leave_after: int | None) -> int:
        body = {
            "prompt": [[7 + i, 8, 9], [9, 8, 7 + i]] if i % 4 == 0 else [7 + i, 8, 9],
            "max_tokens": 60,
            "ignore_eos": True,
            "n": 2,
            "stream": True,
        }
        num_lines = 0
        async with client.stream("POST", TEXT, json=body) as response:
            if leave_after == 0:
                return 0
            async for line in response.aiter_lines():
                num_lines += line.startswith("data:")
                if num_lines == leave_after:
                    return num_lines
                if line == "data: [DONE]":
                    return -1
        return num_lines

    async def main() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=running.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(
                *(ask(client, i, rng.randrange(25) if i % 5 == 0 else None) for i in range(60))
            )

    with serve(engine={"max_num_seqs": 32}) as running:
        outcomes = asyncio.run(main())
        assert sum(outcome == -1 for outcome in outcomes) == 48
        running.wait_idle()
        stats = running.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.request_success_total["abort"] > 0
        assert running.runner.violations == []


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_nothing_has_come_aborts_at_once(stream: bool) -> None:
    gate = threading.Semaphore(3)
    with serve(fake_runner(gate=gate)) as running:

        async def main() -> None:
            async with httpx.AsyncClient(base_url=running.url, timeout=DEADLINE_S) as client:
                body = {"prompt": [[5, 6], [7, 8]], "max_tokens": 100, "stream": stream}
                asking = asyncio.create_task(client.post(TEXT, json=body))
                begun = asyncio.to_thread(
                    running.wait_until, lambda: running.engine.stats().num_requests_running == 2
                )
                await begun
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

        asyncio.run(main())
        running.wait_until(
            lambda: running.engine.stats().request_success_total.get("abort", 0) == 2
        )
        gate.release(100)
        running.wait_idle()
        assert running.engine.stats().generation_tokens_total < 20


def test_an_error_before_the_first_byte_is_a_status_afterwards_an_event() -> None:
    runner = fake_runner()
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serve(runner) as running, running.client() as client:
        runner.fail_next = "the device caught a cold"
        answer = client.post(TEXT, json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "generation_failed"
        answer = client.post(TEXT, json=body | {"prompt": [5, 6, 8], "max_tokens": 2})
        assert answer.text.endswith("data: [DONE]\n\n"), "others go on"

        runner.gate = threading.Semaphore(4)
        with client.stream("POST", TEXT, json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            runner.fail_next = "again"
            runner.gate.release(500)
            events = [line for line in lines if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "server_error"
        assert "data: [DONE]" not in events
        running.wait_idle()


def test_a_waiting_stream_is_kept_alive_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    gate = threading.Event()
    with serve(fake_runner(gate=gate)) as running, running.client() as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "stream": True}
        with client.stream("POST", TEXT, json=body) as response:
            lines = response.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            gate.set()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == running.text(running.answer([5, 6, 7], 3))


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens_arrive_whole(stream: bool) -> None:
    said = 'naïve 🙂👩‍👩‍👧‍👦 日本語の文字 "quoted"\n\u2028 end'
    script = tiny_tokenizer().encode(said)
    assert len(script) > len(said), "characters are made of several tokens"
    with serve(ScriptedRunner([*script, 2])) as running:
        create = running.openai().chat.completions.create
        answer = create(
            model="org/tiny", messages=[{"role": "user", "content": "hi"}], stream=stream
        )
        if stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in answer]
            assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
            assert "".join(pieces) == said
        else:
            assert answer.choices[0].message.content == said
            assert answer.choices[0].finish_reason == "stop"


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    gate = threading.Event()
    runner: FakeRunner = fake_runner(gate=gate)
    with serve(runner, engine={"max_num_seqs": 1, "max_num_queued_reqs": 1}) as running:
        answers: list[httpx.Response] = []

        def ask() -> None:
            with running.client() as client:
                answers.append(client.post(TEXT, json={"prompt": [5, 6], "max_tokens": 2}))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        try:
            for i, thread in enumerate(threads):
                thread.start()
                running.wait_until(lambda i=i: sum(_load(running)) == i + 1)
            with running.client() as client:
                body = {"prompt": [9, 9], "max_tokens": 2, "stream": True}
                refused = client.post(TEXT, json=body)
        finally:
            gate.set()
            for thread in threads:
                thread.join()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert [answer.status_code for answer in answers] == [200, 200]


def _load(running: Server) -> tuple[int, int]:
    stats = running.engine.stats()
    return stats.num_requests_running, stats.num_requests_waiting


def test_shutdown_ends_streams_and_the_thread() -> None:
    gate = threading.Semaphore(5)
    with serve(fake_runner(gate=gate)) as running, running.client() as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", TEXT, json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            running.call(_close_engine(running, gate))
            rest = [line for line in lines if line]
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "abort"
        assert rest[-1] == "data: [DONE]"
        answer = client.post(TEXT, json={"prompt": [5]})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"


async def _close_engine(running: Server, gate: threading.Semaphore) -> None:
    gate.release(1000)
    await running.engine.close()
