"""What a server does with its KV memory, measured from outside.

    python -m loadtest.kv                                     all scenarios, with servers of its own
    python -m loadtest.kv --scenario waste fork               some
    python -m loadtest.kv --serve "streamkv serve my-model"   how to start a server
    python -m loadtest.kv --url http://127.0.0.1:8000         one that runs: waste, prefix, fork

Figures are ratios within one run, in turns, medians over rounds. A table for each scenario, with
targets, then one JSON document as the last line. The exit code is 1 if an answer was wrong or a
request was refused; a target that was missed is said and changes nothing.

Seconds, with 3 rounds on a busy machine of 2 cores: waste 40, prefix 20, chats 190, fork 100,
overload 250, restart 45; on a quiet one less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from ..arguments import COUNTED, add_model, add_rounds, new_parser, server_url
from ..failures import named
from ..stream import RequestFailed
from .chats import chats
from .fork import fork
from .overload import overload
from .prefix import prefix
from .report import Report
from .restart import restart
from .servers import Lab
from .waste import waste


class Scenario(NamedTuple):
    run: Callable[[Lab], Awaitable[Report]]
    one_server: bool  # is enough, however it was started


SCENARIOS: Mapping[str, Scenario] = {
    "waste": Scenario(waste, True),
    "prefix": Scenario(prefix, True),
    "chats": Scenario(chats, False),
    "fork": Scenario(fork, True),
    "overload": Scenario(overload, False),
    "restart": Scenario(restart, False),
}


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("loadtest.kv", __doc__)
    add = parser.add_argument
    add(
        "--scenario",
        choices=("all", *SCENARIOS),
        nargs="+",
        default=["all"],
        help="one or several (default: all)",
    )
    add("--url", type=server_url, help="a server that runs, for scenarios that need no more")
    add(
        "--serve",
        type=command,
        default=[sys.executable, "-m", "streamkv", "serve"],
        metavar="COMMAND",
        help="starts a server; flags are added (default: streamkv serve of this Python)",
    )
    add("--api-key", default="none", help="to send (default: %(default)s)")
    add_model(parser)
    add(
        "--vocab-size",
        **COUNTED,
        default=20000,
        help="prompts have ids below it (default: %(default)s)",
    )
    add_rounds(parser)
    add("--seed", default="", help="of the prompts (default: new in each run)")
    return parser


def command(text: str) -> list[str]:
    words = shlex.split(text)
    if not words:
        raise argparse.ArgumentTypeError('expected a command, got ""')
    return words


def chosen(names: list[str], url: str | None) -> list[str]:
    """Scenarios in their order. ValueError for one that a running server can't do."""
    if "all" in names:
        return [name for name, one in SCENARIOS.items() if one.one_server or not url]
    for name in names:
        if url and not SCENARIOS[name].one_server:
            raise ValueError(
                f"--scenario {name}: starts servers with flags of its own; leave out --url, and "
                "name the command with --serve"
            )
    return [name for name in SCENARIOS if name in names]


async def run(lab: Lab, names: list[str]) -> list[Report]:
    """Each scenario, its table printed when it is done."""
    reports = []
    for name in names:
        with named(f"{name}: {lab.url}" if lab.url else name):
            report = await SCENARIOS[name].run(lab)
        print(report.text(), end="\n\n", flush=True)
        reports.append(report)
    return reports


def main() -> None:
    parser = build_parser()
    options = parser.parse_args()
    try:
        names = chosen(options.scenario, options.url)
    except ValueError as error:
        parser.error(str(error))
    lab = Lab(
        options.serve,
        url=options.url or "",
        api_key=options.api_key,
        model=options.model,
        vocab_size=options.vocab_size,
        rounds=options.rounds,
        seed=options.seed or str(random.SystemRandom().getrandbits(48)),
    )
    try:
        reports = asyncio.run(run(lab, names))
    except RequestFailed as error:
        sys.exit(f"loadtest: {error}")
    num_wrong = sum(len(report.wrong) for report in reports)
    num_missed = sum(report.num_missed for report in reports)
    print(f"{num_wrong} wrong answers, {num_missed} targets missed")
    config = {key: value for key, value in vars(options).items() if key != "api_key"}
    document = {
        "config": {**config, "seed": lab.seed},
        "scenarios": {report.name: report.document() for report in reports},
    }
    print(json.dumps(document))
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
