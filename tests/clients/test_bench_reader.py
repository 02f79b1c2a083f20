"""What `vllm bench serve` sends, and answers as it reads them, which is less than SSE allows.

It takes an event of chat and text completions for `data: ` and JSON, with nothing else in it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.harness import MODEL, Server

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SENT = {  # by its backends
    "/v1/completions": {
        "prompt": "the dog",
        "repetition_penalty": 1.0,
        "max_tokens": 9,
        "logprobs": None,
        **USAGE,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "the dog"}]}],
        "max_completion_tokens": 9,
        **USAGE,
    },
    "/v1/responses": {"input": "the dog", "max_output_tokens": 9, "stream": True, "store": False},
}


def ask(server: Server, path: str) -> list[str]:
    """Blocks of the stream that are no comments."""
    body = {"model": MODEL, "ignore_eos": True, **SENT[path]}
    with server.client() as client:
        answer = client.post(path, json=body, headers={"x-request-id": "bench-1-0"})
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    return [block for block in blocks if block and not block.startswith(":")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_events_of_completions_are_nothing_but_data(server: Server, path: str) -> None:
    *blocks, done = (block.removeprefix("data: ") for block in ask(server, path))
    chunks: list[dict[str, Any]] = [json.loads(block) for block in blocks]
    *told, usage = chunks
    assert done == "[DONE]"
    assert len(told) > 1 and all(chunk["choices"] for chunk in told)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 9
    assert usage["usage"]["prompt_tokens"] > 0


def test_events_of_responses_have_their_data_in_one_line(server: Server) -> None:
    events = []
    for block in ask(server, "/v1/responses"):
        (data,) = (line[6:] for line in block.split("\n") if line.startswith("data: "))
        events.append(json.loads(data))
    assert sum(event["type"] == "response.output_text.delta" for event in events) > 1
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert events[-1]["response"]["usage"]["output_tokens"] == 9
