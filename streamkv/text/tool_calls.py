"""How a model calls tools: its format, and what parses an answer into content, reasoning and calls.

Owns the choice of the format, by the chat template. Knows no requests. Invariant: a format's
parser reads what its grammar admits.

A model whose template doesn't know tools is told of them in Hermes' format (see `untaught_tools`).
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import json_calls
from .answer_parts import (
    AnswerParser,
    ContentPart,
    Part,
    Reading,
    ReasoningPart,
    Tape,
    ToolCallPart,
    openai_id,
)
from .chat_template import ChatTemplate
from .pythonic_calls import PYTHON_START, pythonic
from .reasoning import ReasoningFormat
from .tool_grammar import Rules, read_tools

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = [
    "AnswerParser",
    "ContentPart",
    "Part",
    "ReasoningPart",
    "ToolCallPart",
    "ToolFormat",
    "answer_parser",
    "find_format",
]

_ALPHANUMERIC = string.ascii_letters + string.digits
# Other names of the same formats, as vLLM has them.
_ALIASES = {"llama4_json": "llama3_json", "llama4_pythonic": "pythonic"}


def mistral_id() -> str:
    """An id for a call, as Mistral's templates want them: 9 letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class _Kind(NamedTuple):
    step: Callable[[Tape], Reading[None]]
    rules: Callable[..., str]  # of Rules: its calls; `free`: or text, perhaps before them
    marks: tuple[str, ...]
    new_id: Callable[[], str] = openai_id


_KINDS: Mapping[str, _Kind] = {
    "hermes": _Kind(
        json_calls.hermes, Rules.hermes, (json_calls.HERMES_OPEN, json_calls.HERMES_CLOSE)
    ),
    "llama3_json": _Kind(json_calls.llama3_json, Rules.llama3_json, (json_calls.LLAMA_MARK,)),
    "pythonic": _Kind(pythonic, Rules.pythonic, (PYTHON_START,)),
    "mistral": _Kind(
        json_calls.mistral, Rules.mistral, (json_calls.MISTRAL_MARK,), new_id=mistral_id
    ),
}


class ToolFormat(NamedTuple):
    """One model's way to write calls."""

    name: str  # "hermes", "llama3_json", "pythonic" or "mistral"
    special: Mapping[str, int] = {}  # the vocabulary's special tokens: text → id
    reasoning: ReasoningFormat | None = None  # what may come before the calls
    names_first: bool = False  # Mistral's name[ARGS]{…}

    @property
    def shows_special_tokens(self) -> bool:
        """Whether skip_special_tokens must be off for its marks to be seen."""
        marks = _KINDS[self.name].marks
        return any(mark in self.special for mark in marks)

    @property
    def new_id(self) -> Callable[[], str]:
        """What makes ids of calls."""
        return _KINDS[self.name].new_id

    @property
    def step(self) -> Callable[[Tape], Reading[None]]:
        """What reads calls, as one of an answer's steps."""
        return _KINDS[self.name].step

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
        """Reads an answer without reasoning."""
        return AnswerParser([self.step], new_id or self.new_id)

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        required: bool = True,
        name: str | None = None,
        parallel: bool = True,
        reasoning: bool = True,
        prompt_ends_in_reasoning: bool = False,
    ) -> str:
        """The answer is one or more calls of these tools, with `name` one call of that tool, after
        `reasoning` if there is any. If none is `required`, it may be text as well, or begin with
        text. Lark for llguidance. InvalidRequestError for tools that can't be written so.
        """
        rules = Rules(self.special, read_tools(tools, name), parallel and name is None)
        make = Rules.mistral_named if self.names_first else _KINDS[self.name].rules
        calls = make(rules, free=not required)
        return rules.text(calls, self.reasoning if reasoning else None, prompt_ends_in_reasoning)


def find_format(
    template: ChatTemplate | None,
    special: Mapping[str, int],
    reasoning: ReasoningFormat | None,
    *,
    name: str | None = None,
) -> ToolFormat | None:
    """The format with that `name`, or the one that the chat template's marks tell of; None for
    another one, and without a template."""
    if template is None:
        return None
    if name is None:
        name = _by_marks(template.source) if template.knows_tools else "hermes"
    if name is None:
        return None
    name = _ALIASES.get(name, name)
    names_first = name == "mistral" and json_calls.MISTRAL_ARGS in template.source
    return ToolFormat(name, special, reasoning, names_first)


def _by_marks(template: str) -> str | None:
    if json_calls.MISTRAL_MARK in template:
        return "mistral"
    if re.search(r"\[func(tion)?_?(name)?1?\(", template) or PYTHON_START in template:
        return "pythonic"
    if json_calls.HERMES_OPEN in template:
        # Others write XML between the same marks.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if json_calls.LLAMA_MARK in template or re.search(r'"parameters\\?": ', template):
        return "llama3_json"
    return None


def answer_parser(
    tokenizer: Tokenizer,
    *,
    tools: bool,
    reasoning: bool,
    prompt_ends_in_reasoning: bool = False,
    new_id: Callable[[], str] | None = None,
) -> AnswerParser | None:
    """What reads an answer: reasoning first, then content and calls; each if it is wanted and the
    model has it. None if nothing is left to read: all is content."""
    steps: list[Callable[[Tape], Reading[None]]] = []
    tool_format = tokenizer.tool_format if tools else None
    if reasoning and (marks := tokenizer.reasoning_format) is not None:
        steps.append(marks.step(prompt_ends_in_reasoning))
    if tool_format is not None:
        steps.append(tool_format.step)
        new_id = new_id or tool_format.new_id
    return AnswerParser(steps, new_id or openai_id) if steps else None
