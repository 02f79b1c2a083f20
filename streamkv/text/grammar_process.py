"""The process that tries out grammars before they are compiled here.

Owns its start, its end, and what is sent to it; `grammar_checker.py` is what runs in it. Another
process, because nothing else bounds the memory, the stack and the time of compiling what a client
sent. Any thread may use it; jobs go one by one. Invariants: `check` returns or raises in bounded
time; after `close` or `rest` the process has ended and is reaped, and what it wrote of its failures
is in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
from typing import IO

import msgspec

from ..errors import GenerationError
from ..structured import StructuredOutputs
from .grammar_tokens import Vocabulary

logger = logging.getLogger(__name__)

_PROGRAM = f"{__package__}.grammar_checker"
_START_S = 10.0  # for what isn't the job's own
_END_S = 5.0  # until a process that was asked to end is killed
_MAX_TOLD = 2000  # characters of what it wrote of its failures: the last ones
_LENGTH = struct.Struct("<I")


class Effort(msgspec.Struct, frozen=True, array_like=True):
    """How much is spent on one grammar."""

    cpu_s: float
    wall_s: float  # where others take the CPU


ALL = Effort(2.0, 10.0)  # what needs more is refused
LITTLE = Effort(0.15, 1.0)  # enough for most: they take some 10 ms


class Job(msgspec.Struct, frozen=True, array_like=True):
    structured: StructuredOutputs
    effort: Effort


class Result(msgspec.Struct, frozen=True, array_like=True):
    """What became of a grammar: an error, or its source."""

    error: str = ""
    is_open: bool = False  # the error isn't the grammar's: with more time it may be followed
    source: str = ""
    num_bytes: int = 0  # of memory that it takes
    copy_bytes: int = 0  # that each answer's copy takes at first


def write_message(file: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message)
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def read_message(file: IO[bytes]) -> bytes | None:
    """None at the end."""
    head = _read(file, _LENGTH.size)
    return None if head is None else _read(file, _LENGTH.unpack(head)[0])


def _read(file: IO[bytes], num_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while num_bytes:
        part = file.read(num_bytes)
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


class GrammarProcess:
    """Starts with the first job, and with the next one after it has ended."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def check(self, structured: StructuredOutputs, effort: Effort = ALL) -> Result:
        """What came of compiling it there. GenerationError if there is no such process."""
        job = Job(structured, effort)
        with self._lock:
            for is_last in (False, True):
                try:
                    return self._ask(job)
                except (OSError, EOFError) as exc:  # it has ended: it was idle, or was killed
                    self._end()
                    if is_last or self._closed:
                        raise GenerationError(f"checking the grammar failed: {exc}") from exc
        raise AssertionError("unreachable")

    def rest(self) -> None:
        """End it for now, after the job that it is at. Idempotent."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End it for good. Idempotent."""
        self._closed = True
        process = self._process
        if process is not None:
            _kill(process)  # a job that runs is for nobody
        with self._lock:
            self._end()

    def _ask(self, job: Job) -> Result:
        if self._closed:
            raise OSError("the engine is closed")
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._process = _start()
            if self._closed:  # meanwhile: nobody else has seen this one
                _kill(process)
            self._exchange(process, self._vocabulary, ALL)
        return self._exchange(process, job, job.effort)

    def _exchange(
        self, process: subprocess.Popen[bytes], message: object, effort: Effort
    ) -> Result:
        assert process.stdin is not None and process.stdout is not None
        # It bounds each job itself; this is for a process that stands still.
        timer = threading.Timer(_START_S + 3 * effort.wall_s, _kill, [process])
        timer.daemon = True
        timer.start()
        try:
            write_message(process.stdin, message)
            answer = read_message(process.stdout)
        finally:
            timer.cancel()
        if answer is None:
            raise EOFError("its process has ended")
        return msgspec.msgpack.decode(answer, type=Result)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        for end in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what is left in it is for nobody
                end.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
        assert process.stderr is not None
        with process.stderr as file:
            os.set_blocking(file.fileno(), False)  # whoever else may still have its other end
            said = (file.read(1 << 16) or b"").decode(errors="replace").strip()
        if said:
            logger.warning("the process that tries out grammars wrote: %s", said[-_MAX_TOLD:])


def _start() -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C is for this program, which then ends it."""
    return subprocess.Popen(
        # -P: no file of the folder that somebody happens to be in is taken for a module
        [sys.executable, "-P", "-W", "ignore", "-m", _PROGRAM],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # if it ever writes more than that takes, it is killed in time
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its forks."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
