"""What answers that a grammar binds cost those beside them: times between tokens of plain streams.

    python -m loadtest.bystanders --url http://127.0.0.1:8000
    python -m loadtest.bystanders --url ... --streams 4 --beside 16 --rounds 3

Each round measures the plain streams three times: alone, beside as many free answers, and beside as
many answers of a JSON schema. An answer beside them that has ended is followed by the next. Free
ones are the same work for the model, so `bound / free` is what the grammars cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from .arguments import COUNTED, add_model, add_rounds, add_server, new_parser
from .failures import named
from .sse_client import stream_sse
from .stream import RequestFailed, Stream, percentile, rounded

PATH = "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "city": {"type": "string", "pattern": "^[A-Z][a-z]+( [A-Z][a-z]+)*$"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
BESIDE: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "free": {"ignore_eos": True, "max_tokens": 150},
    "bound": {"response_format": SCHEMA, "max_tokens": 150},
}


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("loadtest.bystanders", __doc__)
    add = parser.add_argument
    add_server(parser)
    add_model(parser)
    add("--streams", **COUNTED, default=4, help="plain ones, which are measured")
    add("--beside", **COUNTED, default=16, help="answers beside them")
    add("--output-len", **COUNTED, default=128, help="tokens of each plain stream")
    add_rounds(parser)
    return parser


class Round:
    """One kind of company for the plain streams."""

    def __init__(self, options: argparse.Namespace, name: str, number: int) -> None:
        self._options, self._name, self._number = options, name, number
        self._num_sent = 0
        self._companions: list[Stream] = []

    async def run(self) -> dict[str, float]:
        options, company = self._options, BESIDE[self._name]
        tasks = []
        if company is not None:
            tasks = [asyncio.create_task(self._keep(company)) for _ in range(options.beside)]
        try:
            while tasks and not len(self._companions) and not any(one.done() for one in tasks):
                await asyncio.sleep(0.05)  # the first has ended: all have begun long ago
            plain = {"ignore_eos": True, "max_tokens": options.output_len}
            begun_s, before = time.monotonic(), len(self._companions)
            streams = await asyncio.gather(*(self._send(plain) for _ in range(options.streams)))
            elapsed_s = time.monotonic() - begun_s
            beside = sum(one.completion_tokens for one in self._companions[before:])
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one
        gaps_ms = [1e3 * gap for stream in streams for gap in stream.gaps_s]
        return {
            "itl_p50_ms": percentile(gaps_ms, 0.5),
            "itl_p99_ms": percentile(gaps_ms, 0.99),
            "itl_max_ms": max(gaps_ms),
            "beside_tokens_per_s": beside / elapsed_s,
        }

    async def _keep(self, company: dict[str, Any]) -> None:
        while True:
            self._companions.append(await self._send(company))

    async def _send(self, fields: dict[str, Any]) -> Stream:
        options = self._options
        self._num_sent += 1
        prompt = f"Describe person {self._num_sent} of round {self._number} as JSON."
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 1.0,
            "seed": self._num_sent,
            **({"model": options.model} if options.model else {}),
            **fields,
        }
        return await stream_sse(options.url, PATH, body, options.api_key, time.monotonic())


def main() -> None:
    options = build_parser().parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in BESIDE}
    try:
        for number in range(options.rounds):
            for name in BESIDE:
                with named(options.url):
                    rounds[name].append(asyncio.run(Round(options, name, number).run()))
    except RequestFailed as error:
        sys.exit(f"loadtest: {error}")
    medians = {
        name: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        for name, runs in rounds.items()
    }
    for name, figures in medians.items():
        shown = "  ".join(f"{key} {value:8.1f}" for key, value in figures.items())
        print(f"{options.streams} plain streams  {name:6} {shown}")
    ratios = [
        bound["itl_p50_ms"] / free["itl_p50_ms"]
        for bound, free in zip(rounds["bound"], rounds["free"], strict=True)
    ]
    print(f"bound / free, median time between tokens: {statistics.median(ratios):.2f}")
    config = {key: value for key, value in vars(options).items() if key != "api_key"}
    figures = {"medians": rounded(medians), "rounds": rounded(rounds)}
    print(json.dumps({"config": config, "bound_by_free": rounded(ratios), **figures}))


if __name__ == "__main__":
    main()
