"""Cases over WebSockets: events with broken fields, frames that break the protocol, leaving.

Owns how they are made; knows nothing of how they are sent and judged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from .conversation import LANE
from .fields import EVENT, RESPONSES, Endpoint, body_of
from .frames import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    fragments,
    frame,
    upgrade,
)
from .http import Target
from .http_cases import own_id
from .values import damaged, dump, strange

_CREATE = Endpoint("", EVENT, {"type": "response.create", "input": "hi"}, "max_output_tokens")
_TYPES = (
    *("response.create", "response.cancel", "response.steer", "response.resume", "response.pause"),
    *("response.grant", "response.ack", "response.input", "session.update", "ping", "", "error"),
    *("response.created", "response.delete", "conversation.item.create", "input_text.append"),
)


class Talk(NamedTuple):
    """Frames on a connection that many share: each is answered by events, and it stays open."""

    data: bytes

    @property
    def shown(self) -> str:
        return f"WebSocket frames {self.data[:2500]!r}"


class Broken(NamedTuple):
    """Frames on a connection of their own, after which the server has to close it."""

    data: bytes

    @property
    def shown(self) -> str:
        return f"WebSocket frames that break the protocol {self.data[:1500]!r}"


class Departure(NamedTuple):
    """A client that goes after so many events."""

    data: bytes
    num_asked: int  # responses; it goes at the latest when so many have ended
    num_events: int
    hard: bool

    @property
    def shown(self) -> str:
        how = "reset" if self.hard else "closed"
        return f"WebSocket frames {self.data[:1500]!r}, {how} after {self.num_events} events"


class Handshake(NamedTuple):
    """A handshake, perhaps no good one; it is answered or hung up on, and left."""

    data: bytes

    @property
    def shown(self) -> str:
        return f"WebSocket handshake {self.data[:1500]!r}"


def _event(rng: random.Random, request_id: str) -> bytes:
    """One event as JSON, of any type, with any fields."""
    kind = rng.choices(_TYPES, (20, 4, 5, 4, *[1] * (len(_TYPES) - 4)))[0]
    if kind == "response.create":
        event = body_of(rng, _CREATE, request_id=request_id)
        if rng.random() < 0.8:
            del event["stream"]
    else:
        event = _other_event(rng, kind, request_id)
    data = dump(event, twice=rng.choice(sorted(event)) if rng.random() < 0.05 else "")
    return damaged(rng, data) if rng.random() < 0.15 else data


def _other_event(rng: random.Random, kind: str, request_id: str) -> dict[str, Any]:
    one_id = own_id(rng, request_id)
    event: dict[str, Any] = {"type": kind}
    match kind:
        case "response.steer":
            event |= {"previous_response_id": one_id, "input": rng.choice(RESPONSES["input"])}
        case "response.resume":
            event |= {"response_id": one_id, "starting_after": rng.choice((0, -1, 7, None))}
        case "response.grant":
            event |= {"stream_id": one_id, "credits": rng.choice((1, 0, -1, 2**31))}
        case "response.cancel":
            event[rng.choice(("response_id", "stream_id"))] = one_id
        case _:
            event["response_id"] = one_id
    if rng.random() < 0.4:
        event[rng.choice(("type", *sorted(event), "stream_id", "x"))] = strange(rng)
    return event


def talk(rng: random.Random, request_id: str) -> Talk:
    """Messages that a server answers by events, in frames that it has to take."""
    data = b""
    for number in range(rng.choice((1, 1, 1, 2, 4))):
        event = _event(rng, f"{request_id}-{number}")
        how = rng.random()
        if how < 0.85 or not _is_text(event):
            # What isn't UTF-8 closes the connection in a text frame; in a binary one it doesn't.
            data += frame(event, TEXT if _is_text(event) else BINARY)
        elif how < 0.95:
            data += fragments(rng, event, rng.choice((2, 3, 20)))
        else:
            data += frame(b"x" * rng.choice((0, 125)), rng.choice((PING, PONG))) + frame(event)
    return Talk(data)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def lanes(rng: random.Random, request_id: str) -> Departure:
    """Many lanes, or many turns in few, more than are allowed."""
    num_turns, num_lanes = rng.choice(((300, 300), (100, 1), (150, 20), (30, 30)))
    data = b"".join(
        frame(
            json.dumps(
                {
                    "type": "response.create",
                    "stream_id": f"lane-{i % num_lanes}",
                    "input": "hi",
                    "request_id": f"{request_id}-{i}",
                    "max_output_tokens": rng.choice((1, 1, 30)),
                }
            ).encode()
        )
        for i in range(num_turns)
    )
    return Departure(data, num_turns, rng.randrange(400), rng.random() < 0.5)


def departure(rng: random.Random, request_id: str) -> Departure:
    """A client that goes in the middle of a response."""
    event = {
        "type": "response.create",
        "input": "hi",
        "request_id": request_id,
        "max_output_tokens": rng.choice((4, 60, 300)),
        "ignore_eos": True,
    }
    if rng.random() < 0.3:
        event["on_disconnect"] = rng.choice(("abort", "continue", "pause"))
    if rng.random() < 0.3:
        event["stream_id"] = LANE
    grants = 0
    if rng.random() < 0.2:  # without the grants it would wait for its client for ever
        grants = rng.choice((1, 2, 9))
        event["credits"] = rng.choice((0, 1, 5))
    data = frame(json.dumps(event).encode())
    for _ in range(grants):
        grant = {"type": "response.grant", "response_id": f"resp_{request_id}", "credits": 400}
        data += frame(json.dumps(grant).encode())
    if rng.random() < 0.3:
        steer = {
            "type": "response.steer",
            "previous_response_id": f"resp_{request_id}",
            "input": "no, the moon",
        }
        data += frame(json.dumps(steer).encode())
    if rng.random() < 0.2:
        data += frame(b'{"type": "resp')[: rng.randrange(1, 12)]
    return Departure(data, 1, rng.choice((0, 1, 3, rng.randrange(60))), rng.random() < 0.5)


_LONG = b"x" * 126
_CLOSES = (
    *(b"", b"\x03", b"\x03\xe8", b"\x03\xe8bye", b"\x03\xe9", b"\x03\xed", b"\x03\xee", b"\0\0"),
    *(b"\x03\xe7", b"\x13\x88", b"\xff\xff", b"\x03\xe8\xff\xfe", b"\x03\xe8" + b"x" * 123),
)
_BREAKS: Sequence[bytes] = (
    *(frame(b"{}", opcode) for opcode in (3, 4, 5, 6, 7, 0xB, 0xC, 0xF)),
    *(frame(b"{}", rsv=rsv) for rsv in (1, 2, 4, 7)),
    *(frame(b"{}", masked=False), frame(b"", PING, masked=False), frame(_LONG, PING)),
    *(frame(b"a", PING, fin=False), frame(b"", CLOSE, fin=False), frame(_LONG, CLOSE)),
    *(frame(b"{}", CONTINUATION), frame(b"{", fin=False) + frame(b"}", TEXT)),
    *(frame(b"\xff"), frame(b'"\xed\xa0\x80"'), frame(b'{"a": "\xf0\x9f'), frame(b"\xc0\x80")),
    *(frame(b"", size=1 << 40), frame(b"", size=(1 << 64) - 1), frame(b"", size=1 << 63)),
    frame(b"{", fin=False) + frame(b"", CONTINUATION, size=1 << 40),
    *(frame(payload, CLOSE) for payload in _CLOSES),
    frame(b"", CLOSE) + frame(b"{}") * 3,
)


def broken(rng: random.Random, request_id: str) -> Broken:
    """Frames against RFC 6455, alone or while a response runs; the server has to close."""
    before = b""
    if rng.random() < 0.4:
        event = {"type": "response.create", "input": "hi", "request_id": request_id}
        before = frame(json.dumps(event | {"max_output_tokens": rng.choice((2, 80))}).encode())
    return Broken(before + rng.choice(_BREAKS))


_HANDSHAKES: Sequence[tuple[str, str]] = (
    *(("Sec-WebSocket-Version", value) for value in ("", "8", "x", "13, 8")),
    *(("Sec-WebSocket-Key", value) for value in ("", "x", "=" * 24, "é" * 24, "a" * 5000)),
    *(("Upgrade", value) for value in ("WebSocket", "websocket, h2c", "h2c")),
    *(("Connection", value) for value in ("keep-alive, Upgrade", "upgrade", "close")),
    *(("Sec-WebSocket-Protocol", value) for value in ("a, b", "openai-insecure-api-key.", ",", "")),
    ("Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.none"),
    ("Sec-WebSocket-Extensions", "permessage-deflate; client_max_window_bits=99"),
    ("Sec-WebSocket-Extensions", "permessage-deflate; client_max_window_bits"),
    ("Sec-WebSocket-Extensions", ";;;"),
    *(("Origin", value) for value in ("http://evil.example", "null", "file://", "x")),
    *(("Cookie", "a" * 9000), ("X", "y" * 70_000), ("Host", "evil.example")),
)
_PATHS = ("/v1/responses",) * 5 + ("/v1/realtime", "/", "/v1/responses/x", "/v1/chat/completions")


def handshake(rng: random.Random, target: Target) -> Handshake:
    headers = rng.sample(_HANDSHAKES, rng.choice((0, 1, 1, 2)))
    return Handshake(upgrade(target, *headers, path=rng.choice(_PATHS)))
