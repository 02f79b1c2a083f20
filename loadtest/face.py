"""What a server's face costs: CPU of its process for each token that it streams.

    python -m loadtest.face --url http://127.0.0.1:8000 --pid 4711
    python -m loadtest.face --url ... --pid 4711 --api chat --api responses-ws --streams 64

Many streams at once, each on a connection of its own (`--connections`: fewer, for WebSockets), all
as long. CPU of the process, all its threads, is read from /proc when every stream has got its first
event and again before the first one ends: `us_per_token` is what came between. `us_per_token_all`
counts everything, from connecting to the last byte. Tokens are those that the server's usage
counts; a server that merges tokens has fewer events than tokens. The client only counts what it
reads, so that it keeps up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

from .arguments import COUNTED, add_model, add_rounds, add_server, new_parser
from .face_client import APIS, Counter, run_streams
from .failures import named
from .stream import RequestFailed, rounded

SHOWN = ("us_per_token", "us_per_token_all", "us_per_event", "tokens_per_s", "cpu_share")


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("loadtest.face", __doc__)
    add = parser.add_argument
    add_server(parser)
    add("--pid", **COUNTED, action="append", help="its process; repeat for several", required=True)
    add("--api", choices=tuple(APIS), action="append", help="repeat for several (default: all)")
    add_model(parser)
    add("--streams", **COUNTED, default=256, help="at once")
    add("--connections", **COUNTED, help="WebSockets (default: one a stream)")
    add("--output-len", **COUNTED, default=512, help="tokens of each stream")
    add_rounds(parser)
    return parser


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where there is one: the client shares the machine with the server."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def cpu_s(pids: list[int]) -> float:
    """CPU time of all threads of these processes. RequestFailed if one has ended."""
    total_ns = 0
    try:
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                total_ns += int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError) as error:
        raise RequestFailed(f"can't read the CPU time of process {pids}: {error}") from None
    return total_ns / 1e9


def run_round(options: argparse.Namespace, api: str) -> dict[str, float]:
    """One round. RequestFailed."""
    marks: list[tuple[float, float, int]] = []  # time, CPU, events so far

    def mark(counter: Counter) -> None:
        marks.append((time.monotonic(), cpu_s(options.pid), counter.num_events))

    async def main() -> Counter:
        return await run_streams(
            APIS[api],
            options.url,
            num_streams=options.streams,
            num_connections=options.connections or options.streams,
            output_len=options.output_len,
            model=options.model,
            api_key=options.api_key,
            mark=mark,
        )

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        counter = runner.run(main())
    begun, steady, ending, ended = marks
    expected = options.streams * options.output_len
    if counter.num_tokens != expected:
        raise RequestFailed(
            f"expected {expected} tokens, got {counter.num_tokens}: does the server honour "
            "ignore_eos?"
        )
    num_events = ending[2] - steady[2]
    tokens_per_event = expected / counter.num_events
    num_tokens = num_events * tokens_per_event
    elapsed_s, used_s = ending[0] - steady[0], ending[1] - steady[1]
    return {
        "us_per_token": 1e6 * used_s / num_tokens,
        "us_per_token_all": 1e6 * (ended[1] - begun[1]) / expected,
        "us_per_event": 1e6 * used_s / num_events,
        "tokens_per_event": tokens_per_event,
        "tokens_per_s": num_tokens / elapsed_s,
        "cpu_share": used_s / elapsed_s,
    }


def main() -> None:
    options = build_parser().parse_args()
    apis = options.api or list(APIS)
    rounds: dict[str, list[dict[str, float]]] = {api: [] for api in apis}
    try:
        for _ in range(options.rounds):
            for api in apis:
                with named(options.url):
                    rounds[api].append(run_round(options, api))
    except RequestFailed as error:
        sys.exit(f"loadtest: {error}")
    medians = {
        api: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        for api, runs in rounds.items()
    }
    for api, figures in medians.items():
        shown = "  ".join(f"{key} {figures[key]:9.2f}" for key in SHOWN)
        print(f"{options.streams} streams  {api:14} {shown}")
    config = {key: value for key, value in vars(options).items() if key != "api_key"}
    print(json.dumps({"config": config, "medians": rounded(medians), "rounds": rounded(rounds)}))


if __name__ == "__main__":
    main()
