"""Cases over HTTP: requests that are well-formed, bytes that are not, and clients that leave.

Owns how they are made; knows nothing of how they are sent and judged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from .fields import ENDPOINTS, GENERATING, any_endpoint, body_of, bound_body
from .http import Ask, Target
from .values import STRANGE, damaged, dump


class Exchange(NamedTuple):
    """Requests in a row on one connection, sent without waiting for answers."""

    asks: tuple[Ask, ...]

    @property
    def shown(self) -> str:
        return "; ".join(
            f"{ask.method} {ask.path[:200]} {ask.headers or ''} {ask.body[:1500]!r}"
            for ask in self.asks
        )


class Malformed(NamedTuple):
    """Bytes on a connection of their own. `answered`: the server has to answer or to hang up;
    otherwise it may wait for more, and the client leaves."""

    data: bytes
    answered: bool

    @property
    def shown(self) -> str:
        return f"raw HTTP {self.data[:1500]!r}"


class Leaving(NamedTuple):
    """A client that goes when it has read so many bytes of its answer, and may come back."""

    ask: Ask
    num_bytes: int
    hard: bool
    then: tuple[Ask, ...]

    @property
    def shown(self) -> str:
        how = "reset" if self.hard else "closed"
        return (
            f"{Exchange((self.ask,)).shown}, {how} after {self.num_bytes} bytes, then "
            f"{Exchange(self.then).shown or 'nothing'}"
        )


# --- well-formed ------------------------------------------------------------------------------

_HEADERS: Sequence[tuple[str, Sequence[str]]] = (
    ("Last-Event-ID", ("0", "-1", "99999999999999999999", "x", "")),
    ("X-Session-Id", ("s", "s" * 300, "\xff")),
    ("X-Request-Id", ("r", "r" * 5000, "\xe9")),
    ("Accept", ("text/event-stream", "image/png", "*/*;q=0")),
    ("Accept-Encoding", ("gzip", "identity;q=0", "zstd")),
    ("Content-Encoding", ("gzip", "br")),
    ("Origin", ("http://evil.example", "null", "x", "http://[::1")),
    ("Cookie", ("a=b; " * 400, "=")),
    ("OpenAI-Beta", ("responses=v1", "")),
    ("Idempotency-Key", ("k",)),
    ("Range", ("bytes=0-1", "bytes=5-")),
    ("Connection", ("keep-alive", "x")),
)
_QUERIES = (
    *("", "?", "?stream=true", "?stream=true&starting_after=0", "?starting_after=-1"),
    *("?stream=true&starting_after=99999999999999999999", "?stream=maybe", "?after=x", "?after=0"),
    *("?limit=0", "?limit=101&order=up", "?limit=2&order=asc&after=msg_0", "?include[]=x"),
    *("?include=reasoning.encrypted_content", "?%00=%ff", "?a=1&a=2&&=", "?after=" + "9" * 500),
)
_PATHS = (
    *("/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/responses/{}/cancel"),
    *("/v1/streams/{}", "/v1/requests/{}", "/v1/models/{}", "/v1/chat/completions/{}", "/v1/{}"),
    *("/{}", "/v1/responses/{}/{}", "/v1/models", "/health", "/metrics", "/version", "/ping"),
    *("/", "/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/docs"),
)
_METHODS = ("GET", "GET", "GET", "DELETE", "DELETE", "POST", "HEAD", "OPTIONS", "PUT", "PATCH")
_IDS = (
    *("none", "resp_0", "chatcmpl-0", "..", ".", "a b", "a/b", "%2e%2e", "\0", "\n", "é", "😀"),
    *("x" * 5000, "-1", "null", "*", "resp_" + "0" * 200, "'--", "{}", "%", "\x7f", "cmpl-0"),
)


def _some_headers(rng: random.Random) -> tuple[tuple[str, str], ...]:
    if rng.random() < 0.8:
        return ()
    names = rng.sample(_HEADERS, rng.randint(1, 2))
    return tuple((name, rng.choice(values)) for name, values in names)


def own_id(rng: random.Random, request_id: str) -> str:
    """An id that the case itself made, or somebody's."""
    prefix = rng.choice(("resp_", "chatcmpl-", "cmpl-", ""))
    return rng.choice((prefix + request_id, rng.choice(_IDS)))


def _path(rng: random.Random, one_id: str) -> str:
    path = rng.choice(_PATHS).replace("{}", quote(one_id, safe=rng.choice(("", "/."))))
    return path + (rng.choice(_QUERIES) if rng.random() < 0.5 else "")


def bodies(rng: random.Random, request_id: str) -> Exchange:
    """A request with a body to an endpoint that reads one."""
    endpoint = any_endpoint(rng)
    body = body_of(rng, endpoint, request_id=request_id)
    data = dump(body, twice=rng.choice(sorted(body)) if rng.random() < 0.05 else "")
    if rng.random() < 0.2:
        data = damaged(rng, data)
    chunks = tuple(rng.randrange(1 << 20) for _ in range(rng.choice((0,) * 9 + (1, 5))))
    return Exchange((Ask("POST", endpoint.path, data, _some_headers(rng), chunks),))


def paths(rng: random.Random, request_id: str) -> Exchange:
    """GET, DELETE and others of what is there and of what isn't."""
    asks = []
    for _ in range(rng.randint(1, 3)):
        body = rng.choice((b"", b"", b"{}", b'{"x"'))
        path = _path(rng, own_id(rng, request_id))
        asks.append(Ask(rng.choice(_METHODS), path, body, _some_headers(rng)))
    return Exchange(tuple(asks))


def lives(rng: random.Random, request_id: str) -> Exchange:
    """A response that is kept, and what may be done with it, in any order."""
    body = {
        "input": rng.choice(("hi", [{"role": "user", "content": "hi"}] * 3)),
        "request_id": request_id,
        "store": rng.choice((True, True, None, False)),
        "background": rng.choice((False, False, True)),
        "stream": rng.choice((False, True)),
        "max_output_tokens": rng.choice((1, 5, 40)),
    }
    asks = [Ask("POST", "/v1/responses", json.dumps(body).encode())]
    path = f"/v1/responses/resp_{request_id}"
    follow = json.dumps({"input": "so", "previous_response_id": f"resp_{request_id}"}).encode()
    acts = (
        *(Ask("GET", path + rng.choice(_QUERIES)), Ask("GET", f"{path}/input_items")),
        *(Ask("POST", f"{path}/cancel"), Ask("DELETE", path), Ask("DELETE", path)),
        Ask("POST", "/v1/responses", follow.replace(b"}", b', "max_output_tokens": 2}')),
        *(Ask("DELETE", f"/v1/requests/resp_{request_id}"), Ask("GET", path)),
        Ask("GET", f"/v1/streams/resp_{request_id}?after={rng.randint(-1, 9)}"),
    )
    return Exchange((*asks, *rng.choices(acts, k=rng.randint(1, 4))))


def grammars(rng: random.Random, request_id: str) -> Exchange:
    """Answers that have to obey a schema, a regex, a grammar or a tool's parameters."""
    endpoint = rng.choice(GENERATING)
    body = bound_body(rng, endpoint, request_id=request_id)
    return Exchange((Ask("POST", endpoint.path, dump(body)),))


# --- leaving ----------------------------------------------------------------------------------


def leaving(rng: random.Random, request_id: str) -> Leaving:
    endpoint = rng.choice(GENERATING)
    body = {
        **endpoint.base,
        "request_id": request_id,
        "stream": rng.random() < 0.7,
        endpoint.limit: rng.choice((4, 60, 300)),
        "ignore_eos": True,
    }
    if endpoint.path != "/v1/responses" and rng.random() < 0.3:
        body["n"] = rng.choice((2, 5))
    if rng.random() < 0.2:
        body["on_disconnect"] = rng.choice(("abort", "continue", "pause"))
    if body["stream"] and rng.random() < 0.3:
        body["stream_options"] = {"resumable": True}
    if endpoint.path == "/v1/completions" and rng.random() < 0.2:
        body["prompt"] = ["a", "b", "c"]
    whose = {"/v1/responses": "resp_", "/v1/completions": "cmpl-"}.get(endpoint.path, "chatcmpl-")
    after = rng.randint(-1, 20)
    back = (
        Ask("GET", f"/v1/streams/{whose}{request_id}?after={after}"),
        Ask("GET", f"/v1/streams/{whose}{request_id}", headers=(("Last-Event-ID", str(after)),)),
        Ask("DELETE", f"/v1/requests/{whose}{request_id}"),
        Ask("DELETE", f"/v1/requests/{request_id}"),
    )
    num_bytes = rng.choice((0, 1, rng.randrange(2000), rng.randrange(20_000)))
    data = json.dumps(body).encode()
    ask = Ask("POST", endpoint.path, data, (("Connection", "close"),))
    then = tuple(rng.choices(back, k=rng.choice((0, 0, 1, 2))))
    return Leaving(ask, num_bytes, rng.random() < 0.5, then)


# --- malformed --------------------------------------------------------------------------------

_JUNK = (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-x\r\n\r\n", b"PRI * HTTP/2.0")
_LINES = (
    *("GET /health", "get /health HTTP/1.1", "BREW /health HTTP/1.1", "GET  /health HTTP/1.1"),
    *("GET /health HTTP/9.9", "GET /health HTTP/1.0", "GET health HTTP/1.1", "GET * HTTP/1.1"),
    *("OPTIONS * HTTP/1.1", "CONNECT a:1 HTTP/1.1", "GET http://a/health HTTP/1.1"),
    *("GET /\x01 HTTP/1.1", "GET /\xff HTTP/1.1", "GET /health\tHTTP/1.1", " HTTP/1.1", "GET"),
    *("GET /" + "a" * 70_000 + " HTTP/1.1", "GET /health? HTTP/1.1 x", "GET //x/health HTTP/1.1"),
)
_FIELDS = (
    *("no colon", ": empty", "a b: c", "X: \0", "X: \x01", "\xff: x", "X: \xff", " folded: x"),
    *("X: a\r\n b", "X: " + "a" * 70_000, "Host: other", "Host: a b", "Host:", "Host: [::1"),
    *("Content-Length: -1", "Content-Length: x", "Content-Length: 1, 2", "Content-Length: +5"),
    *("Content-Length: " + "9" * 40, "Content-Length: 5\r\nContent-Length: 6", "Content-Length: "),
    *("Transfer-Encoding: gzip", "Transfer-Encoding: chunked, gzip", "Transfer-Encoding: x"),
    *("Transfer-Encoding: chunked\r\nContent-Length: 5", "Expect: 100-continue", "Expect: x"),
    *("Upgrade: h2c\r\nConnection: Upgrade", "Upgrade: websocket", "Connection: close"),
    *("Upgrade: websocket\r\nConnection: Upgrade", "\r\nX", "X:" * 500, "TE: trailers"),
    "\r\n".join(f"X-{i}: y" for i in range(300)),
)
_CHUNKS = (
    *(
        b"zz\r\n",
        b"-1\r\n",
        b"5\r\nab",
        b"5\r\nabcdefgh\r\n0\r\n\r\n",
        b"0x5\r\nabcde\r\n0\r\n\r\n",
    ),
    *(b"F" * 20 + b"\r\n", b"5;a=b\r\nabcde\r\n0\r\n\r\n", b"\r\n\r\n", b"5\nabcde\n0\n\n", b""),
    *(b"2\r\n{}\r\n0\r\nX: y\r\n\r\n", b"2\r\n{}\r\n0\r\nno colon\r\n\r\n", b"2\r\n{}\r\n0\r\n"),
    *(b"1" * 5000, b"5;" + b"x" * 70_000),
)


def malformed(rng: random.Random, target: Target) -> Malformed:
    """Bytes that are no request, or hardly one."""
    make: Callable[[random.Random, Target], Malformed] = rng.choice(
        (_bad_line, _bad_header, _bad_header, _bad_chunks, _cut, _junk)
    )
    return make(rng, target)


def _bad_line(rng: random.Random, target: Target) -> Malformed:
    head = target.head("GET", "/health").split(b"\r\n", 1)[1]
    return Malformed(rng.choice(_LINES).encode("latin-1") + b"\r\n" + head, answered=True)


def _bad_header(rng: random.Random, target: Target) -> Malformed:
    line = rng.choice(_FIELDS)
    method, path = rng.choice((("GET", "/health"), ("POST", "/v1/completions")))
    head = target.head(method, path, ("X-A", "b"))
    data = head.replace(b"X-A: b", line.encode("latin-1"))
    # What announces a body has none here: the server waits for it, rightly.
    waits = "Content-Length" in line or "Transfer" in line or "Upgrade" in line or "\r\nX" in line
    return Malformed(data, answered=not waits)


def _bad_chunks(rng: random.Random, target: Target) -> Malformed:
    headers = (("Transfer-Encoding", "chunked"), ("Content-Type", "application/json"))
    head = target.head("POST", rng.choice(ENDPOINTS).path, *headers)
    return Malformed(head + rng.choice(_CHUNKS), answered=False)


def _cut(rng: random.Random, target: Target) -> Malformed:
    """A client that leaves before it has said all."""
    endpoint = any_endpoint(rng)
    body = json.dumps(dict(endpoint.base)).encode()
    data = Ask("POST", endpoint.path, body, chunks=rng.choice(((), (3,)))).to_bytes(target)
    return Malformed(data[: rng.randrange(len(data))], answered=False)


def _junk(rng: random.Random, target: Target) -> Malformed:
    data = rng.choice(
        (
            *_JUNK,
            rng.randbytes(rng.randrange(1, 300)),
            str(rng.choice(STRANGE)).encode(errors="replace"),
        )
    )
    return Malformed(data, answered=False)
