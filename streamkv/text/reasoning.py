"""Reasoning: what a model writes between <think> and </think> before it answers.

Owns which marks a model uses, and the reading of them. Knows no tools. Invariant: only what stands
at the beginning of an answer is reasoning; newlines beside the marks, which templates put back, are
in no part.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from .answer_parts import Kind, Reading, Tape

MAX_NEWLINES = 16  # before the closing mark; more of them are reasoning
_NEWLINES = re.compile(r"\n*")
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


class Stage(enum.Enum):
    """How far a prompt has gone with the reasoning."""

    NOT_BEGUN = enum.auto()  # the answer may begin with it
    OPEN = enum.auto()  # the answer goes on with it
    OVER = enum.auto()  # the answer comes after it


class ReasoningFormat(NamedTuple):
    """How a model marks what it thinks."""

    opening: str
    closing: str
    shows_special_tokens: bool  # skip_special_tokens must be off to see the marks

    def stage(self, prompt_tail: str, *, continued: str = "") -> Stage:
        """Of a prompt that ends so. Where it ends within a message, `continued` is what that says
        so far: only that counts, and what the template wrote right before it."""
        said = continued.strip()
        before = prompt_tail.rstrip().removesuffix(said).rstrip()
        if self.closing not in said and (
            before.endswith(self.opening) or said.startswith(self.opening)
        ):
            return Stage.OPEN
        return Stage.OVER if said or before.endswith(self.closing) else Stage.NOT_BEGUN

    def step(self, is_open: bool) -> Callable[[Tape], Reading[None]]:
        """What reads it, as the first of an answer's steps."""
        return lambda tape: _reasoning(tape, self.opening, self.closing, is_open)


def find_format(
    template: str | None, vocabulary: Collection[str], special: Collection[str]
) -> ReasoningFormat | None:
    """The marks that the template has both of, or has one of while both are tokens."""
    for opening, closing in _MARKS:
        marks = (opening, closing)
        num_there = sum(mark in (template or "") for mark in marks)
        if num_there == 2 or (num_there and all(mark in vocabulary for mark in marks)):
            return ReasoningFormat(*marks, any(mark in special for mark in marks))
    return None


def _reasoning(tape: Tape, opening: str, closing: str, is_open: bool) -> Reading[None]:
    tape.become(Kind.HELD)
    yield from tape.space()
    if (yield from tape.literal(opening)):
        tape.drop()
    elif is_open:
        tape.pos = tape.start
    else:
        tape.pos = tape.start
        return
    yield from _newlines(tape)
    tape.become(Kind.REASONING)
    if (yield from tape.until(closing, num_newlines=MAX_NEWLINES)):
        tape.drop()
        yield from _newlines(tape)


def _newlines(tape: Tape) -> Reading[None]:
    """Drop those that are next."""
    while (yield from tape.peek()) == "\n":
        tape.pos += 1
        tape.drop()
