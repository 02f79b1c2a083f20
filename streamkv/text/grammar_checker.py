"""What runs in the process that tries out grammars: each in a fork with bounded time and memory.

Owns the bounds, and what is told when one is exceeded. It must not know anything of the program it
works for but the vocabulary. Invariant: each job has one result, whatever becomes of its fork.

The library that compiles grammars has limits of its own, but not for all it does: some small
schemas take gigabytes, and some grammars all of the stack. Only a process can be bounded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, NoReturn

import msgspec
from llguidance import LLMatcher, LLTokenizer

from ..structured import StructuredOutputs
from .grammar_process import ALL, Effort, Job, Result, read_message, write_message
from .grammar_source import GrammarError, grammar_source
from .grammar_tokens import Greedy, Vocabulary, build_tokenizer, new_matcher, reason_of

MAX_BYTES = 256 << 20  # of compiling one grammar
MAX_KEPT_BYTES = 64 << 20  # of it, when it is compiled
STACK_BYTES = 2 << 20  # a thread that compiles the same later has several times that
IDLE_S = 120.0  # then the process ends
NUM_TRIED = 4  # first tokens, each with the mask after it
NUM_COPIES = 4  # that walk, each another way
MAX_MEASURED_TOKENS = 8  # what a grammar grows by it does most at first
MAX_MEASURED_S = 0.01  # of CPU time, all copies together
MAX_WALK_TOKENS = 100  # some grammars exceed the library's limits only after dozens
MAX_WALK_S = 0.04

_PAGE_BYTES = resource.getpagesize()


class Checker:
    """Tries out grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer: LLTokenizer = build_tokenizer(vocabulary, Greedy(vocabulary))
        self._end_ids = set(vocabulary.end_ids)
        self._special_tokens = [
            vocabulary.tokens[token_id].decode(errors="replace")
            for token_id in vocabulary.special_ids
        ]

    def check(self, job: Job) -> Result:
        """In a fork."""
        effort = job.effort
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _work(writer, effort.cpu_s, lambda: self.compile(job.structured))
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            data = _read_until(pipe, time.monotonic() + effort.wall_s)
        if data is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if data:
            return msgspec.msgpack.decode(data, type=Result)
        if data is None:
            return why_ended(signal.SIGKILL, effort)
        return why_ended(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, effort)

    def compile(self, structured: StructuredOutputs) -> Result:
        """Here and now."""
        new_matcher(self._tokenizer, 'start: "a"')  # what any takes isn't this one's
        num_bytes = _num_kept_bytes()
        try:
            source = grammar_source(structured, self._special_tokens)
            matcher = new_matcher(self._tokenizer, source)
            self._try_out(matcher)
        except GrammarError as exc:
            return Result(reason_of(str(exc)))
        except MemoryError:
            return Result(_TOO_MUCH_MEMORY)
        num_bytes = max(_num_kept_bytes() - num_bytes, 1 << 16)
        if num_bytes > MAX_KEPT_BYTES:
            return Result(
                f"it takes {num_bytes >> 20} MB of memory, more than {MAX_KEPT_BYTES >> 20}"
            )
        num_before = _num_kept_bytes()
        walks = [_Walk(matcher, self._end_ids, part / NUM_COPIES) for part in range(NUM_COPIES)]
        error = _walk(walks, MAX_MEASURED_TOKENS, MAX_MEASURED_S)
        copy_bytes = max(_num_kept_bytes() - num_before, 0) // NUM_COPIES
        error = error or _walk(walks, MAX_WALK_TOKENS, MAX_WALK_S)
        if error:
            return Result(reason_of(error))
        return Result(source=source, num_bytes=num_bytes, copy_bytes=copy_bytes)

    def _try_out(self, matcher: LLMatcher) -> None:
        """GrammarError if there is no first token, or none of those tried with which it goes on."""
        firsts = [one for one in _tokens_of(matcher) if one not in self._end_ids]
        firsts = firsts[:: max(1, len(firsts) // NUM_TRIED)]
        for token_id in firsts:
            copy = matcher.deep_copy()
            copy.consume_token(token_id)
            try:
                _tokens_of(copy)
                return
            except GrammarError:
                if token_id == firsts[-1]:
                    raise


class _Walk:
    """An answer that goes on as long as it may."""

    def __init__(self, matcher: LLMatcher, end_ids: set[int], place: float) -> None:
        """It prefers tokens from that part of the vocabulary on."""
        self.has_ended = False
        self._matcher = matcher.deep_copy()
        self._end_ids = end_ids
        self._place = place

    def step(self) -> str:
        """Another token. The error, if it can't be followed."""
        matcher = self._matcher
        mask = matcher.compute_bitmask()
        token_id = _token_of(mask, self._place)
        if token_id in self._end_ids:
            token_id = _token_of(_without(mask, self._end_ids), self._place)
        if token_id is None:
            self.has_ended = True
        else:
            matcher.consume_token(token_id)
        return matcher.get_error() if matcher.is_error() else ""


def _walk(walks: Sequence[_Walk], num_tokens: int, cpu_s: float) -> str:
    """So many tokens of each, side by side, or as many as there is time for. The first error."""
    until_s = time.thread_time() + cpu_s
    for _ in range(num_tokens):
        for walk in walks:
            if time.thread_time() > until_s:
                return ""
            if not walk.has_ended and (error := walk.step()):
                return error
    return ""


def _tokens_of(matcher: LLMatcher) -> list[int]:
    """Those that may come next. GrammarError if it is in error."""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return [
        8 * index + bit
        for index, byte in enumerate(mask)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    ]


def _without(mask: bytes, token_ids: Iterable[int]) -> bytes:
    left = bytearray(mask)
    for token_id in token_ids:
        left[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(left)


def _token_of(mask: bytes, place: float) -> int | None:
    """The first of them from that part of the vocabulary on; None if there is none."""
    start = int(len(mask) * place)
    rest = (mask[start:] + mask[:start]).lstrip(b"\0")
    if not rest:
        return None
    bit = (rest[0] & -rest[0]).bit_length() - 1
    return 8 * ((start - len(rest)) % len(mask)) + bit


_TOO_MUCH_MEMORY = f"it takes more than {MAX_BYTES >> 20} MB of memory to compile"
_TOO_MUCH_TIME = f"it takes more than {ALL.cpu_s:g} s to compile"
_TOO_DEEP = "it is nested too deeply"
_REASONS: dict[int, str] = {
    signal.SIGABRT: _TOO_MUCH_MEMORY,
    signal.SIGBUS: _TOO_DEEP,
    signal.SIGPROF: _TOO_MUCH_TIME,
    signal.SIGSEGV: _TOO_DEEP,
}
# Nothing that a grammar does: its fork was ended as the wall clock said, or by a system that is
# short of memory.
_OTHERS = (signal.SIGKILL, signal.SIGTERM)


def why_ended(number: int, effort: Effort) -> Result:
    """Of a fork that had nothing to say, by the signal that ended it."""
    if number in _OTHERS:
        return Result("the machine has too little time or memory for it now", is_open=True)
    is_open = number == signal.SIGPROF and effort.cpu_s < ALL.cpu_s
    return Result(_REASONS.get(number, "compiling it failed"), is_open=is_open)


def _num_kept_bytes() -> int:
    """Resident ones, without what was freed and not given back."""
    with contextlib.suppress(OSError, AttributeError):  # another C library keeps little
        ctypes.CDLL(None).malloc_trim(0)
    return _num_resident_bytes()


def _num_resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:  # no Linux: the most there ever was, in its unit
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _num_virtual_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * _PAGE_BYTES
    except OSError:
        return 1 << 40


def _work(writer: int, cpu_s: float, compile_it: Callable[[], Result]) -> NoReturn:
    """The fork's life. What it has to say fits into memory, whatever it did before."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library would write of its failures
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_STACK, STACK_BYTES)
        _limit(resource.RLIMIT_AS, _num_virtual_bytes() + MAX_BYTES)
        data = msgspec.msgpack.encode(compile_it())
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    with contextlib.suppress(OSError, ValueError):  # a system that has no such limit
        resource.setrlimit(what, (value if hard < 0 else min(value, hard), hard))


def _read_until(pipe: IO[bytes], deadline_s: float) -> bytes | None:
    """All that is written, or None if that isn't done in time."""
    parts: list[bytes] = []
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([pipe], [], [], left_s)[0]:
            return None
        part = pipe.read(1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def main() -> None:
    """The first message is a Vocabulary, the others are Jobs; each has one answer."""
    requests, answers = os.fdopen(0, "rb", buffering=0), os.fdopen(1, "wb")
    first = read_message(requests)
    if first is None:
        return
    checker = Checker(msgspec.msgpack.decode(first, type=Vocabulary))
    write_message(answers, Result())
    while select.select([requests], [], [], IDLE_S)[0]:
        message = read_message(requests)
        if message is None:
            return
        write_message(answers, checker.check(msgspec.msgpack.decode(message, type=Job)))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # nobody listens any more
        main()
