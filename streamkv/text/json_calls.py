"""Calls of tools written as JSON objects: Hermes', Llama 3's and Mistral's.

Owns the reading of them. Knows neither tools nor models. Invariant: a call's arguments are the text
that the model wrote, from the first character of their value to the last; time is linear in the
text, however it is split.

A call begins when its name is known; where an object might be the answer itself, when its arguments
begin as well. Until then everything is held and becomes content if it turns out to be no call.
After that what doesn't fit ends the call, and is content.
"""

from __future__ import annotations

import json
import re

from .answer_parts import Kind, Reading, Tape

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_MARK = "<|python_tag|>"
MISTRAL_MARK, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_IN_STRING = re.compile(r'[^"\\]*')
_IN_VALUE = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[-+.\w]*")
_NAME = re.compile(r"[^\s\[\]{}]*")  # in Mistral's form without quotes
_WORD = re.compile(r"\w*")


def hermes(tape: Tape) -> Reading[None]:
    """Objects between <tool_call> and </tool_call>, amid text."""
    while (yield from before_call(tape, (HERMES_OPEN,))):
        is_call = False
        while (yield from tape.space()) == "{":  # there may be several in one pair of marks
            is_call = yield from _Object(tape).read()
            if not is_call:
                break
        if is_call:
            if not (yield from tape.literal(HERMES_CLOSE)):
                tape.pos = tape.end if tape.ended else tape.start
            tape.drop()


def llama3_json(tape: Tape) -> Reading[None]:
    """Objects that are the answer, or follow <|python_tag|>; several in a list, or with semicolons,
    commas or white space between them."""
    firsts: tuple[str, ...] = ("{", "[")
    while mark := (yield from before_call(tape, (LLAMA_MARK,), firsts)):
        if mark in ("{", "["):
            tape.pos -= 1
        first = yield from tape.space()
        if first == "[":
            yield from _list(tape, needs_arguments=True)
        elif first == "{":
            yield from _Object(tape, needs_arguments=True).read()
        firsts = ("{", "[", ";", ",") if tape.num_calls else firsts


def mistral(tape: Tape) -> Reading[None]:
    """A list of objects after [TOOL_CALLS], or name[ARGS]{…} after each one."""
    while (yield from before_call(tape, (MISTRAL_MARK,))):
        first = yield from tape.space()
        if first == "[":
            yield from _list(tape)
        elif first:
            yield from _named(tape)


def before_call(tape: Tape, marks: tuple[str, ...], firsts: tuple[str, ...] = ()) -> Reading[str]:
    """Read up to one of the marks, and hold it; "" at the end. Where the answer begins, or after a
    call, `firsts` are marks too, and white space that only calls follow is dropped."""
    if tape.at_call:
        tape.become(Kind.HELD)
        yield from tape.space()
        if mark := (yield from tape.literal(*marks, *firsts)):
            return mark
        if tape.ended and tape.num_calls and not tape.text[tape.start :].strip():
            tape.pos = tape.end
            tape.drop()
    tape.become(Kind.CONTENT)
    return (yield from tape.until(*marks))


def _list(tape: Tape, needs_arguments: bool = False) -> Reading[None]:
    """Objects in a JSON list."""
    num_before = tape.num_calls
    tape.pos += 1
    while first := (yield from tape.space()):
        if first == "{":
            if not (yield from _Object(tape, needs_arguments).read()):
                return
        elif first in ",]" and tape.num_calls > num_before:
            tape.pos += 1
            tape.drop()
            if first == "]":
                return
        else:
            return
    if tape.num_calls > num_before:
        tape.cut_off()


def _named(tape: Tape) -> Reading[None]:
    """A name, what may stand between, and the arguments."""
    begin = tape.pos - tape.start
    yield from tape.run(_NAME)
    name = tape.text[tape.start + begin : tape.pos]
    if (yield from tape.literal(MISTRAL_ID)):
        yield from tape.run(_WORD)
    yield from tape.literal(MISTRAL_ARGS)
    if name and (yield from tape.space()) == "{":
        tape.call(name)
        yield from _arguments(tape)


class _Object:
    """One call's object, to read from its opening brace."""

    def __init__(self, tape: Tape, needs_arguments: bool = False) -> None:
        self._tape = tape
        self._needs_arguments = needs_arguments  # to be a call
        self._name = ""
        self._early: str | None = None  # arguments that came before the name
        self._has_begun = False
        self._has_arguments = False

    def read(self) -> Reading[bool]:
        """Whether it is a call, read to its closing brace."""
        tape = self._tape
        tape.pos += 1
        while first := (yield from tape.space()):
            if first == "}":
                return self._close()
            if first != '"' or not (yield from self._member()):
                break
            last = yield from tape.space()
            if last not in (",", "}"):
                break
            tape.pos += last == ","
            if self._has_begun:
                tape.drop()
        if self._has_begun:
            tape.cut_off()
        return False

    def _member(self) -> Reading[bool]:
        """A key and its value; False if they are none."""
        tape = self._tape
        key = yield from _text(tape)
        if key is None or (yield from tape.space()) != ":":
            return False
        tape.pos += 1
        yield from tape.space()
        if key == "name" and not self._has_begun:
            self._name = (yield from _text(tape)) or ""
            if self._name and (self._early is not None or not self._needs_arguments):
                self._begin()
            return bool(self._name)
        if key not in ("arguments", "parameters") or self._has_arguments:
            return (yield from _value(tape))
        if self._name:
            self._begin()
            self._has_arguments = True
            return (yield from _arguments(tape))
        begin = tape.pos - tape.start
        if not (yield from _value(tape)):
            return False
        self._early = tape.text[tape.start + begin : tape.pos]
        return True

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._tape.call(self._name)
            if self._early is not None:
                self._has_arguments = True
                self._tape.arguments(self._early)
        self._tape.drop()

    def _close(self) -> bool:
        self._tape.pos += 1
        if not self._name or (self._needs_arguments and not self._has_begun):
            return False
        self._begin()
        if not self._has_arguments:
            self._tape.arguments("{}")
        return True


def _arguments(tape: Tape) -> Reading[bool]:
    """A call's arguments, which go out as they come."""
    tape.become(Kind.ARGUMENTS)
    is_value = yield from _value(tape)
    tape.become(Kind.HELD)
    return is_value


def _value(tape: Tape) -> Reading[bool]:
    """One JSON value, checked no further than to find its end; False if there is none."""
    first = yield from tape.peek()
    if first == '"':
        return (yield from _string(tape))
    if first not in ("{", "["):
        yield from tape.run(_SCALAR)
        return _SCALAR.fullmatch(first) is not None and first != ""
    depth = 0
    while char := (yield from tape.run(_IN_VALUE, '"{}[]')):
        if char == '"':
            if not (yield from _string(tape)):
                return False
            continue
        tape.pos += 1
        depth += 1 if char in "{[" else -1
        if depth == 0:
            return True
    return False


def _text(tape: Tape) -> Reading[str | None]:
    """A JSON string while text is held, as text; None if it is none, or has half a surrogate pair,
    which is no character."""
    if (yield from tape.peek()) != '"':
        return None
    begin = tape.pos - tape.start
    if not (yield from _string(tape)):
        return None
    try:
        text: str = json.loads(tape.text[tape.start + begin : tape.pos], strict=False)
        text.encode()
    except ValueError:
        return None
    return text


def _string(tape: Tape) -> Reading[bool]:
    """A JSON string, from its opening quote."""
    tape.pos += 1
    while char := (yield from tape.run(_IN_STRING, '"\\')):
        tape.pos += 1
        if char == '"':
            return True
        if not (yield from tape.peek()):  # a backslash, and what it stands before
            return False
        tape.pos += 1
    return False
