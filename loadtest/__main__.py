"""Load one server, or two in turns, and say how fast they stream.

    python -m loadtest                                        closed loop, 1, 8 and 32 streams
    python -m loadtest --rate 2 4 --requests 60               open loop, requests a second
    python -m loadtest --api responses-ws --concurrency 16    over WebSockets
    python -m loadtest --workload shared                      one system prompt for all
    python -m loadtest --compare http://127.0.0.1:9000        two servers, in turns
    python -m loadtest --transformers FOLDER                  beside transformers.generate

Greedy, with `ignore_eos`, so that servers do equal work. Rounds alternate between all that is
compared; medians over rounds are printed for people, and one JSON document is the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from .arguments import (
    COUNTED,
    add_model,
    add_rounds,
    add_server,
    at_least,
    folder,
    new_parser,
    positive,
    server_url,
)
from .failures import named
from .loops import Send, closed_loop, open_loop
from .sse_client import stream_sse
from .stream import RequestFailed, Stream, rounded
from .transformers_baseline import SequentialTransformers
from .workload import Workload
from .ws_client import ResponsesSocket

WORKLOADS = {
    "stream": Workload(input_len=128, output_len=128),
    "shared": Workload(input_len=544, output_len=64, shared_len=512),
    "long": Workload(input_len=1800, output_len=32),
}
SHOWN = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


class Load(NamedTuple):
    """How hard: so many streams at once, or so many requests a second."""

    concurrency: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        if self.rate:
            return f"{self.rate:g} request{'' if self.rate == 1 else 's'}/s"
        return f"{self.concurrency} stream{'' if self.concurrency == 1 else 's'}"

    def num_requests(self, options: argparse.Namespace) -> int:
        if options.requests:
            return max(options.requests, self.concurrency)
        return max(2 * self.concurrency, 4) if self.concurrency else 32


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("loadtest", __doc__)
    add = parser.add_argument
    add_server(parser)
    add(
        "--compare",
        type=server_url,
        metavar="URL",
        help="a second server, loaded in turns with the first",
    )
    add("--api", choices=("completions", "chat", "responses-ws"), default="completions")
    add_model(parser)
    add("--workload", choices=tuple(WORKLOADS), default="stream")
    add("--input-len", **COUNTED, help="tokens (completions) or words (others) in a prompt")
    add("--output-len", **COUNTED, help="tokens generated for each request")
    add(
        "--shared-len",
        type=at_least(0),
        metavar="N",
        help="of the input: the same in all prompts of a round",
    )
    add("--vocab-size", **COUNTED, default=20000, help="prompts of tokens have ids below it")
    add("--concurrency", **COUNTED, nargs="+", default=[1, 8, 32], help="closed loop: streams")
    add(
        "--rate", type=positive, metavar="X", nargs="+", help="open loop instead: requests a second"
    )
    add("--requests", **COUNTED, help="a round (default: two a stream, or 32)")
    add("--connections", **COUNTED, help="WebSockets (default: one a stream)")
    add_rounds(parser)
    add(
        "--warmup",
        type=at_least(0),
        metavar="N",
        default=1,
        help="requests to each server before the first round",
    )
    add("--seed", default="", help="of the prompts (default: new in each run)")
    add("--transformers", type=folder, metavar="FOLDER", help="the model in Hugging Face format")
    add("--transformers-requests", **COUNTED, default=2, help="a round")
    return parser


def workload_of(options: argparse.Namespace) -> Workload:
    """ValueError for a shared part that leaves nothing of a prompt."""
    base = WORKLOADS[options.workload]
    given = (options.input_len, options.output_len, options.shared_len)
    values = (base.input_len, base.output_len, base.shared_len)
    workload = Workload(*(b if g is None else g for g, b in zip(given, values, strict=True)))
    if workload.shared_len >= workload.input_len:
        raise ValueError(
            f"--shared-len: expected less than the input, {workload.input_len}, "
            f"got {workload.shared_len}"
        )
    return workload


@asynccontextmanager
async def sender(
    url: str, options: argparse.Namespace, workload: Workload, num_sockets: int
) -> AsyncIterator[Send[Any]]:
    """How to send a prompt to a server, in the API that was asked for."""
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    if options.model:
        body["model"] = options.model
    async with AsyncExitStack() as stack:
        if options.api == "responses-ws":
            sockets = [
                await stack.enter_async_context(ResponsesSocket(url, options.api_key))
                for _ in range(options.connections or num_sockets)
            ]
            body["max_output_tokens"] = workload.output_len

            async def send(prompt: Any, due_s: float) -> Stream:
                sockets.append(sockets.pop(0))  # in turns
                return await sockets[-1].respond({**body, "input": prompt}, due_s)
        else:
            body["max_tokens"] = workload.output_len
            path = "/v1/completions" if options.api == "completions" else "/v1/chat/completions"

            async def send(prompt: Any, due_s: float) -> Stream:
                messages = [{"role": "user", "content": prompt}]
                ask = {"prompt": prompt} if path == "/v1/completions" else {"messages": messages}
                return await stream_sse(url, path, {**body, **ask}, options.api_key, due_s)

        async def checked(prompt: Any, due_s: float) -> Stream:
            stream = await send(prompt, due_s)
            if stream.completion_tokens != workload.output_len or not stream.event_s:
                raise RequestFailed(
                    f"expected {workload.output_len} tokens, got {stream.completion_tokens}: "
                    "does the server honour ignore_eos?"
                )
            return stream

        yield checked


async def run_round(
    url: str, load: Load, options: argparse.Namespace, workload: Workload, seed: str
) -> dict[str, float]:
    count = load.num_requests(options)
    prompts: Sequence[Any]
    if options.api == "completions":
        prompts = workload.token_prompts(count, seed, options.vocab_size)
    else:
        prompts = workload.text_prompts(count, seed)
    async with sender(url, options, workload, load.concurrency or 16) as send:
        if load.rate:
            return await open_loop(send, prompts, load.rate, seed)
        return await closed_loop(send, prompts, load.concurrency)


def measure(options: argparse.Namespace, workload: Workload) -> dict[str, dict[str, list[dict]]]:
    """Load → who → the figures of each round."""
    urls = [options.url, *([options.compare] if options.compare else [])]
    loads = [Load(rate=rate) for rate in options.rate or ()]
    loads = loads or [Load(concurrency=concurrency) for concurrency in options.concurrency]
    beside = SequentialTransformers(options.transformers) if options.transformers else None
    seed = options.seed or str(random.SystemRandom().getrandbits(48))
    for url in urls:
        warm = argparse.Namespace(**{**vars(options), "requests": options.warmup})
        if options.warmup:
            with named(url):
                asyncio.run(run_round(url, Load(concurrency=1), warm, workload, f"{seed} warm-up"))
    rounds: dict[str, dict[str, list[dict]]] = {}
    for number in range(options.rounds):
        for load in loads:
            for url in urls if number % 2 == 0 else urls[::-1]:
                key = f"{seed} {number} {load.name}"
                with named(url):
                    figures = asyncio.run(run_round(url, load, options, workload, key))
                rounds.setdefault(load.name, {}).setdefault(url, []).append(figures)
        if beside:
            figures = beside.run(
                workload, options.transformers_requests, f"{seed} {number}", options.vocab_size
            )
            rounds.setdefault("one at a time", {}).setdefault("transformers", []).append(figures)
    return rounds


def medians_of(rounds: dict[str, dict[str, list[dict]]]) -> dict[str, dict[str, dict]]:
    return {
        load: {
            who: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            for who, runs in by.items()
        }
        for load, by in rounds.items()
    }


def ratios_of(medians: dict[str, dict[str, dict]], first: str, second: str) -> dict[str, dict]:
    """The first server's figures divided by the second's."""
    return {
        load: {key: by[first][key] / value for key, value in by[second].items() if value}
        for load, by in medians.items()
        if first in by and second in by
    }


def main() -> None:
    parser = build_parser()
    options = parser.parse_args()
    try:
        workload = workload_of(options)
    except ValueError as error:
        parser.error(str(error))
    started_s = time.time()
    try:
        rounds = measure(options, workload)
    except RequestFailed as error:
        sys.exit(f"loadtest: {error}")
    medians = medians_of(rounds)
    ratios = ratios_of(medians, options.url, options.compare) if options.compare else {}
    for load, by in medians.items():
        for who, figures in by.items():
            shown = "  ".join(f"{key} {figures[key]:9.1f}" for key in SHOWN if key in figures)
            print(f"{load:16} {who:28} {shown}")
        if load in ratios:
            shown = "  ".join(f"{key} {ratios[load].get(key, 0):9.3f}" for key in SHOWN)
            print(f"{load:16} {'first / second':28} {shown}")
    config = {key: value for key, value in vars(options).items() if key != "api_key"}
    document = {
        "config": config,
        "workload": vars(workload),
        "started_s": started_s,
        "medians": rounded(medians),
        "ratios": rounded(ratios),
        "rounds": rounded(rounds),
    }
    print(json.dumps(document, default=str))  # paths


if __name__ == "__main__":
    main()
