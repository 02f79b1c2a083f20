"""What the checkpoint recommends reaches the device for fields that a request leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes import FakeRunner
from server.harness import MAX_MODEL_LEN, Server, fake_runner, serve
from tiny import save_tiny_tokenizer

from streamkv.protocol import RowSampling, StepInput, StepOutput

RECOMMENDED = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "max_new_tokens": 5,
}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PLAIN = (1.0, 1.0, 0, 0.0, 1.0)


class Watching:
    """A runner that keeps how its last row is sampled."""

    store = masks = None

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.load, self.close = runner.load, runner.close
        self.last: RowSampling | None = None

    def step(self, step: StepInput) -> StepOutput:
        for added in step.added:
            self.last = added.sampling
        return self._runner.step(step)

    def sampled_with(self) -> tuple[Any, ...]:
        return tuple(getattr(self.last, name) for name in NAMES)


def folder_with(folder: Path, config: dict[str, Any]) -> Path:
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def serve_folder(folder: Path, **engine: Any) -> Any:
    """A server whose runner is no model and whose checkpoint has no weights."""
    fields = {"model": str(folder), "tokenizer": None, "served_model_name": "m", **engine}
    return serve(Watching(fake_runner()), engine=fields)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_folder(folder_with(tmp_path_factory.mktemp("model"), RECOMMENDED)) as running:
        yield running


def chat(server: Server, **body: Any) -> Any:
    messages = [{"role": "user", "content": "the"}]
    fields = {"ignore_eos": True, **body.pop("extra_body", {})}
    return server.openai().chat.completions.create(
        model="m", messages=messages, extra_body=fields, **body
    )


def recommended() -> tuple[Any, ...]:
    return tuple(RECOMMENDED[name] for name in NAMES)


def test_every_endpoint_takes_them_for_what_is_left_out_or_null(server: Server) -> None:
    client: openai.OpenAI = server.openai()
    chat(server)
    assert server.runner.sampled_with() == recommended()
    chat(server, temperature=None, extra_body={"top_k": None})
    assert server.runner.sampled_with() == recommended()
    client.completions.create(model="m", prompt="the")
    assert server.runner.sampled_with() == recommended()
    response = client.responses.create(model="m", input="the")
    assert server.runner.sampled_with() == recommended()
    assert (response.temperature, response.top_p) == (0.6, 0.9)


def test_what_a_request_says_wins_one_by_one(server: Server) -> None:
    chat(server, temperature=0.0, top_p=1.0, extra_body={"top_k": 0, "min_p": 0.0})
    assert server.runner.sampled_with() == (0.0, 1.0, 0, 0.0, 1.1)
    server.openai().responses.create(model="m", input="the", temperature=0.25)
    assert server.runner.sampled_with() == (0.25, *recommended()[1:])


def test_the_recommended_length_holds_where_none_is_given(server: Server) -> None:
    def length(**body: Any) -> int:
        return chat(server, **body).usage.completion_tokens

    assert length() == 5
    assert length(max_tokens=9) == 9
    assert length(extra_body={"min_tokens": 7}) == 7
    completion = server.openai().completions.create(
        model="m", prompt="the", extra_body={"ignore_eos": True}
    )
    assert completion.usage.completion_tokens == 16  # OpenAI's own default of this endpoint


def test_a_recommended_length_beyond_the_context_is_no_error(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"max_new_tokens": 100_000})
    with serve_folder(folder) as server:
        usage = chat(server).usage
        assert usage.total_tokens == MAX_MODEL_LEN


def test_the_operator_can_leave_them_out(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, RECOMMENDED)
    with serve_folder(folder, generation_config="vllm") as server:
        assert chat(server).usage.total_tokens == MAX_MODEL_LEN
        assert server.runner.sampled_with() == PLAIN
