"""The terminal of a command: what is typed, what an answer looks like, what is said beside it.

Owns the three standard streams: line editing and its history, whether somebody watches, colours.
Knows neither models nor conversations. Invariant: on a terminal a model's text can't do more than
appear there, its control characters are dropped; into a pipe or file it goes as it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..cache import cache_dir
from .process import raising

MANY_LINES = '"""'  # begins and ends a text of several lines
MORE_PROMPT = "... "
MAX_HISTORY = 1000  # lines kept from one conversation to the next
# C0 and C1 but tab and newline: they move the cursor, rename the window, paste into the shell.
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})


class Terminal:
    """Standard input, output and error of a command."""

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> None:
        self.interactive = stdin.isatty() and stdout.isatty()  # somebody types and reads
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        self._is_shown = stdout.isatty()
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._dim, self._normal = ("\033[2m", "\033[0m")
        if plain or not stderr.isatty():
            self._dim = self._normal = ""
        self._in_line = False  # whether an answer's last line has not ended

    @classmethod
    def standard(cls) -> Terminal:
        """That of this process. What can't be written in its encoding is shown as `?`."""
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="replace")
        return cls(sys.stdin, sys.stdout, sys.stderr)

    def write(self, text: str) -> None:
        """Show some of an answer now."""
        if self._is_shown:
            text = text.translate(_CONTROLS)
        if text:
            self._in_line = not text.endswith("\n")
            self._stdout.write(text)
            self._stdout.flush()

    def end_line(self) -> None:
        """Begin a new line, unless this is one."""
        if self._in_line:
            self.write("\n")

    def notice(self, text: str) -> None:
        """Say something that is no answer."""
        self.end_line()
        text = text.translate(_CONTROLS)
        print(f"{self._dim}{text}{self._normal}", file=self._stderr, flush=True)

    def read(self, prompt: str) -> str | None:
        """What was typed or piped in, a line, or several between triple quotes; None at the end."""
        text = self._read_line(prompt)
        if text is None or not text.startswith(MANY_LINES):
            return text
        lines = [text.removeprefix(MANY_LINES)]
        while not lines[-1].endswith(MANY_LINES):
            line = self._read_line(MORE_PROMPT)
            if line is None:
                break
            lines.append(line)
        return "\n".join(lines).removesuffix(MANY_LINES)

    def _read_line(self, prompt: str) -> str | None:
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                self.write("\n")
                return None
        line = self._stdin.readline()
        return line.removesuffix("\n") if line else None

    @contextlib.contextmanager
    def line_editing(self, history_name: str) -> Iterator[None]:
        """Arrows, search and pasted newlines while this lasts. What is typed is kept in the cache
        folder, for this user alone, to be found again next time."""
        if not self.interactive:
            yield
            return
        try:
            import readline
        except ImportError:  # not every Python was built with it
            yield
            return
        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
        path = cache_dir() / history_name
        readline.set_history_length(MAX_HISTORY)
        with contextlib.suppress(OSError):  # none yet; it is a convenience in any case
            readline.read_history_file(path)
        with raising(signal.SIGHUP):  # of a terminal that is closed
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    _make_private(path)
                    readline.write_history_file(path)


def _make_private(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
