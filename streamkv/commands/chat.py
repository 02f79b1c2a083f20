"""`streamkv chat`: a conversation in a terminal, with the model in this process.

Owns the order of turns, the commands that begin with a slash, and what Ctrl-C means: while an
answer comes it ends that, at the prompt twice it ends the conversation. Invariant: an error of one
turn, its message too long or refused, leaves the conversation as it was; piped in, it ends it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..config import EngineConfig
from ..engine.async_engine import AsyncEngine
from ..errors import GenerationError, InvalidRequestError, StreamkvError, one_line
from ..protocol import FinishReason
from .conversation import Conversation
from .log import log_to_stderr
from .options import ChatConfig
from .sampling import check_sampling, sampling_within, why_cut
from .terminal import MANY_LINES, Terminal

PROMPT = "> "
TEMPERATURE = 0.7  # as on the chat page
HISTORY_NAME = "chat_history"
_COMMAND = re.compile(r"/(\w*)(?:\s+(.*))?", re.DOTALL)


class Answer(NamedTuple):
    text: str
    notice: str  # of an end that isn't the model's


class Command(NamedTuple):
    """What `/name` does; `run` says whether the conversation goes on."""

    help: str
    run: Callable[[Chat, str], bool]


def chat(engine_config: EngineConfig, options: ChatConfig) -> int:
    """Talk until the end of the input. Returns the exit code."""
    check_sampling(options)
    log_to_stderr("warning")
    with asyncio.Runner() as runner:
        engine = AsyncEngine(engine_config)
        try:
            runner.run(engine.wait_ready())
            if engine.tokenizer.chat_template is None:
                raise StreamkvError(
                    f"{engine_config.model_id}: expected a model with a chat template, got one "
                    "without; give a template by --chat-template, or continue texts with "
                    "`streamkv generate`"
                )
            terminal = Terminal.standard()
            with terminal.line_editing(HISTORY_NAME):
                Chat(engine, options, terminal, runner).run()
        finally:
            runner.run(engine.close())
    return 0


class Chat:
    """One conversation, from the first prompt to the end of the input."""

    def __init__(
        self, engine: AsyncEngine, options: ChatConfig, terminal: Terminal, runner: asyncio.Runner
    ) -> None:
        self.conversation = Conversation(options.system)
        self.terminal = terminal
        self._engine, self._options, self._runner = engine, options, runner

    def run(self) -> None:
        if not self.terminal.interactive:
            while self._turn():
                pass
            return
        self.terminal.notice(
            f"{self._engine.config.model_id}, context {self._engine.info.max_model_len:,} tokens. "
            "/help lists the commands, Ctrl-D leaves."
        )
        has_hint = False
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn()
                has_hint = False
            except KeyboardInterrupt:
                self.terminal.write("\n")
                if has_hint:
                    return
                has_hint = True
                self.terminal.notice("Ctrl-C again or Ctrl-D leaves; /help lists the commands.")

    def answer(self, message: str) -> bool:
        """Stream the answer to a message, and keep both. Whether there was one."""
        try:
            answer = self._runner.run(self._stream(message))
        except (InvalidRequestError, GenerationError) as error:
            if not self.terminal.interactive:
                raise
            self.terminal.notice(one_line(error, 1000))
            return False
        self.terminal.end_line()
        if answer.text:
            self.conversation.add(message, answer.text)
        if answer.notice:
            self.terminal.notice(answer.notice)
        return bool(answer.text)

    def _turn(self) -> bool:
        """Read a message and answer it; whether the conversation goes on."""
        text = self.terminal.read(PROMPT)
        if text is None:
            return False
        if command := _COMMAND.fullmatch(text.strip()):
            name, argument = command[1], command[2] or ""
            if name in COMMANDS:
                return COMMANDS[name].run(self, argument)
            self.terminal.notice(f"/{name}: no such command; /help lists them")
        elif text.strip():
            self.answer(text)
        return True

    async def _stream(self, message: str) -> Answer:
        """The answer, shown as it comes; Ctrl-C ends it early where somebody types."""
        prompt = await self.conversation.prompt(self._engine, message, self._options.max_tokens)
        if prompt.num_forgotten:
            self.terminal.notice(
                f"(the context of {self._engine.info.max_model_len:,} tokens is full: the oldest "
                f"{prompt.num_forgotten} of the messages and their answers are forgotten)"
            )
        # A checkpoint that recommends something leaves out what it wants as the API has it.
        fallbacks = {} if self._engine.sampling_defaults else {"temperature": TEMPERATURE}
        sampling = sampling_within(self._engine, self._options, len(prompt.token_ids), **fallbacks)
        texts: list[str] = []
        finish_reason = FinishReason.ABORT
        try:
            async with self._engine.generate(prompt.token_ids, sampling) as stream:
                async for delta in stream:
                    self.terminal.write(delta.text)
                    texts.append(delta.text)
                    finish_reason = delta.finish_reason or finish_reason
        except asyncio.CancelledError:
            if not self.terminal.interactive:
                raise
        notice = ""
        if finish_reason is FinishReason.ABORT:
            notice = "(stopped)"
        elif finish_reason is FinishReason.LENGTH:
            reason = why_cut(self._engine, self._options, sampling, len(prompt.token_ids))
            notice = f"(cut: {reason})"
        return Answer("".join(texts), notice)


def _help(chat: Chat, argument: str) -> bool:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"/{name:{width}}{command.help}" for name, command in COMMANDS.items()]
    lines.append(f"{MANY_LINES} begins and ends a message of several lines.")
    lines.append("Ctrl-C stops an answer; what came of it stays in the conversation.")
    chat.terminal.notice("\n".join(lines))
    return True


def _clear(chat: Chat, argument: str) -> bool:
    chat.conversation.clear()
    chat.terminal.notice("(a new conversation)")
    return True


def _retry(chat: Chat, argument: str) -> bool:
    last = chat.conversation.take_last()
    if last is None:
        chat.terminal.notice("nothing was answered yet")
        return True
    is_answered = False
    try:
        is_answered = chat.answer(last.message)
    finally:
        if not is_answered:
            chat.conversation.add(last.message, last.answer)
    return True


def _system(chat: Chat, argument: str) -> bool:
    chat.conversation.system = argument
    chat.terminal.notice("(from now on)" if argument else "(no system message from now on)")
    return True


def _exit(chat: Chat, argument: str) -> bool:
    return False


COMMANDS: Mapping[str, Command] = {
    "help": Command("this list", _help),
    "clear": Command("forget what was said", _clear),
    "retry": Command("answer the last message again", _retry),
    "system": Command("TEXT: what the model is told before the conversation", _system),
    "exit": Command("leave", _exit),
}
