"""Grammars of answers that are calls of tools, in llguidance's Lark.

Owns the rules of each format: names as they are, arguments by the tools' schemas. Knows neither
llguidance nor tokenizers. Invariant: what a grammar admits, the format's parser reads as calls
whose arguments satisfy the schemas.

JSON is written with the spaces that templates write, since the model has seen its calls like that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from ..errors import InvalidRequestError
from .json_calls import HERMES_CLOSE, HERMES_OPEN, MISTRAL_ARGS, MISTRAL_MARK
from .json_schema import prepare
from .reasoning import ReasoningFormat

_SPACES = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEFINITIONS = ("$defs", "definitions")
# What can't be said of single keywords.
_OF_THE_WHOLE = (
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "patternProperties",
    "enum",
    "const",
)


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON Schema of an object
    is_strict: bool
    param: str  # tools[0].function, for errors


def read_tools(tools: Sequence[Any], name: str | None = None) -> list[Tool]:
    """The functions among the tools, as chat completions have them or as responses do; with a name
    that one. InvalidRequestError."""
    read = (_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    found = [tool for tool in read if tool is not None and name in (None, tool.name)]
    if not found:
        wanted = "a function" if name is None else f"a function with the name {name!r:.100}"
        raise InvalidRequestError(f"tools: expected {wanted} to call, got none", param="tools")
    return found


class Rules:
    """The rules of one grammar, and how it writes marks: as text, or as the special tokens that
    they are (`special`: text → id)."""

    def __init__(self, special: Mapping[str, int], tools: Sequence[Tool], parallel: bool) -> None:
        self._special = special
        self._tools = tools
        self._parallel = parallel
        self._rules = ["%llguidance {}"]

    def text(self, calls: str, reasoning: ReasoningFormat | None, is_open: bool) -> str:
        """The grammar: `calls`, after reasoning where the model reasons."""
        start = calls
        if reasoning is not None:
            thought = self._reasoning(reasoning, is_open)
            start = f"({thought} NEWLINES?){'' if is_open else '?'} ({calls})"
            self._rules.append(r"NEWLINES: /\n{1,2}/")
        return "\n".join([*self._rules, f"start: {start}", ""])

    def hermes(self, *, free: bool = False) -> str:
        call = f'"\\n" {self._object("arguments")} "\\n" {self._mark(HERMES_CLOSE)}'
        return self._marked(HERMES_OPEN, call, "\n", free)

    def llama3_json(self, *, free: bool = False) -> str:
        return self._bare(self._several(self._object("parameters"), "; "), "{[", free)

    def mistral(self, *, free: bool = False) -> str:
        calls = self._several(self._object("arguments"), ", ")
        mark, text = self._lead(MISTRAL_MARK, free)
        return f'{text}{mark} "[" {calls} "]"'

    def mistral_named(self, *, free: bool = False) -> str:
        before = self._mark(MISTRAL_ARGS)
        choices = (f"{_literal(t.name)} {before} {_json(t)}" for t in self._tools)
        return self._marked(MISTRAL_MARK, self._rule("call", " | ".join(choices)), "", free)

    def pythonic(self, *, free: bool = False) -> str:
        choices = []
        for index, tool in enumerate(self._tools):
            keywords = self._rule(f"keywords{index}", self._keywords(tool, index))
            choices.append(f'{_literal(tool.name + "(")} {keywords} ")"')
        calls = self._several(self._rule("call", " | ".join(choices)), ", ")
        return self._bare(f'"[" {calls} "]"', "[", free)

    def _object(self, key: str) -> str:
        heads = (f'{{"name": {json.dumps(t.name)}, "{key}": ' for t in self._tools)
        choices = (
            f'{_literal(head)} {_json(tool)} "}}"'
            for head, tool in zip(heads, self._tools, strict=True)
        )
        return self._rule("object", " | ".join(choices))

    def _keywords(self, tool: Tool, index: int) -> str:
        """The properties in their order, those that aren't required left out or not.

        `first` rules are for what follows no other, `next` rules for what follows one.
        """
        schema = tool.parameters
        wrong = next((key for key in _OF_THE_WHOLE if key in schema), None)
        properties = schema.get("properties", {})
        wrong = wrong or next((key for key in properties if not _KEYWORD.fullmatch(key)), None)
        if wrong is not None:
            _refuse(
                tool, "properties with names that can be keywords, in this model's format", wrong
            )
        if not properties:
            return self._any_keywords(tool, index)
        required = schema.get("required", ())
        first, following = '""', '""'
        for place, (key, value) in reversed(list(enumerate(properties.items()))):
            one = f'"{key}=" {_json(tool, _within(schema, value))}'
            is_required = key in required
            taken = f"{one} {following}"
            first = self._rule(
                f"first{index}_{place}", taken + ("" if is_required else f" | {first}")
            )
            following = self._rule(
                f"next{index}_{place}", f'", " {taken}' + ("" if is_required else f" | {following}")
            )
        return first

    def _any_keywords(self, tool: Tool, index: int) -> str:
        schema = tool.parameters
        if schema.get("additionalProperties") is False or "properties" in schema:
            return '""'
        self._rules.append(f"KEYWORD{index}: /{_KEYWORD.pattern}/")
        one = self._rule(f"any{index}", f'KEYWORD{index} "=" {_json(tool, {})}')
        return f'({one} (", " {one})*)?'

    def _several(self, one: str, between: str, first: str = "") -> str:
        """One or more of these; `first` is the first one, if it is another."""
        more = f"{_literal(between)} {one}" if between else one
        return f"{first or one} ({more})*" if self._parallel else first or one

    def _marked(self, mark: str, call: str, between: str, free: bool) -> str:
        """Calls that each follow a mark."""
        lead, text = self._lead(mark, free)
        return text + self._several(f"{self._mark(mark)} {call}", between, f"{lead} {call}")

    def _lead(self, mark: str, free: bool) -> tuple[str, str]:
        """What the first call begins with: the mark; if the answer is `free`, after text, and the
        other choice is text alone. A mark that is text ends the text where it is complete."""
        if not free:
            return self._mark(mark), ""
        self._rules.append("FREE: /(?s:.+)/")
        if mark in self._special:
            return f"FREE? {self._mark(mark)}", "FREE? | "
        self._rules.append(f"lead[suffix={_literal(mark)}]: /(?s:.*)/")
        return "lead", "FREE? | "

    def _bare(self, calls: str, firsts: str, free: bool) -> str:
        """Calls that are told from text by their first character only."""
        if not free:
            return calls
        self._rules.append(f"FREE: /\\s*([^\\s{re.escape(firsts)}](?s:.*))?/")
        return f"FREE | {calls}"

    def _reasoning(self, reasoning: ReasoningFormat, is_open: bool) -> str:
        closing = reasoning.closing
        if closing in self._special:
            thought = self._rule("thought", f"/(?s:.*)/ {self._mark(closing)}")
        else:
            self._rules.append(f"thought[suffix={_literal(closing)}]: /(?s:.*)/")
            thought = "thought"
        return thought if is_open else f"{self._mark(reasoning.opening)} {thought}"

    def _mark(self, mark: str) -> str:
        token_id = self._special.get(mark)
        return _literal(mark) if token_id is None else f"<[{token_id}]>"

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name


def _tool(tool: Any, param: str) -> Tool | None:
    """None for what is no function, such as OpenAI's own tools."""
    match tool:
        case {"type": "function", "function": Mapping() as function}:
            param += ".function"
        case {"type": "function", "name": str()}:
            function = tool
        case {"name": str()} if "type" not in tool:
            function = tool
        case _:
            return None
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(
            f"{param}.name: expected a name, got {name!r:.100}", param=f"{param}.name"
        )
    found = Tool(name, {}, function.get("strict") is True, param)
    if parameters is None:
        parameters = {"properties": {}}  # it takes none
    if not isinstance(parameters, Mapping):
        _refuse(found, "a JSON Schema", type(parameters).__name__)
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        _refuse(found, 'the schema of an object ("type": "object")', json.dumps(kind)[:100])
    try:
        parameters = msgspec.json.decode(msgspec.json.encode(parameters))  # the prompt's stay
        prepare(parameters)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else "it is nested too deeply"
        raise InvalidRequestError(
            f"{param}.parameters: {reason}", param=f"{param}.parameters"
        ) from None
    return found._replace(parameters={**parameters, "type": "object"})


def _within(schema: Mapping[str, Any], value: Any) -> Any:
    """A part of a schema as one of its own, with the definitions that it may refer to."""
    if not isinstance(value, Mapping):
        return value
    return {key: schema[key] for key in _DEFINITIONS if key in schema} | dict(value)


def _json(tool: Tool, schema: Any = None) -> str:
    schema = tool.parameters if schema is None else schema
    if not isinstance(schema, Mapping):
        schema = {} if schema else {"not": {}}
    options = {"x-guidance": _SPACES | ({} if tool.is_strict else {"lenient": True})}
    return f"%json {json.dumps({**schema, **options}, ensure_ascii=False)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(tool: Tool, expected: str, got: str) -> NoReturn:
    param = f"{tool.param}.parameters"
    raise InvalidRequestError(f"{param}: expected {expected}, got {got}", param=param)
