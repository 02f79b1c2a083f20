"""Python's literals as JSON text, while they are being written.

Owns the reading of them. Invariant: what goes out begins JSON text of the literal's value, and is
all of it when the literal is complete. JSON's true, false and null are read too.
"""

from __future__ import annotations

import json
import math
import re

from .answer_parts import Reading, Tape

MAX_DEPTH = 64  # of lists and dicts
MAX_OTHER_NUMBER_LEN = 64  # of numbers that aren't JSON's

_WORD = re.compile(r"[-+.\w]*")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBER = re.compile(r"[-+]?\.?[0-9][\w.+-]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in _WORDS.values()}
_TEXT = {quote: re.compile(rf"[^\\{quote}]*") for quote in ("'", '"')}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_ESCAPES |= {char: char for char in "\\'\""}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}  # of the code after \x, \u and \U
_HEX = frozenset("0123456789abcdefABCDEF")
_OCTAL = frozenset("01234567")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def literal(tape: Tape, depth: int = 0) -> Reading[bool]:
    """One literal, to the last argument part; False if there is none, or it is cut off. Text must
    be held."""
    first = yield from tape.peek()
    if first in _TEXT:
        return (yield from _string(tape, first))
    if first in _CLOSING:
        return depth < MAX_DEPTH and (yield from _collection(tape, first, depth + 1))
    begin = tape.pos - tape.start
    yield from tape.run(_WORD)
    value = _word(tape.text[tape.start + begin : tape.pos])
    if value is not None:
        _put(tape, value)
    return value is not None


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _put(tape: Tape, text: str) -> None:
    """What was read means this."""
    tape.drop()
    tape.arguments(text)


def _word(word: str) -> str | None:
    """A number or a name as JSON; None if it is neither."""
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    if len(word) > MAX_OTHER_NUMBER_LEN or not _NUMBER.fullmatch(word):
        return None
    for read in (lambda: int(word, 0), lambda: float(word)):
        try:
            number = read()
        except ValueError:
            continue
        return json.dumps(number) if math.isfinite(number) else None
    return None


def _collection(tape: Tape, opening: str, depth: int) -> Reading[bool]:
    """A list, tuple or dict, from its opening bracket."""
    is_dict, closing = opening == "{", _CLOSING[opening]
    tape.pos += 1
    _put(tape, "{" if is_dict else "[")
    is_first = True
    while char := (yield from tape.space()):
        if char == closing:
            tape.pos += 1
            _put(tape, "}" if is_dict else "]")
            return True
        if not is_first:
            _put(tape, ", ")
        is_first = False
        if is_dict and not (yield from _key(tape, char)):
            return False
        if not (yield from literal(tape, depth)):
            return False
        last = yield from tape.space()
        tape.pos += last == ","
        if last not in (",", closing):
            return False
    return False


def _key(tape: Tape, first: str) -> Reading[bool]:
    """A dict's key, which must be a string, and the colon."""
    if first not in _TEXT or not (yield from _string(tape, first)):
        return False
    if (yield from tape.space()) != ":":
        return False
    tape.pos += 1
    _put(tape, ": ")
    yield from tape.space()
    return True


def _string(tape: Tape, quote: str) -> Reading[bool]:
    """A string, from its opening quote, or three of them."""
    if not (yield from tape.literal(closing := quote * 3)):
        tape.pos += 1
        closing = quote
    _put(tape, '"')
    while True:
        match = _TEXT[quote].match(tape.text, tape.pos, tape.end)
        if match is not None and match.end() > tape.pos:
            tape.pos = match.end()
            _put(tape, quoted(match[0])[1:-1])
        char = yield from tape.peek()
        if not char:
            return False
        if char == "\\":
            yield from _escape(tape)
        elif (yield from tape.literal(closing)):
            _put(tape, '"')
            return True
        elif char == quote:  # one that doesn't end a string with three
            tape.pos += 1
            _put(tape, quoted(quote)[1:-1])


def _escape(tape: Tape) -> Reading[None]:
    """A backslash, and what it stands before. If it is no escape, it stands for itself."""
    tape.pos += 1
    char = yield from tape.peek()
    tape.pos += len(char)
    text = _ESCAPES.get(char)
    if char in _NUM_DIGITS:
        text = _code((yield from _digits(tape, _HEX, _NUM_DIGITS[char])), 16, _NUM_DIGITS[char])
    elif char in _OCTAL:
        text = _code(char + (yield from _digits(tape, _OCTAL, 2)), 8, 1)
    if text is None:
        text = tape.text[tape.start : tape.pos]
    is_half = text != "" and "\ud800" <= text <= "\udfff"  # of a pair; JSON writes it as such
    _put(tape, json.dumps(text, ensure_ascii=is_half)[1:-1])


def _digits(tape: Tape, allowed: frozenset[str], at_most: int) -> Reading[str]:
    digits = ""
    while len(digits) < at_most and (char := (yield from tape.peek())) in allowed:
        tape.pos += 1
        digits += char
    return digits


def _code(digits: str, base: int, at_least: int) -> str | None:
    """The character with that code."""
    if len(digits) < at_least or int(digits, base) > 0x10FFFF:
        return None
    return chr(int(digits, base))
