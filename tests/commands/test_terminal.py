"""What a model's text and a user's lines may do to a terminal, and to a pipe."""

from __future__ import annotations

import io

import pytest

from streamkv.commands.terminal import Terminal


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_control_characters_of_an_answer_reach_a_pipe_but_no_terminal():
    text = "a\x1b]0;title\x07b\tc\x9b2Jd\r\ne"
    screen, pipe = Screen(), io.StringIO()
    Terminal(Screen(), screen, Screen()).write(text)
    Terminal(io.StringIO(), pipe, io.StringIO()).write(text)
    assert screen.getvalue() == "a]0;titleb\tc2Jd\ne"
    assert pipe.getvalue() == text


def test_a_notice_begins_a_line_and_has_colour_on_terminals_that_want_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen, errors, file = Screen(), Screen(), io.StringIO()
    terminal = Terminal(Screen(), screen, errors)
    terminal.write("half a line")
    terminal.notice("one")
    assert screen.getvalue() == "half a line\n"
    assert errors.getvalue() == "\033[2mone\033[0m\n"
    Terminal(Screen(), screen, file).notice("two")
    monkeypatch.setenv("NO_COLOR", "1")
    Terminal(Screen(), screen, errors).notice("three")
    assert file.getvalue() == "two\n"
    assert errors.getvalue().endswith("\nthree\n")


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("one\ntwo", ["one", "two"]),
        ("\n two \n", ["", " two "]),
        ('"""a\n\n b"""\nc\n', ["a\n\n b", "c"]),
        ('"""\na\n"""\n', ["\na\n"]),
        ('"""a"""\n', ["a"]),
        ('"""', [""]),
        ('"""cut\noff', ["cut\noff"]),
    ],
)
def test_a_message_is_a_line_or_what_stands_between_triple_quotes(typed, messages):
    terminal = Terminal(io.StringIO(typed), io.StringIO(), io.StringIO())
    assert list(iter(lambda: terminal.read("> "), None)) == messages
