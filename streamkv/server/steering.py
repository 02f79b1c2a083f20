"""Steering: input for a response that runs, from its arrival to the response that it goes into.

Owns `response.steer` as the official `openai` package types it (`response_steer_*.py`): what may be
sent, the events that answer it, and what waits for which response. Knows no engine and no socket.
Invariants: each accepted input ends up in exactly one successor, or is returned in one
`response.steer.failed`, or goes with its connection; what waits is bounded in number.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ..errors import InvalidRequestError
from .answer import Event
from .response_events import Numbered, Numbers
from .response_items import InputItem, check_item
from .response_object import FunctionCall
from .wire import decode_body

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


class SteerCommand(Struct, frozen=True, kw_only=True):
    """`response.steer` as it is sent."""

    previous_response_id: str
    input: Raw


class SteerError(InvalidRequestError):
    """An input that can't be taken; `code` is one of SteerErrorCode."""

    def __init__(self, code: SteerErrorCode, message: str) -> None:
        super().__init__(message, code=code)


class Steer(Struct, kw_only=True):
    """An input that was accepted."""

    id: str
    response_id: str
    input: Raw  # as it was sent
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

_NAMES = frozenset({"type", "previous_response_id", "input"})
_PARTS = ("input_text",)
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
_command_decoder = msgspec.json.Decoder(SteerCommand)
_names_decoder = msgspec.json.Decoder(dict[str, Raw])
_input_decoder = msgspec.json.Decoder(str | list[InputItem])


def read_command(data: str) -> SteerCommand:
    """The event. InvalidRequestError where there is nothing to give back."""
    command = decode_body(data, _command_decoder)
    given = bytes(command.input)
    if given[:1] not in (b'"', b"["):
        raise InvalidRequestError(
            "input: expected text or a list of messages of the user", param="input"
        )
    if b"\n" in given or b"\r" in given:  # between values; an event is one line
        given = given.translate(_ONE_LINE)
    return SteerCommand(previous_response_id=command.previous_response_id, input=Raw(given))


def read_items(data: str, command: SteerCommand) -> list[InputItem]:
    """What is to be said to the model. SteerError."""
    try:
        others = decode_body(data, _names_decoder).keys() - _NAMES
        if others:
            raise InvalidRequestError(
                f"{min(others):.300}: expected only {', '.join(sorted(_NAMES))}"
            )
        given = decode_body(bytes(command.input), _input_decoder)
        items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
        if not items or items[0].content == "":
            raise InvalidRequestError("input: expected text, or at least one message, got none")
        for index, item in enumerate(items):
            _check(item, f"input[{index}]")
    except InvalidRequestError as error:
        raise SteerError("invalid_input", error.message) from None
    return items


def _check(item: InputItem, param: str) -> None:
    if item.kind != "message" or item.role != "user":
        raise InvalidRequestError(f"{param}: expected a message of the user, got another item")
    check_item(item, param)
    if not isinstance(item.content, str):
        for index, part in enumerate(item.content or ()):
            if part.type not in _PARTS:
                raise InvalidRequestError(
                    f"{param}.content[{index}].type: expected 'input_text', got {part.type!r:.100}"
                )


def new_steer(command: SteerCommand, items: Sequence[InputItem]) -> Steer:
    return Steer(
        id=f"steer_{uuid.uuid4().hex}",
        response_id=command.previous_response_id,
        input=command.input,
        items=items,
    )
