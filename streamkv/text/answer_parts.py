"""What an answer consists of: content, reasoning, and calls of tools.

Owns the parts that parsers give, and the tape that they read from. Knows no format. Invariant:
each character that was pushed is in exactly one part, or was dropped as a known format's syntax;
the parts joined don't depend on how the text was split into pushes.

A parser is a generator that reads the tape and yields where it needs more text. The tape keeps what
may still turn out to be something else, MAX_HELD_CHARS at most.
"""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

MAX_HELD_CHARS = 16_384  # a call whose name isn't known by then is no call
_SPACE = re.compile(r"\s*")

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # yields where it needs more text


class ContentPart(NamedTuple):
    """Text for the user."""

    text: str


class ReasoningPart(NamedTuple):
    """What the model thought before it answered."""

    text: str


class ToolCallPart(NamedTuple):
    """A call of a tool, or what a call goes on with: `arguments` joined are JSON text. `id` and
    `name` are in the first part of each `index`, and empty in the others."""

    index: int  # type: ignore[assignment]  # in the place of tuple's method
    id: str
    name: str
    arguments: str


Part: TypeAlias = ContentPart | ReasoningPart | ToolCallPart


class Kind(enum.Enum):
    """What the text that is read now becomes."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    ARGUMENTS = enum.auto()
    HELD = enum.auto()  # that is not known yet


def openai_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class Tape:
    """The text of an answer that is not in a part yet.

    `text[start:pos]` was read and becomes `kind`; the reader may look as far as `end`.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.text = ""
        self.start = self.pos = self.end = 0
        self.kind = Kind.CONTENT
        self.ended = False
        self.calm = ""  # text with none of these characters goes out as what it is; "": read it
        self.num_calls = 0
        self.no_content = True  # so far, or since the last call
        self._parts: list[Part] = []
        self._arguments: list[str] = []  # of the last call, behind those parts: they become one
        self._new_id = new_id

    def add(self, text: str) -> None:
        """More text at the end."""
        self.calm = ""
        self.text = self.text[self.start :] + text
        self.pos -= self.start
        self.start = 0
        self._set_end()

    def become(self, kind: Kind) -> None:
        """What was read goes out, what is read next becomes `kind`. Text that was held becomes
        that too."""
        if self.kind is not Kind.HELD:
            self.emit()
        self.kind = kind
        self._set_end()

    def emit(self) -> None:
        """What was read goes out as what it is."""
        text = self.text[self.start : self.pos]
        self.start = self.pos
        if not text or self.kind is Kind.HELD:
            return
        if self.kind is Kind.ARGUMENTS:
            self._arguments.append(text)
        else:
            self._put(self.part(text))

    def part(self, text: str) -> Part:
        """The text as what is read now."""
        if self.kind is Kind.ARGUMENTS:
            return ToolCallPart(self.num_calls - 1, "", "", text)
        if self.kind is Kind.REASONING:
            return ReasoningPart(text)
        self.no_content = False
        return ContentPart(text)

    def drop(self) -> None:
        """What was read and held is syntax, in no part."""
        self.start = self.pos
        self._set_end()

    @property
    def at_call(self) -> bool:
        """Whether nothing but calls is before this place, since the answer or the last content."""
        return self.no_content and self.start == self.pos

    def cut_off(self) -> None:
        """Where the text ends within the syntax of a call that has begun, that is dropped."""
        if self.ended and self.pos == len(self.text):
            self.drop()

    def call(self, name: str) -> None:
        """A call begins. What was read and held is its syntax."""
        self.drop()
        self._put(ToolCallPart(self.num_calls, self._new_id(), name, ""))
        self.num_calls += 1
        self.no_content = True

    def arguments(self, text: str) -> None:
        """JSON text of the last call's arguments."""
        self._arguments.append(text)

    def take(self) -> list[Part]:
        """The parts since the last time."""
        self._join_arguments()
        parts, self._parts = self._parts, []
        return parts

    def more(self) -> Reading[bool]:
        """Wait for text behind `end`; False if there is none, or no more may be held."""
        while self.pos >= self.end:
            if self.ended or self.end < len(self.text):
                return False
            if self.kind is Kind.HELD and self.end - self.start >= MAX_HELD_CHARS:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, not read yet; "" if there is none."""
        if self.pos < self.end or (yield from self.more()):
            return self.text[self.pos]
        return ""

    def run(self, pattern: re.Pattern[str], others: str = "") -> Reading[str]:
        """Read as far as the pattern, a repeated class of characters, goes; the character behind
        it, or "" if there is none. `others` are those that aren't in it, if they are few."""
        while True:
            match = pattern.match(self.text, self.pos, self.end)
            self.pos = match.end() if match is not None else self.pos
            if self.pos < self.end:
                return self.text[self.pos]
            if self.kind is not Kind.HELD:
                self.calm = others
            if not (yield from self.more()):
                return ""

    def space(self) -> Reading[str]:
        """Read white space; the character behind it."""
        return (yield from self.run(_SPACE))

    def literal(self, *marks: str) -> Reading[str]:
        """Read one of these, while text is held; "" and nothing read if none of them is next."""
        longest = max(map(len, marks))
        while True:
            text = self.text[self.pos : min(self.pos + longest, self.end)]
            for mark in marks:
                if text.startswith(mark):
                    self.pos += len(mark)
                    return mark
            if not any(mark.startswith(text) for mark in marks):
                return ""
            behind = self.end
            self.pos, begin = behind, self.pos - self.start
            has_more = yield from self.more()
            self.pos = self.start + begin
            if not has_more:
                return ""

    def until(self, *marks: str, num_newlines: int = 0) -> Reading[str]:
        """Read up to one of these, and hold it; "" if the text ends first. What is before it goes
        out as what it is, but for so many newlines, if there are any: they are held with it."""
        firsts = "".join(mark[0] for mark in marks) + ("\n" if num_newlines else "")
        while True:
            found = min(filter(None, map(self._find, marks)), default=None)
            if found is None and self.ended:
                self.pos = self.end
                self.emit()
                return ""
            place, mark = found or (min(map(self._may_begin, marks)), "")
            before = self.text[max(self.pos, place - num_newlines) : place] if num_newlines else ""
            self.pos = place - (len(before) - len(before.rstrip("\n")))
            if mark:
                self.become(Kind.HELD)
                self.pos = place + len(mark)
                return mark
            self.calm = firsts if self.pos == self.end else ""
            yield

    def _put(self, part: Part) -> None:
        self._join_arguments()
        self._parts.append(part)

    def _join_arguments(self) -> None:
        if self._arguments:
            text = "".join(self._arguments)
            self._arguments.clear()
            self._parts.append(ToolCallPart(self.num_calls - 1, "", "", text))

    def _find(self, mark: str) -> tuple[int, str] | None:
        place = self.text.find(mark, self.pos, self.end)
        return None if place < 0 else (place, mark)

    def _may_begin(self, mark: str) -> int:
        """Where at the end of the text the mark may begin; the end if nowhere."""
        place = max(self.pos, self.end - len(mark) + 1)
        while (place := self.text.find(mark[0], place, self.end)) >= 0:
            if mark.startswith(self.text[place : self.end]):
                return place
            place += 1
        return self.end

    def _set_end(self) -> None:
        self.end = len(self.text)
        if self.kind is Kind.HELD:
            self.end = min(self.end, self.start + MAX_HELD_CHARS)


class AnswerParser:
    """One answer's parts. Owned by whoever owns the answer."""

    def __init__(
        self,
        steps: Sequence[Callable[[Tape], Reading[None]]],
        new_id: Callable[[], str] = openai_id,
    ) -> None:
        """`steps` read the answer one after the other; what they leave is content."""
        self._tape = Tape(new_id)
        self._reading = _read(self._tape, steps)
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        """What is certain after this text."""
        tape = self._tape
        if tape.calm:
            for char in tape.calm:
                if char in text:
                    break
            else:
                return [tape.part(text)] if text else []
        tape.add(text)
        next(self._reading)
        if tape.start != tape.pos and tape.kind is not Kind.HELD:
            tape.emit()
        return tape.take()

    def finish(self) -> list[Part]:
        """The end of the answer: what was held back. Nothing may be pushed after it."""
        tape = self._tape
        tape.ended = True
        for _ in self._reading:
            pass
        return tape.take()


def _read(tape: Tape, steps: Sequence[Callable[[Tape], Reading[None]]]) -> Reading[None]:
    yield
    for step in steps:
        yield from step(tape)
    while True:
        tape.become(Kind.CONTENT)
        tape.pos = tape.end
        tape.emit()
        if tape.ended:
            return
        yield
