"""Send a server all kinds of input that no client should send, and see that it stands.

    python -m loadtest.fuzz --url http://127.0.0.1:8000
    python -m loadtest.fuzz --cases 1000 --seed 7         the same 1000 cases each time
    python -m loadtest.fuzz --seed 7 --only 4711          one of them, alone
    python -m loadtest.fuzz --seed 7 --careful            find out which one does harm that lasts
    python -m loadtest.fuzz --faults 20                   go on until so many are found

Bodies that are no JSON or have wrong values in any field, bytes that are no HTTP, WebSocket frames
and events of every kind, and clients that leave at any moment. Each answer must have OpenAI's
shape, and none may be a failure of the server. In the end it must be healthy, and nothing may run,
wait or hold memory. The exit code is 1 if something was found; the first fault is told with what
was sent. Meant for a server whose model is small or a fake.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time

from ..arguments import COUNTED, add_server, at_least, new_parser, positive
from ..failures import named
from ..stream import RequestFailed
from .http import Target
from .run import Result, check_rest, run_cases


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("loadtest.fuzz", __doc__)
    add = parser.add_argument
    add_server(parser)
    add("--cases", **COUNTED, default=10_000, help="how many (default: %(default)s)")
    add("--first", type=at_least(0), default=0, metavar="N", help="number of the first case")
    add("--only", type=at_least(0), metavar="N", help="this case alone")
    add("--seed", type=at_least(0), metavar="N", help="of the cases (default: new in each run)")
    add("--careful", action="store_true", help="one at a time, each followed by a look at /metrics")
    add("--concurrency", **COUNTED, default=8, help="clients at once (default: %(default)s)")
    add("--faults", **COUNTED, default=1, help="end after so many (default: %(default)s)")
    add(
        "--deadline-s",
        type=positive,
        default=120.0,
        metavar="S",
        help="for any one answer, which may fill the context (default: %(default)s)",
    )
    add(
        "--rest-s",
        type=positive,
        default=90.0,
        metavar="S",
        help="in the end, until nothing runs or is held (default: %(default)s)",
    )
    return parser


async def run(options: argparse.Namespace) -> Result:
    target = Target(options.url, options.api_key, options.deadline_s)
    first, count = options.first, options.cases
    if options.only is not None:
        first, count = options.only, 1
    with named(options.url):
        if unrest := await check_rest(target, options.rest_s):
            raise RequestFailed(f"before the first case: {unrest}")
        numbers = range(first, first + count)
        result = await run_cases(
            target,
            options.seed,
            numbers,
            concurrency=options.concurrency,
            max_faults=options.faults,
            careful_s=options.rest_s if options.careful else 0.0,
        )
        result.unrest = await check_rest(target, options.rest_s)
    return result


def main() -> None:
    options = build_parser().parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().getrandbits(32)
    started_s = time.monotonic()
    try:
        result = asyncio.run(run(options))
    except RequestFailed as error:
        sys.exit(f"loadtest: {error}")
    seconds = time.monotonic() - started_s
    for fault in result.faults:
        print(f"{fault}\n  again: --seed {options.seed} --only {fault.numbers[0]}")
    if result.unrest:
        print(f"after {result.num_played} cases of --seed {options.seed}: {result.unrest}")
    print(f"{result.num_played} cases, seed {options.seed}, {seconds:.0f} s")
    document = {
        "seed": options.seed,
        "cases": result.num_played,
        "seconds": round(seconds, 1),
        "faults": [fault._asdict() for fault in result.faults],
        "unrest": result.unrest,
        "kinds": dict(sorted(result.kinds.items())),
        "outcomes": dict(sorted(result.outcomes.items())),
    }
    print(json.dumps(document))
    sys.exit(1 if result.faults or result.unrest else 0)


if __name__ == "__main__":
    main()
