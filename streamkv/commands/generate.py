"""`streamkv generate`: continue texts, or answer messages, and write what comes to standard output.

Owns the order of the output, that of the prompts, and its form. All prompts run at once; what
comes of a later one waits in its stream. Invariant: a prompt that can't be honoured is refused
before anything is written.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TextIO

import msgspec

from ..config import EngineConfig
from ..engine.admission import check_prompt
from ..engine.async_engine import AsyncEngine
from ..engine.stream import TokenStream
from ..errors import ConfigError, InvalidRequestError
from ..protocol import FinishReason
from .log import log_to_stderr
from .options import GenerateConfig
from .sampling import check_sampling, sampling_within
from .terminal import Terminal

STDIN = "-"
MAX_TOKENS = 256  # of a text to continue: a model that only continues may never end
SEPARATOR = "---"


class Generated(msgspec.Struct, kw_only=True):
    """A line of --json."""

    prompt: str
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


def generate(engine_config: EngineConfig, options: GenerateConfig, prompts: Sequence[str]) -> int:
    """Write what comes after each prompt. Returns the exit code."""
    check_sampling(options)
    if options.system and not options.chat:
        raise ConfigError("--system: expected --chat with it, a text to continue has no such thing")
    prompts = read_prompts(prompts, sys.stdin)
    log_to_stderr("warning")
    asyncio.run(_Generation(engine_config, options, Terminal.standard()).run(prompts))
    return 0


def read_prompts(prompts: Sequence[str], stdin: TextIO) -> list[str]:
    """The prompts, `-` replaced by all of standard input, which is the prompt if there is none.

    ConfigError where nothing is to be had.
    """
    if not prompts and not stdin.isatty():
        prompts = [STDIN]
    if not prompts or prompts.count(STDIN) > 1:
        got = "none" if not prompts else f"{STDIN} more than once"
        raise ConfigError(
            f"expected a prompt, or {STDIN} for what comes from standard input, got {got}"
        )
    return [_read_all(stdin) if prompt == STDIN else prompt for prompt in prompts]


def _read_all(stdin: TextIO) -> str:
    try:
        text = stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"standard input: expected text in UTF-8, got {error.reason} at byte {error.start}"
        ) from None
    return text.removesuffix("\n")  # that of `echo` and of editors


class _Generation:
    def __init__(
        self, engine_config: EngineConfig, options: GenerateConfig, terminal: Terminal
    ) -> None:
        self._engine = AsyncEngine(engine_config)
        self._options = options
        self._terminal = terminal

    async def run(self, prompts: Sequence[str]) -> None:
        """Write what comes of all prompts, in order."""
        async with self._engine, AsyncExitStack() as stack:
            encoded = [await self._encode(prompts, index) for index in range(len(prompts))]
            at_once = self._engine.config.max_num_queued_reqs
            streams = [
                await stack.enter_async_context(self._start(token_ids))
                for token_ids in encoded[:at_once]
            ]
            for index, prompt in enumerate(prompts):
                if self._options.json:
                    await self._write_line(prompt, streams[index])
                else:
                    await self._write_text(streams[index], is_first=index == 0)
                if index + at_once < len(prompts):
                    stream = self._start(encoded[index + at_once])
                    streams.append(await stack.enter_async_context(stream))

    async def _encode(self, prompts: Sequence[str], index: int) -> list[int]:
        """Its tokens. InvalidRequestError, with the number of the prompt if there are several."""
        prompt, system = prompts[index], self._options.system
        try:
            if not self._options.chat:
                token_ids = await self._engine.encode(prompt, must_fit=True)
            else:
                told = [{"role": "system", "content": system}] if system else []
                messages = [*told, {"role": "user", "content": prompt}]
                token_ids = await self._engine.encode_chat(messages)
            check_prompt(token_ids, self._engine.info)
        except InvalidRequestError as error:
            if len(prompts) == 1:
                raise
            raise InvalidRequestError(f"prompt {index + 1} of {len(prompts)}: {error}") from None
        return token_ids

    def _start(self, token_ids: list[int]) -> TokenStream:
        fallbacks = {} if self._options.chat else {"max_tokens": MAX_TOKENS}
        sampling = sampling_within(self._engine, self._options, len(token_ids), **fallbacks)
        return self._engine.generate(token_ids, sampling)

    async def _write_text(self, stream: TokenStream, *, is_first: bool) -> None:
        if not is_first:
            self._terminal.write(f"{SEPARATOR}\n")
        async for delta in stream:
            self._terminal.write(delta.text)
        self._terminal.end_line()

    async def _write_line(self, prompt: str, stream: TokenStream) -> None:
        (completion,) = await stream.collect()
        usage = stream.usage
        line = Generated(
            prompt=prompt,
            text=completion.text,
            finish_reason=completion.finish_reason,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_generated_tokens=usage.num_generated_tokens,
        )
        self._terminal.write(f"{msgspec.json.encode(line).decode()}\n")
