"""Calls of tools written as Python: [f(a=1), g(b="x")].

Owns the reading of them. Knows neither tools nor models. Invariant: a call's arguments begin a JSON
object, and are all of it when the call is complete; time is linear in the text, however it is
split.

A call begins when its first keyword is known, or that it has none. Until then everything is held
and becomes content if it turns out to be no call. What is no literal after that ends the call, and
is content.
"""

from __future__ import annotations

import re

from .answer_parts import Reading, Tape
from .json_calls import before_call
from .python_literals import literal, quoted

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"

_NAME = re.compile(r"[\w.-]*")


def pythonic(tape: Tape) -> Reading[None]:
    """Lists of calls that are the answer, or follow <|python_start|>."""
    while mark := (yield from before_call(tape, (PYTHON_START,), ("[",))):
        if mark == PYTHON_START:
            if (yield from tape.space()) != "[":
                continue
            tape.pos += 1
        if (yield from _calls(tape)):
            yield from tape.space()
            if not (yield from tape.literal(PYTHON_END)):
                tape.pos = tape.end if tape.ended else tape.start
            tape.drop()


def _calls(tape: Tape) -> Reading[bool]:
    """Calls up to the closing bracket; False if they end in another way."""
    num_before = tape.num_calls
    while True:
        yield from tape.space()
        name, char = yield from _name(tape)
        tape.pos += char == "("
        if not name or char != "(" or not (yield from _keywords(tape, name)):
            break
        last = yield from tape.space()
        if last == ",":  # one may be the last
            tape.pos += 1
            last = yield from tape.space()
        tape.pos += last == "]"
        tape.drop()
        if last == "]":
            return True
    if tape.num_calls > num_before:
        tape.cut_off()
    return False


def _keywords(tape: Tape, name: str) -> Reading[bool]:
    """Keywords with values, and the closing parenthesis."""
    before = "{"  # what is written before the next keyword
    while (char := (yield from tape.space())) != ")":
        keyword, char = yield from _name(tape)
        if char.isspace():
            char = yield from tape.space()
        if not keyword or char != "=":
            return False
        tape.pos += 1
        if before == "{":
            tape.call(name)
        tape.arguments(f"{before}{quoted(keyword)}: ")
        before = ", "
        yield from tape.space()
        tape.drop()
        if not (yield from literal(tape)):
            return False
        last = yield from tape.space()
        if last not in (",", ")"):
            return False
        tape.pos += last == ","
        tape.drop()
    tape.pos += 1
    if before == "{":
        tape.call(name)
    tape.drop()
    tape.arguments("}" if before == ", " else "{}")
    return True


def _name(tape: Tape) -> Reading[tuple[str, str]]:
    """A name, and the character behind it."""
    begin = tape.pos - tape.start
    char = yield from tape.run(_NAME)
    return tape.text[tape.start + begin : tape.pos], char
