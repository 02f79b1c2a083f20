"""A server for tests of `loadtest.kv`: OpenAI's completions, /metrics, /health and a folder, with
no model, in the standard library alone. Run as a script. `--fault` makes it go wrong.

An answer is a hash chain of its prompt; a prompt token that isn't known takes `TOKEN_S`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import threading
import time
from array import array
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN_S = 200e-6
FIRST = 1000


def answer(prompt: list[int], count: int, choice: int) -> list[int]:
    digest = hashlib.sha256(array("i", [choice, *prompt]).tobytes()).digest()
    return [FIRST + digest[i % 32] + i for i in range(count)]


class State:
    """What a server knows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.known: set[str] = set()
        self.held: dict[int, tuple[int, int]] = {}  # request -> tokens, blocks
        self.counts: Counter[str] = Counter()
        self.numbers = itertools.count()
        self.file: Path | None = None
        if options.kv_cache_dir:
            self._open(Path(options.kv_cache_dir) / "segment-0")

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path
        lines = path.read_text("latin-1").splitlines() if path.exists() else []
        if lines and lines[0] != self.options.kv_cache_dtype:
            print(f"{path.name}: of another model; it is written anew", file=sys.stderr)
            lines = []
        good = [
            line for line in lines[1:] if hashlib.md5(line[32:].encode()).hexdigest() == line[:32]
        ]
        if len(good) < len(lines) - 1:
            print(f"{path.name}: {len(lines) - 1 - len(good)} damaged records", file=sys.stderr)
        self.known = {line[32:] for line in good}
        path.write_text("\n".join([self.options.kv_cache_dtype, *good, ""]))

    def keep(self, digests: list[str]) -> None:
        new = [digest for digest in digests if digest not in self.known]
        self.known.update(new)
        if self.file is not None:
            with self.file.open("a") as file:
                for digest in new:
                    file.write(hashlib.md5(digest.encode()).hexdigest() + digest + "\n")
            self.counts["kv_store_writes_total"] += len(new)

    def digests(self, prompt: list[int], salt: str) -> list[str]:
        size = self.options.block_size
        return [
            hashlib.sha256(f"{salt} {prompt[:end]}".encode()).hexdigest()
            for end in range(size, len(prompt) + 1, size)
        ]


class Handler(BaseHTTPRequestHandler):
    state: State

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        state = self.state
        text = "ok"
        if self.path == "/metrics":
            with state.lock:
                gauges = {
                    "kv_cache_tokens_held": sum(tokens for tokens, _ in state.held.values()),
                    "kv_cache_blocks_held": sum(blocks for _, blocks in state.held.values()),
                    "kv_cache_block_size": state.options.block_size,
                    "num_preemptions_total": 0,
                    "kv_store_writes_total": 0,
                    **state.counts,
                }
            text = "# HELP no number\n" + "".join(
                f'streamkv:{name}{{model_name="x y"}} {value:.1f}\n'
                for name, value in gauges.items()
            )
        self._send(200, text.encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        state, fault = self.state, self.state.options.fault
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count, n = body["prompt"], body["max_tokens"], body.get("n", 1)
        size = state.options.block_size
        digests = state.digests(prompt[:-1], body.get("cache_salt", ""))
        with state.lock:
            number = next(state.numbers)
            known = list(itertools.takewhile(state.known.__contains__, digests))
            cached = len(known) * size if state.options.caching else 0
            shared = len(prompt) // size
            tail = len(prompt) + count - shared * size
            tokens = shared * size + n * tail
            blocks = shared + n * -(-tail // size) + (10 if fault == "waste" else 0)
            state.held[number] = (tokens, blocks)
            num_running = len(state.held)
        try:
            if fault == "refuse" and num_running > 8:
                self._send(429, b'{"error": "overloaded"}')
                return
            time.sleep((len(prompt) - cached) * TOKEN_S)
            choices = [
                answer(prompt, count, 0 if body["temperature"] == 0 else i) for i in range(n)
            ]
            if (fault == "cached" and cached) or (
                fault == "swap" and float(state.options.swap_space)
            ):
                choices[0][-1] += 1
            self._stream(choices, len(prompt), cached)
        finally:
            with state.lock:
                del state.held[number]
                if state.options.caching:
                    state.keep(digests)

    def _stream(self, choices: list[list[int]], num_prompt: int, cached: int) -> None:
        events = [
            {"choices": [{"index": i, "text": "x", "token_ids": ids}]}
            for i, ids in enumerate(choices)
        ]
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": sum(map(len, choices)),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        lines = [json.dumps(event) for event in [*events, {"choices": [], "usage": usage}]]
        self._send(200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--swap-space", default="0")
    parser.add_argument("--kv-cache-dir", default="")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--fault", default="")
    parser.add_argument("--no-enable-prefix-caching", dest="caching", action="store_false")
    options, _ = parser.parse_known_args()
    if options.fault == "start":
        sys.exit("no such model: nothing to serve")
    Handler.state = State(options)
    ThreadingHTTPServer.request_queue_size = 256
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
