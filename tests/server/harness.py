"""A real server for the tests: uvicorn in a thread, AsyncEngine, FakeRunner, tiny tokenizer.

Clients are the official `openai` package and httpx. What the fake model answers is known from its
oracle, so that tests compare whole texts.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import openai
from fakes import FakeMaskBoard, FakeRunner, expected_tokens, fake_logprobs
from tiny import tiny_tokenizer

from streamkv.config import ServerConfig
from streamkv.engine.async_engine import AsyncEngine
from streamkv.protocol import (
    RowAdded,
    Runner,
    RunnerInfo,
    StepInput,
    StepOutput,
    pack_ints,
    unpack_ints,
)
from streamkv.server import serving
from streamkv.text.tokenizer import Tokenizer

T = TypeVar("T")

MODEL = "org/tiny"
VOCAB_SIZE = 339
MAX_MODEL_LEN = 512
DEADLINE_S = 30.0


class GreedyEngine(AsyncEngine):
    """A request that doesn't say is greedy: what is sampled with a seed that nobody chose may end
    where a test doesn't expect it, once in some hundred runs."""

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        recommended = super().sampling_defaults
        if self.config.generation_config != "auto":
            return recommended
        return {"temperature": 0.0, **recommended}


class Server:
    """A server on a free port of 127.0.0.1; `call` runs a coroutine on its event loop."""

    def __init__(
        self,
        runner: Runner,
        config: ServerConfig,
        engine: dict[str, Any],
        times: dict[str, float],
    ) -> None:
        self.runner = runner
        self.tokenizer: Tokenizer = tiny_tokenizer()
        self._config = config
        self._times = times
        self._engine_fields = {"model": MODEL, "tokenizer": self.tokenizer, **engine}
        # Of asyncio's connections only those of TCP by name send at once: 40 ms an answer else.
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(256)
        self.port: int = self._socket.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.host}"
        self._openai: openai.OpenAI | None = None
        self._begun: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        self._loop = self._begun.result(DEADLINE_S)

    async def _main(self) -> None:
        try:
            self.engine = GreedyEngine(runner=self.runner, **self._engine_fields)
            self.serving = serving.Server(self.engine, self._config, **self._times)
        except BaseException as exc:
            self._begun.set_exception(exc)
            raise
        self._begun.set_result(asyncio.get_running_loop())
        await self.serving.serve(sockets=[self._socket])

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def engine_call(self, function: Callable[[], None]) -> None:
        """Run something short on the server's loop."""

        async def run() -> None:
            function()

        self.call(run())

    def close(self) -> None:
        if self._openai is not None:
            self._openai.close()
        self.serving.should_exit = True
        self._thread.join(DEADLINE_S)
        self._socket.close()
        assert not self._thread.is_alive(), "the server did not stop"

    # --- what tests ask ----------------------------------------------------------------------

    def wait_ready(self) -> None:
        async def ready() -> None:
            while self.engine.status_detail == "not started":
                await asyncio.sleep(0)
            await self.engine.wait_ready()

        self.call(ready())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let the server's loop run until the condition holds on it."""

        async def wait() -> None:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    await asyncio.sleep(0)

        self.call(wait())

    def wait_idle(self) -> None:
        """Until nothing runs, waits or holds a block."""

        def idle() -> bool:
            stats = self.engine.stats()
            busy = stats.num_requests_running or stats.num_requests_waiting
            return not busy and stats.kv_cache_usage_perc == 0

        self.wait_until(idle)

    def client(self, **options: Any) -> httpx.Client:
        # Loading certificates would take longer than most tests.
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S, verify=False, **options)

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        if self._openai is None:
            self._openai = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=self.client()
            )
        return self._openai.with_options(api_key=api_key)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )

    # --- the oracle --------------------------------------------------------------------------

    def chat_prompt(self, *messages: dict[str, Any]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def answer(self, prompt: Sequence[int], num: int, **options: Any) -> list[int]:
        """The fake model's greedy answer, end token included."""
        return expected_tokens(
            prompt, num, VOCAB_SIZE, end_token_ids=self.tokenizer.eos_token_ids, **options
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """What the tokens say: special tokens are silent, half a last character is dropped."""
        data = b"".join(
            self.tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if token_id not in self.tokenizer.special_token_ids
        )
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


class ScriptedRunner:
    """A model that says the same to everybody: `script`, then its last token for ever; whatever a
    grammar allows."""

    store = None

    def __init__(self, script: Sequence[int]) -> None:
        self.masks = FakeMaskBoard(VOCAB_SIZE)
        self._script = script
        self._rows: dict[int, RowAdded] = {}

    def load(self, progress: Callable[[str, float], None]) -> RunnerInfo:
        return fake_runner().info

    def step(self, step: StepInput) -> StepOutput:
        self._rows |= {added.row: added for added in step.added}
        sampled, logprobs = [], []
        for row, start, count, ask in zip(*[iter(unpack_ints(step.scheduled))] * 4, strict=True):
            if ask:
                place = start + count - self._rows[row].num_prompt_tokens
                sampled.append(self._script[min(place, len(self._script) - 1)])
                num_logprobs = self._rows[row].sampling.num_logprobs
                logprobs.append(fake_logprobs(sampled[-1], max(num_logprobs, 0), VOCAB_SIZE))
        return StepOutput(
            step_id=step.step_id,
            sampled=pack_ints(sampled),
            logprobs=tuple(logprobs),
            copies_done=pack_ints(unpack_ints(step.copies)[::4]),
        )

    def close(self) -> None:
        pass


def fake_runner(**options: Any) -> FakeRunner:
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": 1024,
        "block_size": 16,
    }
    return FakeRunner(**(defaults | options))


def read_events(body: str) -> list[Any]:
    """The data of a stream's events; [DONE] as a string."""
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


@contextmanager
def serve(
    runner: Runner | None = None,
    *,
    ready: bool = True,
    engine: Any = None,
    grace_s: float = 5.0,
    end_s: float = 5.0,
    **config: Any,
) -> Iterator[Server]:
    """A server for one test. `config` are ServerConfig's fields, `engine` EngineConfig's."""
    times = {"grace_s": grace_s, "end_s": end_s}
    server = Server(runner or fake_runner(), ServerConfig(**config), engine or {}, times)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.close()
