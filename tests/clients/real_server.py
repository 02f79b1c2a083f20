"""`streamkv serve` with the default model, as a process, and what plain HTTP says of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "smollm2-135m-instruct"
DEADLINE_S = 30.0
QUESTION = [{"role": "user", "content": "Tell me about the sea."}]
BEGINNING = "The sea is"
LONG = 8000  # tokens: seconds, whoever waits for them
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Tokyo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER},
}


class RealServer:
    """What tests ask of it without any client library: the oracle of those."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.base_url = f"{url}/v1"
        self.http = httpx.Client(base_url=url, timeout=DEADLINE_S, verify=False)

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(path, json={"model": MODEL, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat_text(self, max_tokens: int, **fields: Any) -> str:
        fields = {"messages": QUESTION, "max_tokens": max_tokens, **fields}
        answer = self.post("/v1/chat/completions", **fields)
        return answer["choices"][0]["message"]["content"]

    def text(self, max_tokens: int, **fields: Any) -> str:
        answer = self.post(
            "/v1/completions", **{"prompt": BEGINNING, "max_tokens": max_tokens, **fields}
        )
        return answer["choices"][0]["text"]

    def gauge(self, name: str) -> float:
        pattern = rf"^streamkv:{name}(?:\{{.*\}})? (\S+)$"
        found = re.search(pattern, self.http.get("/metrics").text, re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return float(found[1])

    def wait_idle(self) -> None:
        """Until nothing runs, waits or holds a block."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_held")
        deadline_s = time.monotonic() + DEADLINE_S
        while busy := {name: value for name in names if (value := self.gauge(name))}:
            assert time.monotonic() < deadline_s, busy


@contextmanager
def real_server() -> Iterator[RealServer]:
    """Ready, with nothing but its defaults and a free port; its log has no error in the end."""
    environment = {key: value for key, value in os.environ.items() if "STREAMKV" not in key}
    command = [sys.executable, "-m", "streamkv", "serve", "--port", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        url = ""
        try:
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"http://[\d.:]+", line):
                    url = found[0]
                if "is ready" in line:
                    break
            else:
                pytest.fail("".join(lines))
            reader = threading.Thread(target=lines.extend, args=(process.stderr,))
            reader.start()  # so that a full pipe never stops the server
            server = RealServer(url)
            yield server
            server.wait_idle()
            server.http.close()
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
        reader.join()
    assert not [line for line in lines if " E " in line or "Traceback" in line], "".join(lines)
