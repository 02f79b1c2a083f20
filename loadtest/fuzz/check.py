"""What an answer has to be, whatever was asked.

Owns the shapes: OpenAI's error object, JSON without NaN, a stream of events that ends. Knows no
transport. Invariant: what isn't so is an Offence that says what was expected.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from .http import Answer, Offence

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
_ERROR_FIELDS = {"message", "type", "param", "code"}


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def strict_json(data: bytes | str, what: str) -> Any:
    try:
        text = data.decode() if isinstance(data, bytes) else data
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise Offence(f"{what}: expected strict JSON, got {data[:120]!r}: {error}") from None


def check_error(error: Any, status: int) -> None:
    """OpenAI's error object."""
    if not isinstance(error, dict) or not _ERROR_FIELDS <= set(error):
        raise Offence(f"{status}: expected OpenAI's error object, got {str(error)[:200]}")
    if not isinstance(error["message"], str) or not error["message"]:
        raise Offence(f"{status}: expected an error with a message, got {str(error)[:200]}")
    for name in ("type", "param", "code"):
        if not isinstance(error[name], str | None):
            raise Offence(f"{status}: error.{name}: expected text or null, got {error[name]!r}")
    if status >= 500:
        raise Offence(f"{status}: expected no failure of the server, got {str(error)[:300]}")


def check_answer(answer: Answer, method: str) -> None:
    if answer.status >= 500 and method == "HEAD":
        raise Offence(f"{answer.status}: expected no failure of the server")
    if method == "HEAD" or answer.status in (101, 204, 304):
        return
    if answer.status >= 300:
        if answer.content_type != "application/json":
            raise Offence(
                f"{answer.status}: expected an error in JSON, got {answer.content_type or 'no'} "
                f"content type: {answer.body[:100]!r}"
            )
        body = strict_json(answer.body, str(answer.status))
        check_error(body.get("error") if isinstance(body, dict) else body, answer.status)
    elif answer.content_type == "application/json":
        strict_json(answer.body, str(answer.status))
    elif answer.content_type == "text/event-stream":
        _check_stream(answer.body)


def _check_stream(body: bytes) -> None:
    """Each event is JSON, and the last one an end."""
    if body and not body.endswith(b"\n\n"):
        raise Offence(f"a stream ends inside an event: {body[-100:]!r}")
    last, is_named = b"", False
    for event in body.split(b"\n\n")[:-1]:
        lines = [line for line in event.split(b"\n") if not line.startswith(b":")]
        data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        is_named = is_named or any(line.startswith(b"event:") for line in lines)
        for line in lines:
            if line.partition(b":")[0] not in (b"data", b"event", b"id", b"retry"):
                raise Offence(f"expected a line of an event, got {line[:80]!r}")
        if data:
            last = b"\n".join(data)
            _check_event(last)
    if last == b"[DONE]" or b'"error"' in last:
        return
    end = strict_json(last, "the last event").get("type") if last else None
    if not is_named or end not in ENDS:
        raise Offence(f"expected a stream that ends in [DONE] or an end, got {last[:200]!r}")


def _check_event(data: bytes) -> None:
    if data == b"[DONE]":
        return
    event = strict_json(data, "an event")
    if not isinstance(event, dict):
        raise Offence(f"expected an object in an event, got {data[:80]!r}")
    if set(event) == {"error"}:
        check_error(event["error"], 400)
        if event["error"]["type"] == "server_error":
            check_error(event["error"], 500)
    elif "type" in event:
        check_typed(event)


def check_typed(event: dict[str, Any]) -> None:
    """An event of the Responses API."""
    kind = event["type"]
    if not isinstance(kind, str):
        raise Offence(f"expected an event with a type, got {str(event)[:200]}")
    if kind == "error":
        status = event.get("status", 400)
        if type(status) is not int:
            raise Offence(f"expected an error event with a status, got {str(event)[:200]}")
        check_error(event.get("error", event), status)
    elif kind == "response.failed":
        raise Offence(f"expected no failure of the server, got {str(event)[:300]}")
