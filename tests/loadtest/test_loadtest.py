"""`python -m loadtest` against real servers: what it counts is what the server counted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server.harness import VOCAB_SIZE, Server, serve
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websocket

from loadtest.__main__ import build_parser
from loadtest.loops import closed_loop, open_loop
from loadtest.stream import RequestFailed, Stream, percentile, summarize
from loadtest.workload import Workload
from loadtest.ws_client import ResponsesSocket

ROOT = Path(__file__).parents[2]
SMALL = ["--input-len", "40", "--output-len", "6", "--rounds", "2", "--requests", "5"]


def run_loadtest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest", "--vocab-size", str(VOCAB_SIZE), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def document(*arguments: str) -> dict[str, Any]:
    done = run_loadtest(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("api", ["completions", "chat", "responses-ws"])
def test_a_closed_loop_asks_for_as_many_tokens_as_the_server_counts(api):
    with serve() as server:
        url = server.url
        got = document("--url", url, "--api", api, *SMALL, "--concurrency", "1", "4")
        stats = server.engine.stats()
        # 2 rounds of 5 requests for each of two loads, and one to warm up
        assert stats.generation_tokens_total == 6 * (2 * 2 * 5 + 1)
        assert stats.request_success_total["length"] == 2 * 2 * 5 + 1
    assert set(got["medians"]) == {"1 stream", "4 streams"}
    for by in got["rounds"].values():
        for one in by[url]:
            assert one["tokens_per_s"] == pytest.approx(6 * one["requests_per_s"], rel=1e-4)
            assert 0 < one["ttft_p50_ms"] <= one["ttft_p99_ms"]
            if api == "completions":
                assert one["prompt_tokens"] == 40


def test_an_open_loop_sends_at_the_rate_that_was_asked_for():
    with serve() as server:
        got = document("--url", server.url, *SMALL, "--rate", "200")
        assert server.engine.stats().request_success_total["length"] == 2 * 5 + 1
    assert set(got["medians"]) == {"200 requests/s"}


@pytest.mark.parametrize("api", ["completions", "responses-ws"])
def test_a_shared_prefix_is_found_in_the_cache_of_the_server(api):
    options = ["--shared-len", "32", "--concurrency", "1", "--connections", "1"]
    with serve() as server:
        got = document("--url", server.url, "--api", api, *SMALL, *options)
    assert got["medians"]["1 stream"][server.url]["cached_tokens"] >= 32


def test_two_servers_are_loaded_with_the_same_prompts_in_turns():
    with serve() as first, serve() as second:
        got = document("--url", first.url, "--compare", second.url, *SMALL, "--concurrency", "2")
        for stats in (first.engine.stats(), second.engine.stats()):
            assert stats.request_success_total["length"] == 2 * 5 + 1
    medians = got["medians"]["2 streams"]
    assert set(medians) == {first.url, second.url}
    ratio = medians[first.url]["tokens_per_s"] / medians[second.url]["tokens_per_s"]
    assert got["ratios"]["2 streams"]["tokens_per_s"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize("api", ["completions", "responses-ws"])
def test_a_request_that_fails_ends_the_run_with_its_reason(api):
    with serve() as server:
        done = run_loadtest("--url", server.url, "--api", api, "--input-len", "9000")
    assert done.returncode == 1
    assert done.stderr.startswith("loadtest: ") and "context" in done.stderr


def test_a_server_that_is_not_there_is_one_line():
    done = run_loadtest("--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("loadtest: http://127.0.0.1:9: can't connect") and "start a" in line


def test_of_two_servers_the_one_that_fails_is_named(server: Server):
    done = run_loadtest("--url", server.url, "--compare", "http://127.0.0.1:9", *SMALL)
    assert done.returncode == 1 and done.stderr.startswith("loadtest: http://127.0.0.1:9: ")


@pytest.mark.parametrize("api", ["completions", "responses-ws"])
@pytest.mark.parametrize(("answer", "reason"), [(b"", "ended early"), (b"SSH-2.0\r\n\r\n", "")])
def test_what_is_no_server_of_ours_is_one_line(api, answer, reason):
    async def main() -> str:
        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(reply, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            done = await asyncio.to_thread(run_loadtest, "--url", url, "--api", api, *SMALL)
            assert done.returncode == 1 and url in done.stderr
            return done.stderr

    (line,) = asyncio.run(main()).strip().splitlines()
    assert reason in line


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--concurrency", "0", "expected a whole number >= 1, got '0'"),
        ("--rounds", "0", "expected a whole number >= 1, got '0'"),
        ("--requests", "-1", "expected a whole number >= 1, got '-1'"),
        ("--input-len", "0", "expected a whole number >= 1, got '0'"),
        ("--output-len", "x", "expected a whole number >= 1, got 'x'"),
        ("--warmup", "-1", "expected a whole number >= 0, got '-1'"),
        ("--rate", "0", "expected a number > 0, got '0'"),
        ("--rate", "-1", "expected a number > 0, got '-1'"),
        ("--rate", "inf", "expected a number > 0, got 'inf'"),
        ("--transformers", "/nope", "folder not found: /nope"),
        ("--url", "foo", "not a URL of a server: 'foo'"),
        ("--compare", "http://a:99999", "not a URL of a server: 'http://a:99999'"),
        ("--url", "https://a", "not a URL of a server: 'https://a'"),
        ("--url", "http://a/v1", "not a URL of a server: 'http://a/v1'"),
    ],
)
def test_wrong_options_say_what_was_expected(option, value, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([option, value])
    assert ended.value.code == 2
    assert f"argument {option}: {expected}" in capsys.readouterr().err.splitlines()[-1]


def test_the_document_says_what_was_asked_for_with_its_types(server: Server):
    got = document("--url", server.url, *SMALL, "--concurrency", "1", "2")["config"]
    assert got["concurrency"] == [1, 2] and got["input_len"] == 40 and got["rounds"] == 2
    assert got["rate"] is None and got["seed"] == "" and "api_key" not in got


def test_one_socket_carries_many_responses_at_once(server: Server):
    async def main() -> list[Stream]:
        async with ResponsesSocket(server.url, "none") as socket:
            body = {"max_output_tokens": 5, "temperature": 0, "ignore_eos": True}
            asked = [socket.respond({**body, "input": "dog " * n}, 0.0) for n in (1, 30, 90)]
            return await asyncio.gather(*asked)

    streams = asyncio.run(main())
    assert [stream.completion_tokens for stream in streams] == [5, 5, 5]
    counts = [stream.prompt_tokens for stream in streams]
    assert counts == [len(server.chat_prompt({"role": "user", "content": "dog " * n}))
                      for n in (1, 30, 90)]  # fmt: skip


@pytest.mark.parametrize("size", [0, 100, 126, 70_000])
def test_messages_of_any_size_arrive_and_fragments_and_pings_are_understood(size):
    """The `websockets` package is the oracle: it checks masks, lengths and answers to pings."""
    received: list[dict[str, Any]] = []

    async def answer(connection: ServerConnection) -> None:
        event = json.loads(await connection.recv())
        received.append(event)
        await (await connection.ping())
        usage = {
            "input_tokens": len(event["input"]),
            "output_tokens": 1,
            "input_tokens_details": {"cached_tokens": 0},
        }
        ended = {"type": "response.completed", "stream_id": event["stream_id"]}
        text = json.dumps({**ended, "response": {"usage": usage, "echo": event["input"]}})
        third = len(text) // 3 + 1
        await connection.send([text[i : i + third] for i in range(0, len(text), third)])
        await connection.wait_closed()

    async def main() -> Stream:
        async with serve_websocket(answer, "127.0.0.1", 0, max_size=None) as listening:
            port = listening.sockets[0].getsockname()[1]
            async with ResponsesSocket(f"http://127.0.0.1:{port}", "none") as socket:
                return await socket.respond({"input": "x" * size}, 0.0)

    assert asyncio.run(main()).prompt_tokens == size
    assert received[0]["input"] == "x" * size


def test_a_connection_that_ends_fails_the_responses_that_wait():
    async def close(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.close(1012, "going away")

    async def main() -> None:
        async with serve_websocket(close, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            async with ResponsesSocket(f"http://127.0.0.1:{port}", "none") as socket:
                with pytest.raises(RequestFailed, match="going away"):
                    await asyncio.wait_for(socket.respond({"input": "x"}, 0.0), 10)

    asyncio.run(main())


def test_a_closed_loop_keeps_so_many_requests_running_and_no_more():
    running = most = 0

    async def send(prompt: int, due_s: float) -> Stream:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(prompt % 3 + 1):
            await asyncio.sleep(0)
        running -= 1
        return Stream(due_s, event_s=[due_s], end_s=due_s, completion_tokens=1)

    figures = asyncio.run(closed_loop(send, range(20), 4))
    assert most == 4 and figures["tokens_per_s"] == figures["requests_per_s"] > 0


def test_an_open_loop_does_not_wait_for_answers():
    async def main() -> int:
        release, started = asyncio.Event(), 0

        async def send(prompt: int, due_s: float) -> Stream:
            nonlocal started
            started += 1
            if started == 10:
                release.set()
            await release.wait()  # nobody is answered before all have asked
            return Stream(due_s, event_s=[due_s + 1], end_s=due_s + 1, completion_tokens=1)

        async with asyncio.timeout(20):
            figures = await open_loop(send, range(10), rate=1e4, seed="x")
        assert figures["ttft_p50_ms"] == pytest.approx(1000)
        return started

    assert asyncio.run(main()) == 10


def test_summaries_count_from_when_a_request_was_due():
    streams = [
        Stream(due_s=1.0, event_s=[1.5, 1.6, 1.9], end_s=2.0, completion_tokens=3),
        Stream(due_s=1.0, event_s=[2.0], end_s=2.0, completion_tokens=1),
    ]
    figures = summarize(streams, elapsed_s=2.0)
    assert figures["tokens_per_s"] == 2.0
    assert figures["ttft_p50_ms"] == pytest.approx(1000)
    assert figures["itl_p50_ms"] == pytest.approx(300)
    assert percentile([], 0.5) == 0.0 and percentile([3, 1, 2], 0.5) == 2


def test_prompts_share_their_beginning_and_nothing_else():
    workload = Workload(input_len=50, output_len=1, shared_len=20)
    prompts = workload.token_prompts(8, "a", 1000)
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({prompt[20] for prompt in prompts}) > 1
    assert prompts == workload.token_prompts(8, "a", 1000) != workload.token_prompts(8, "b", 1000)
    assert all(50 <= token < 1000 for prompt in prompts for token in prompt)
    texts = workload.text_prompts(3, "a")
    assert {len(text.split()) for text in texts} == {50}
    assert len({tuple(text.split()[:20]) for text in texts}) == 1 < len(set(texts))
