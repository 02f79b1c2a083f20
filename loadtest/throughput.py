"""Output tokens per second of a server at several concurrencies, beside sequential transformers.

    python -m loadtest.throughput --url http://127.0.0.1:8000 --concurrency 1 8 32
    python -m loadtest.throughput --transformers my-llama ...   the same prompts, one at a time

Closed loop: `concurrency` clients each send their next request when the last one ended. Prompts
are random token ids of exact length, new in each run (no prefix hits), greedy, `ignore_eos`.
Rounds alternate between all that is compared; medians are printed for people, and one JSON
document is the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path

from .sse_client import Stream, stream_completion


def prompt_ids(length: int, source: random.Random) -> list[int]:
    """Ordinary token ids: past the special tokens, inside any usual vocabulary."""
    return [source.randrange(1000, 20000) for _ in range(length)]


async def run_closed_loop(url: str, concurrency: int, arguments: argparse.Namespace) -> dict:
    """One round: tokens per second over the whole run, prefill included."""
    source = random.Random()
    num_requests = max(concurrency * arguments.requests_per_client, arguments.min_requests)
    waiting = [prompt_ids(arguments.input_len, source) for _ in range(num_requests)]
    done: list[Stream] = []

    async def client() -> None:
        while waiting:
            body = {
                "prompt": waiting.pop(),
                "max_tokens": arguments.output_len,
                "temperature": 0,
                "ignore_eos": True,
            }
            done.append(await stream_completion(url, body))

    started_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    elapsed_s = time.monotonic() - started_s
    errors = [stream.error for stream in done if stream.error]
    if errors:
        raise SystemExit(f"{len(errors)} of {len(done)} requests failed, first: {errors[0]}")
    num_tokens = sum(stream.completion_tokens for stream in done)
    assert num_tokens == num_requests * arguments.output_len, "the server ended streams early"
    gaps = [b - a for s in done for a, b in zip(s.event_s, s.event_s[1:], strict=False)]
    return {
        "tokens_per_s": num_tokens / elapsed_s,
        "ttft_ms": 1e3 * statistics.median(stream.first_token_s for stream in done),
        "itl_ms": 1e3 * statistics.median(gaps or [0.0]),
    }


class SequentialTransformers:
    """`transformers.generate`, one prompt at a time, bfloat16, on the same machine."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.model.generation_config.eos_token_id = None
        self.torch = torch

    def run(self, arguments: argparse.Namespace) -> dict:
        source = random.Random()
        num_tokens, started_s = 0, time.monotonic()
        for _ in range(arguments.transformers_requests):
            ids = self.torch.tensor([prompt_ids(arguments.input_len, source)])
            with self.torch.inference_mode():
                output = self.model.generate(
                    ids,
                    attention_mask=self.torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=arguments.output_len,
                    max_new_tokens=arguments.output_len,
                    pad_token_id=0,
                )
            num_tokens += output.shape[1] - ids.shape[1]
        return {"tokens_per_s": num_tokens / (time.monotonic() - started_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--transformers", type=Path, metavar="FOLDER", help="the model in Hugging Face format"
    )
    parser.add_argument("--transformers-requests", type=int, default=2)
    arguments = parser.parse_args()

    beside = SequentialTransformers(arguments.transformers) if arguments.transformers else None
    rounds: dict[str, list[dict]] = {}
    for _ in range(arguments.rounds):
        for concurrency in arguments.concurrency:
            figures = asyncio.run(run_closed_loop(arguments.url, concurrency, arguments))
            rounds.setdefault(f"{concurrency} streams", []).append(figures)
        if beside:
            rounds.setdefault("transformers, one at a time", []).append(beside.run(arguments))
    medians = {
        name: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        for name, runs in rounds.items()
    }
    for name, figures in medians.items():
        print(f"{name:30}", "  ".join(f"{key} {value:8.1f}" for key, value in figures.items()))
    print(json.dumps({"medians": medians, "rounds": rounds}))


if __name__ == "__main__":
    main()
