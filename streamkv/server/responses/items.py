"""Items of the Responses API's input: as clients send them, as templates read them, as lists show
them.

Owns what an item may be and its meaning as messages of a conversation. Knows no request, store or
transport. Invariants: what can't be handed to a template is an InvalidRequestError that names the
item's field (`input[2].content[0].type`); what follows from items is the same each time.

An assistant's turn is one message: its reasoning, its text and its calls are items that follow each
other, and belong together in a template. A call whose arguments are no JSON object, since the model
did not end it well, is shown to it without arguments: the conversation goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sys import getsizeof
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ...errors import InvalidRequestError
from ...text.chat_messages import read_arguments
from ..request_fields import Name
from .object import (
    CALL,
    CALL_OUTPUT,
    MESSAGE,
    REASONING,
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    item_id_of,
)

TemplateMessage = dict[str, Any]
"""One message as chat templates read it (see `text.chat_messages`)."""

MAX_ARGUMENTS_LEN = 1 << 18  # of a call: they are read as JSON
_INPUT_TEXT = ("input_text", "output_text", "text")
_OVERHEAD_BYTES = 256  # of an item's Python objects
_PART_BYTES = 120


class ContentPart(Struct, frozen=True):
    """Of a message, a function's output, or reasoning."""

    type: Name
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True, kw_only=True):
    """An item as clients send it. `type` may be missing of a message, and of a reference."""

    type: Name | None = None
    id: Name | None = None
    status: Name | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Annotated[str, Meta(max_length=MAX_ARGUMENTS_LEN)] | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None

    @property
    def kind(self) -> str:
        if self.type is None and self.role is None and self.content is None and self.id is not None:
            return "item_reference"
        return "message" if self.type is None else self.type


Item = InputItem | OutputItem


def check_item(item: InputItem, param: str) -> None:
    """InvalidRequestError unless the item says something that this server can read."""
    match item.kind:
        case "message":
            _require(item, param, "role", "content")
            _text(item.content, f"{param}.content")
        case "function_call":
            _require(item, param, "call_id", "name", "arguments")
        case "function_call_output":
            _require(item, param, "call_id", "output")
            _text(item.output, f"{param}.output")
        case "reasoning":
            for name in ("content", "summary"):
                _text(getattr(item, name), f"{param}.{name}", kinds=_REASONING_TEXT)
        case "item_reference":
            _require(item, param, "id")
        case other:
            raise InvalidRequestError(
                f"{param}.type: expected message, function_call, function_call_output, reasoning "
                f"or item_reference, got {other!r:.100}; this server knows no other items",
                param=f"{param}.type",
                code="unsupported",
            )


_REASONING_TEXT = ("reasoning_text", "summary_text", "text")


def _require(item: InputItem, param: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise InvalidRequestError(
                f"{param}.{name}: required field is missing", param=f"{param}.{name}"
            )


def _text(
    content: str | Sequence[ContentPart] | None, param: str, kinds: Sequence[str] = _INPUT_TEXT
) -> str:
    """All its text: parts are joined by newlines, as in chat messages."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, f"{param}[{i}]", kinds) for i, part in enumerate(content))


def _part_text(part: ContentPart, param: str, kinds: Sequence[str]) -> str:
    name, text = "text", part.text
    if part.type == "refusal" and kinds is _INPUT_TEXT:
        name, text = "refusal", part.refusal
    elif part.type not in kinds:
        raise InvalidRequestError(
            f"{param}.type: expected {' or '.join(map(repr, kinds[:2]))}, got "
            f"{part.type!r:.100}; this model reads text only",
            param=f"{param}.type",
            code="unsupported",
        )
    if text is None:
        raise InvalidRequestError(
            f"{param}.{name}: required field is missing", param=f"{param}.{name}"
        )
    return text


# --- as messages ------------------------------------------------------------------------------


class _Conversation:
    """Messages, as items add to them."""

    def __init__(self) -> None:
        self.messages: list[TemplateMessage] = []
        self._turn: TemplateMessage = {}  # the assistant's last, while items may belong to it
        self._after_calls: int | None = None  # where the next output of a call goes

    def add(self, item: Any) -> None:
        kind = item.kind if isinstance(item, InputItem) else _KINDS[type(item)]
        if kind == "function_call_output":
            self._add_output(_tool_message(item))
        elif kind == "message" and item.role != "assistant":
            self._turn = {}
            self.messages.append({"role": item.role, "content": _message_text(item)})
        elif kind != "reasoning" or _reasoning(item):
            turn = self._turn
            if not turn or (kind != "function_call" and "content" in turn):
                turn = self._turn = {"role": "assistant"}
                self.messages.append(turn)
                self._after_calls = None
            _add_to_turn(turn, item, kind)
            if kind == "function_call":
                self._after_calls = len(self.messages)

    def _add_output(self, message: TemplateMessage) -> None:
        """It follows its call, whatever was said meanwhile."""
        if self._after_calls is None:
            self.messages.append(message)
        else:
            self.messages.insert(self._after_calls, message)
            self._after_calls += 1
        self._turn = {}


def messages_of(items: Iterable[Item]) -> list[TemplateMessage]:
    """The conversation as a template reads it. The items were checked."""
    conversation = _Conversation()
    for item in items:
        conversation.add(item)
    for message in conversation.messages:
        message.setdefault("content", "")
    return conversation.messages


_KINDS: dict[type, str] = {
    OutputMessage: "message",
    ReasoningItem: "reasoning",
    FunctionCall: "function_call",
}


def _add_to_turn(turn: TemplateMessage, item: Any, kind: str) -> None:
    if kind == "reasoning":
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(item)
    elif kind == "message":
        turn["content"] = _message_text(item)
    else:
        turn.setdefault("content", "")
        turn.setdefault("tool_calls", []).append(_tool_call(item))


def _reasoning(item: Any) -> str:
    if isinstance(item, ReasoningItem):
        return "".join(part.text for part in item.content)
    return _text(item.content or item.summary, "", kinds=_REASONING_TEXT)


def _message_text(item: Any) -> str:
    if isinstance(item, OutputMessage):
        return "".join(part.text for part in item.content)
    return _text(item.content, "")


def _tool_call(item: Any) -> dict[str, Any]:
    function = {"name": item.name, "arguments": read_arguments(item.arguments)}
    return {"id": item.call_id, "type": "function", "function": function}


def _tool_message(item: Any) -> TemplateMessage:
    message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, "")}
    return message if item.name is None else message | {"name": item.name}


# --- as a list shows them ---------------------------------------------------------------------


class InputText(Struct, frozen=True, tag="input_text"):
    text: str


class MessageBody(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: Literal["completed"] = "completed"
    role: str
    content: list[InputText]


class FunctionCallOutput(Struct, frozen=True, kw_only=True, tag="function_call_output"):
    id: str
    call_id: str | None
    output: str | list[InputText]
    name: str | None | UnsetType = UNSET
    status: Literal["completed"] = "completed"


ItemBody = MessageBody | FunctionCallOutput | OutputItem


def item_body(item: Item, item_id: str) -> ItemBody:
    """The item as OpenAI's `ResponseItem`."""
    if not isinstance(item, InputItem):
        return item
    match item.kind:
        case "function_call":
            return FunctionCall(
                id=item_id,
                call_id=item.call_id or "",
                name=item.name or "",
                arguments=item.arguments or "",
                status="completed",
            )
        case "function_call_output":
            name = UNSET if item.name is None else item.name
            output = item.output if isinstance(item.output, str) else _input_texts(item.output)
            return FunctionCallOutput(id=item_id, call_id=item.call_id, output=output, name=name)
        case "reasoning":
            content = _text(item.content, "", kinds=_REASONING_TEXT)
            parts = (ReasoningText(text=content),) if content else ()
            return ReasoningItem(id=item_id, content=parts, status="completed")
    if item.role == "assistant":
        texts = tuple(OutputText(text=part.text) for part in _input_texts(item.content))
        return OutputMessage(id=item_id, status="completed", content=texts)
    return MessageBody(id=item_id, role=item.role or "user", content=_input_texts(item.content))


def _input_texts(content: str | Sequence[ContentPart] | None) -> list[InputText]:
    if content is None or isinstance(content, str):
        return [InputText(content or "")]
    return [InputText(part.text or part.refusal or "") for part in content]


_ID_KINDS = {"function_call": CALL, "function_call_output": CALL_OUTPUT, "reasoning": REASONING}


def item_id(item: Item, response_id: str, index: int) -> str:
    """Its own id, or the one it has as this item of the response's input."""
    if not isinstance(item, InputItem) or item.id is not None:
        return item.id or ""
    return item_id_of(_ID_KINDS.get(item.kind, MESSAGE), response_id, f"in{index}")


def item_bytes(item: Item) -> int:
    """About what it takes in memory."""
    if isinstance(item, OutputMessage):
        return (
            sum(map(getsizeof, (p.text for p in item.content)))
            + _OVERHEAD_BYTES
            + sum(len(part.logprobs) for part in item.content)
        )
    if isinstance(item, ReasoningItem):
        return _OVERHEAD_BYTES + sum(getsizeof(part.text) for part in item.content)
    if isinstance(item, FunctionCall):
        return _OVERHEAD_BYTES + getsizeof(item.arguments)
    total = _OVERHEAD_BYTES + sum(
        getsizeof(text) for text in (item.id, item.name, item.call_id, item.arguments)
    )
    for content in (item.content, item.output, item.summary):
        if content is None or isinstance(content, str):
            total += getsizeof(content)
        else:
            total += sum(_PART_BYTES + getsizeof(p.text) + getsizeof(p.refusal) for p in content)
    return total
