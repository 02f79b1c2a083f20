"""`streamkv chat`: turns, commands, Ctrl-C, and a real terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest
from continuation import continued_text
from fakes import FakeRunner
from tiny import tiny_tokenizer

from streamkv.cli import main
from streamkv.commands.chat import Chat
from streamkv.commands.options import ChatConfig
from streamkv.commands.terminal import Terminal
from streamkv.engine.async_engine import AsyncEngine
from streamkv.errors import GenerationError

TOKENIZER = tiny_tokenizer()
DEADLINE_S = 20.0


class ScriptedTerminal(Terminal):
    """Somebody who says these lines; `on_write` looks at each piece of an answer."""

    def __init__(self, *lines: str | type[KeyboardInterrupt]) -> None:
        self.shown, self.said = io.StringIO(), io.StringIO()
        super().__init__(io.StringIO(), self.shown, self.said)
        self.interactive = True
        self.on_write: Callable[[str], None] = lambda text: None
        self._lines = iter(lines)

    def read(self, prompt: str) -> str | None:
        line = next(self._lines, None)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    def write(self, text: str) -> None:
        super().write(text)
        self.on_write(text)


def talk(terminal: ScriptedTerminal, **options) -> Chat:
    """A conversation with a model that says something else to each prompt."""
    avoid = sorted(TOKENIZER.special_token_ids)
    runner = FakeRunner(
        vocab_size=TOKENIZER.vocab_size, avoid=avoid, max_model_len=4096, num_blocks=1024
    )
    engine = AsyncEngine("fake", runner=runner, tokenizer=TOKENIZER, seed=1)
    with asyncio.Runner() as loop:
        loop.run(engine.wait_ready())
        options = {"max_tokens": 8, "temperature": 0.0} | options
        chat = Chat(engine, ChatConfig(**options), terminal, loop)
        chat.run()
        assert engine.stats().num_requests_running == 0
        loop.run(engine.close())
    return chat


def turns(chat: Chat) -> list[tuple[str, str]]:
    found = []
    while turn := chat.conversation.take_last():
        found.append((turn.message, turn.answer))
    return found[::-1]


def test_ctrl_c_stops_an_answer_and_keeps_what_came_of_it():
    terminal = ScriptedTerminal("hello", "next")

    def interrupt(text: str) -> None:
        if len(terminal.shown.getvalue()) > 100:
            terminal.on_write = lambda text: None
            signal.raise_signal(signal.SIGINT)

    terminal.on_write = interrupt
    chat = talk(terminal, max_tokens=600)
    (first, cut), (second, whole) = turns(chat)
    assert (first, second) == ("hello", "next")
    assert terminal.shown.getvalue().startswith(cut)
    assert 100 < len(cut) < len(whole)
    assert "(stopped)" in terminal.said.getvalue()


def test_ctrl_c_at_the_prompt_hints_first_and_leaves_when_repeated():
    terminal = ScriptedTerminal(
        KeyboardInterrupt, "hello", KeyboardInterrupt, KeyboardInterrupt, "?"
    )
    chat = talk(terminal)
    assert [message for message, _ in turns(chat)] == ["hello"]
    assert terminal.said.getvalue().count("leaves;") == 2


def test_commands_change_the_conversation():
    terminal = ScriptedTerminal("one", "/clear", "two", "/system be brief", "/nonsense", "/help")
    chat = talk(terminal)
    assert chat.conversation.system == "be brief"
    assert [message for message, _ in turns(chat)] == ["two"]
    said = terminal.said.getvalue()
    assert "/nonsense: no such command" in said
    assert "/retry" in said and "answer the last message again" in said
    terminal = ScriptedTerminal("one", "/exit", "two")
    assert [message for message, _ in turns(talk(terminal))] == ["one"]


def test_retry_answers_the_last_message_again():
    terminal = ScriptedTerminal("/retry", "one", "/retry")
    chat = talk(terminal, temperature=1.0)
    ((message, answer),) = turns(chat)
    shown = terminal.shown.getvalue()
    assert message == "one"
    assert shown.endswith(f"{answer}\n")
    assert len(shown) > len(f"{answer}\n")
    assert shown != f"{answer}\n" * 2


def test_a_retry_that_fails_leaves_the_conversation_as_it_was(monkeypatch):
    reasons = iter([GenerationError("not finite"), KeyboardInterrupt(), GenerationError("again")])
    answered = Chat._stream

    async def stream(self, message):
        if len(self.terminal.shown.getvalue()) > 0:
            raise next(reasons)
        return await answered(self, message)

    monkeypatch.setattr(Chat, "_stream", stream)
    terminal = ScriptedTerminal("one", "/retry", "/retry", "/retry")
    ((message, answer),) = turns(talk(terminal))
    assert message == "one"
    assert terminal.shown.getvalue().startswith(f"{answer}\n")
    assert "not finite" in terminal.said.getvalue() and "again" in terminal.said.getvalue()


def test_a_message_that_is_a_path_is_a_message():
    terminal = ScriptedTerminal("/usr/bin: what is it?")
    assert len(turns(talk(terminal))) == 1


def test_a_message_too_long_leaves_the_conversation_as_it_was():
    terminal = ScriptedTerminal("one", "long " * 4096, "two")
    assert [message for message, _ in turns(talk(terminal))] == ["one", "two"]
    assert "shorten" in terminal.said.getvalue()


def transformers_answers(folder, messages: list[str], num_tokens: int) -> list[str]:
    """What `transformers` says to these messages, one after another."""
    told = [{"role": "system", "content": "be brief"}]
    for message in messages:
        told.append({"role": "user", "content": message})
        told.append({"role": "assistant", "content": continued_text(folder, told, num_tokens)})
    return [one["content"] for one in told if one["role"] == "assistant"]


def test_lines_of_a_pipe_are_turns_answered_as_transformers_does(checkpoint, monkeypatch, capsys):
    messages = ["the quick brown fox", "why?", "over the lazy dog"]
    piped = io.TextIOWrapper(io.BytesIO("\n".join(messages).encode()))
    monkeypatch.setattr(sys, "stdin", piped)
    asked = ["--dtype", "float32", "--temperature", "0", "--max-tokens", "12"]
    assert main(["chat", str(checkpoint), *asked, "--system", "be brief"]) == 0
    shown = capsys.readouterr().out
    expected = transformers_answers(checkpoint, messages, 12)
    assert shown == "".join(f"{answer}\n" for answer in expected)


def test_a_line_of_a_pipe_that_can_not_be_answered_ends_it(checkpoint, monkeypatch, capsys):
    piped = io.TextIOWrapper(io.BytesIO(b"over\n" + b"z" * 500 + b"\nover\n"))
    monkeypatch.setattr(sys, "stdin", piped)
    assert main(["chat", str(checkpoint), "--max-model-len", "64", "--max-tokens", "4"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    assert "shorten" in shown.err.splitlines()[-1]


def test_a_model_without_a_template_is_refused_in_one_line(checkpoint, tmp_path, capsys):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert main(["chat", str(tmp_path)]) == 1
    assert "--chat-template" in capsys.readouterr().err
    assert main(["chat", str(tmp_path), "--top-p", "2"]) == 2
    assert capsys.readouterr().err.startswith("streamkv: --top-p: expected a number in")


class Session:
    """`streamkv` in a terminal of its own, typed into."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "streamkv", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "200"} | environ,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.screen = ""
        self._num_seen = 0

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C at a prompt, until this appears: one that comes just before readline waits for a
        key is not seen by it, and then not told from the next."""
        for _ in range(5):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.see(pattern, DEADLINE_S / 5)
        raise AssertionError(f"expected {pattern!r}, got {self.screen!r}")

    def see(self, pattern: str, within_s: float = DEADLINE_S) -> None:
        """Wait until it appears after what was seen before."""
        deadline = time.monotonic() + within_s
        expression = re.compile(pattern, re.DOTALL)
        while not (found := expression.search(self.screen, self._num_seen)):
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, f"expected {pattern!r}, got {self.screen!r}"
            self.screen += os.read(self._master, 65536).decode(errors="replace")
        self._num_seen = found.end()

    def ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, as shells want it."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self) -> int:
        """The exit code; what is still written is read."""
        while True:
            try:
                self.screen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        code = self.process.wait(DEADLINE_S)
        os.close(self._master)
        return code


def _take_terminal() -> None:
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first one that is opened is the session's


def test_in_a_terminal(checkpoint, tmp_path):
    asked = ("chat", str(checkpoint), "--temperature", "0", "--max-num-seqs", "1")
    session = Session(*asked, STREAMKV_CACHE=str(tmp_path))
    session.see("/help lists the commands")
    session.see("> ")
    session.type("the quick brown fox\r")
    session.see("fox.*\r\n.*.{100}")  # and the beginning of an answer that would go on for long
    session.type("\x03")
    session.see(r"\(stopped\)")
    session.see("> ")
    session.type("\x1b[A")  # arrow up
    session.see("the quick brown fox")
    session.interrupt("Ctrl-C again")
    session.see("> ")
    session.type("\x04")
    assert session.wait() == 0
    assert "Traceback" not in session.screen
    history = tmp_path / "chat_history"
    assert history.read_text() == "the quick brown fox\n"
    assert history.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was_and_keeps_what_was_typed(
    number, checkpoint, tmp_path
):
    asked = ("chat", str(checkpoint), "--max-num-seqs", "1", "--max-tokens", "4")
    session = Session(*asked, STREAMKV_CACHE=str(tmp_path))
    session.see("> ")
    session.type("/help\r")
    session.see("this list.*> ")
    assert not session.echoes()
    while not session.ends_within(0.2):  # one that comes just before the wait for a key is not seen
        session.process.send_signal(number)
    assert session.process.returncode == -number
    assert session.echoes()
    session.wait()
    assert session.screen.rstrip().endswith("\x1b[?2004l")  # no marks around what is pasted
    assert (tmp_path / "chat_history").read_text() == "/help\n"
