"""The process of a command: its standard streams, the signals that end it, its last words.

Owns the exit code. Errors meant for people are one line on stderr and exit code 1; wrong usage is
exit code 2. Invariant: whatever ends a command, but SIGKILL, it clears away what it must before the
process is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from ..errors import FREE_MEMORY, ConfigError, StreamkvError, one_line

INTERRUPTED = 130  # what a shell says of a program that SIGINT ended
PIPE_CLOSED = 141  # and SIGPIPE


class Ended(SystemExit):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def run_process(command: Callable[[], int]) -> int:
    """Run it to its end, and say what went wrong. Returns the exit code, unless a signal asked for
    the end, which then is that signal's."""
    open_streams()
    try:
        with raising(signal.SIGTERM):
            try:
                return command()
            finally:
                sys.stdout.flush()  # not later, where nobody would see what is wrong with it
    except Ended as ended:
        signal.raise_signal(ended.number)
        os._exit(128 + ended.number)  # process 1, which no signal ends that it doesn't handle
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        _discard_output()
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
    except MemoryError:
        return _fail(f"out of memory: {FREE_MEMORY}", 1)
    except StreamkvError as error:
        return _fail(error, 2 if isinstance(error, ConfigError) else 1)


def say(words: object) -> None:
    """One line on stderr, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"streamkv: {one_line(words, 1000)}", file=sys.stderr)


def open_streams() -> None:
    """Standard streams that were closed (`<&-`) lead nowhere, rather than to what is opened next
    and gets their number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest free number, so the stream's
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "r" if name == "stdin" else "w"))


@contextlib.contextmanager
def raising(number: int) -> Iterator[None]:
    """While this lasts, the first such signal raises Ended in the main thread; later ones are
    ignored, and so are all if they were before."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Ended(number)

    before = signal.getsignal(number)
    try:
        if before is not signal.SIG_IGN:
            signal.signal(number, end)
        yield
    finally:
        signal.signal(number, before)


def _fail(words: object, exit_code: int) -> int:
    say(words)
    return exit_code


def _discard_output() -> None:
    """What is buffered would be an error once more at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
