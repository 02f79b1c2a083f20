"""What the tests of LLM share: one around a runner, and looking at what it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine.support import check_nothing_is_held, make_engine, scheduler_of, until
from fakes import FakeRunner

from streamkv import LLM

CHAT = [{"role": "user", "content": "what is the answer"}]
STRIPPING = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}\n"
    "{% endfor %}{% if tools %}{{ tools[0]['name'] }}{% endif %}{{ tone }}"
)


def make_llm(runner: FakeRunner, **overrides: Any) -> LLM:
    return LLM.from_engine(lambda: make_engine(runner, **overrides))


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def wait_until(llm: LLM, condition: Callable[[], bool]) -> None:
    llm._background.call(until(condition)).result(20)


def check_idle(llm: LLM, runner: FakeRunner) -> None:
    """Nothing is left of requests that ended, however they did."""
    engine = llm._background.engine
    wait_until(llm, lambda: not scheduler_of(engine).has_work)
    check_nothing_is_held(engine, runner)


def llm_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("streamkv")]


class SilentBar:
    """What `LLM.generate` uses of tqdm."""

    postfix = ""

    def __init__(self, *, total: int, desc: str, dynamic_ncols: bool, postfix: str) -> None:
        self.total, self.num, self.closed = total, 0, False

    def update(self, num: int) -> None:
        self.num += num

    def refresh(self) -> None: ...

    def close(self) -> None:
        self.closed = True
