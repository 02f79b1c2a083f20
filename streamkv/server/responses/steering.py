"""Steering: input for a response that runs, from its arrival to the response that it goes into.

Owns `response.steer` as the official `openai` package types it (`response_steer_*.py`): what may be
sent, the events that answer it, and what waits for which response. Knows no engine and no socket.
Invariants: each accepted input ends up in exactly one successor, or is returned in one
`response.steer.failed`, or goes with its connection; what waits is bounded in number.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ...errors import InvalidRequestError
from ..answer import Event
from ..request_fields import Name
from ..wire import decode_body, encode
from .events import Numbered, Numbers
from .input import Input
from .items import ContentPart, InputItem, check_item
from .object import FunctionCall

MAX_PENDING_STEERS = 32  # for one response

SteerErrorCode = Literal[
    "response_not_found",
    "invalid_input",
    "too_many_pending_steers",
    "response_already_completed",
    "response_not_active",
    "steering_not_supported",
    "successor_creation_failed",
]


class SteerCommand(NamedTuple):
    """A `response.steer`, whose input can be taken."""

    previous_response_id: str
    input: Raw  # as it is given back
    items: Sequence[InputItem]


class SteerError(InvalidRequestError):
    """An input that can't be taken; `code` is one of SteerErrorCode."""

    def __init__(self, code: SteerErrorCode, message: str) -> None:
        super().__init__(message, code=code)


class Steer(Struct, kw_only=True):
    """An input that was accepted."""

    id: str
    response_id: str
    input: Raw  # as it is given back
    items: Sequence[InputItem]
    is_pending: bool = False  # the client has been told that it waits


# --- events -----------------------------------------------------------------------------------


class SteerBody(Struct, frozen=True):
    id: str
    previous_response_id: str


class FailedSteerBody(Struct, frozen=True, kw_only=True):
    input: Raw
    previous_response_id: str
    id: str | UnsetType = UNSET


class SteerErrorBody(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    type: Literal["invalid_request_error"] = "invalid_request_error"


class RequiredOutput(Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """A stub for the client to fill."""

    call_id: str
    name: str


class SteerAccepted(Numbered, frozen=True, tag="response.steer.accepted"):
    steer: SteerBody


class SteerPending(Numbered, frozen=True, kw_only=True, tag="response.steer.pending"):
    steer: SteerBody
    required_input: list[RequiredOutput]
    reason: Literal["waiting_for_required_input"] = "waiting_for_required_input"


class SteerFailed(Numbered, frozen=True, tag="response.steer.failed"):
    steer: FailedSteerBody
    error: SteerErrorBody


def accepted_event(steer: Steer, numbers: Numbers) -> Event:
    return numbers.event(SteerAccepted, steer=SteerBody(steer.id, steer.response_id))


def pending_event(steer: Steer, calls: Sequence[FunctionCall], numbers: Numbers) -> Event:
    required = [RequiredOutput(call.call_id, call.name) for call in calls]
    body = SteerBody(steer.id, steer.response_id)
    return numbers.event(SteerPending, steer=body, required_input=required)


def failed_event(steer: Steer | SteerCommand, error: SteerError, numbers: Numbers) -> Event:
    """Gives the input back."""
    if isinstance(steer, Steer):
        body = FailedSteerBody(
            id=steer.id, input=steer.input, previous_response_id=steer.response_id
        )
    else:
        body = FailedSteerBody(input=steer.input, previous_response_id=steer.previous_response_id)
    what = SteerErrorBody(code=error.code or "", message=error.message)
    return numbers.event(SteerFailed, steer=body, error=what)


# --- what is sent -----------------------------------------------------------------------------

_PARTS = ("input_text",)


class _Sent(Struct, frozen=True, kw_only=True):
    """`response.steer` as it is sent."""

    type: str
    previous_response_id: Name
    input: Input


_decoder = msgspec.json.Decoder(_Sent)


def read_command(data: str) -> SteerCommand:
    """The event. InvalidRequestError for what is no input: the official types know no event that
    would give it back."""
    sent = decode_body(data, _decoder)
    given = sent.input
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    if not items or items[0].content == "":
        raise InvalidRequestError(
            "input: expected text, or at least one message, got none", param="input"
        )
    for index, item in enumerate(items):
        _check(item, f"input[{index}]")
    shown = given if isinstance(given, str) else [_message(item) for item in items]
    return SteerCommand(sent.previous_response_id, Raw(encode(shown)), items)


def _check(item: InputItem, param: str) -> None:
    if item.kind != "message" or item.role != "user":
        raise InvalidRequestError(
            f"{param}: expected a message of the user, got another item", param=param
        )
    check_item(item, param)
    if not isinstance(item.content, str):
        for index, part in enumerate(item.content or ()):
            if part.type not in _PARTS:
                raise InvalidRequestError(
                    f"{param}.content[{index}].type: expected 'input_text', got {part.type!r:.100}",
                    param=f"{param}.content[{index}].type",
                )


class _Message(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """As the official types know one: they ask for a `type`."""

    role: str
    content: str | list[ContentPart]


def _message(item: InputItem) -> _Message:
    return _Message(role="user", content=item.content or "")


def new_steer(command: SteerCommand) -> Steer:
    return Steer(
        id=f"steer_{uuid.uuid4().hex}",
        response_id=command.previous_response_id,
        input=command.input,
        items=command.items,
    )
