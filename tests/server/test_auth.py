"""API keys, Host, Origin and CORS: who gets in."""

from __future__ import annotations

import asyncio
import socket

import openai
import pytest
from server.harness import MODEL, Server, serve
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from streamkv.server.auth import (
    accepted_subprotocol,
    is_loopback,
    is_same_origin,
    presented_key,
)

TEXT = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 1}


async def upgrade(server: Server, **options: object) -> tuple[int, str | None]:
    """Status and chosen subprotocol of a WebSocket upgrade at /v1/responses."""
    try:
        async with connect(f"ws://{server.host}/v1/responses", proxy=None, **options) as opened:  # type: ignore[arg-type]
            return 101, opened.subprotocol
    except InvalidStatus as refused:
        assert b'"error"' in refused.response.body
        return refused.response.status_code, None


@pytest.fixture(scope="module")
def keyed() -> object:
    with serve(
        api_key=("first key", "schlüssel"), allowed_origins=("https://app.example",)
    ) as server:
        yield server


def test_without_the_key_what_generates_is_closed_and_probes_are_open(keyed: Server) -> None:
    closed = [
        ("GET", "/v1/models"),
        ("POST", TEXT),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/nothing"),
    ]
    with keyed.client() as client:
        for method, path in closed:
            answer = client.request(method, path)
            assert (path, answer.status_code) == (path, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize/",
        "//tokenize",
        "/TOKENIZE",
        "/tokenize%20",
        "/health/",
        "//health",
        "/HEALTH",
        "/health/../tokenize",
        "/app.js/",
        "/docs",
    ],
)
def test_what_is_not_exactly_an_open_path_asks_for_the_key(keyed: Server, path: str) -> None:
    with keyed.client() as client:
        for method in ("GET", "POST", "OPTIONS"):
            assert raw_status(keyed, method, path) == 401
        key = {"authorization": "Bearer first key"}
        assert client.post("/tokenize", json={"prompt": "hi"}, headers=key).status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/health", "/v1/models", "/", "/app.js"])
@pytest.mark.parametrize("tail", ["%0A", "%0D", "%00", "%0D%0A", "%7F", "%C2%85", "%0Ax"])
def test_a_path_with_a_control_character_is_nobodys(
    keyed: Server, server: Server, path: str, tail: str
) -> None:
    for running in (keyed, server):
        for method in ("GET", "POST"):
            assert raw_status(running, method, path + tail) == 404
    upgrade = [
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
    ]
    assert raw_status(keyed, "GET", path + tail, *upgrade) == 404


def raw_status(server: Server, method: str, path: str, *headers: str) -> int:
    """The status of a request whose path no client library has touched."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {server.host}", *headers, "", ""]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall("\r\n".join(lines).encode())
        return int(client.makefile("rb").readline().split()[1])


def test_the_pages_own_files_are_open(keyed: Server) -> None:
    with keyed.client() as client:
        for path in ("/", "/index.html", "/app.js", "/style.css"):
            assert client.get(path).status_code == 200


def test_an_empty_key_opens_nothing(keyed: Server) -> None:
    with keyed.client() as client:
        for header in ("Bearer", "bearer", ""):
            answer = client.post(TEXT, json=BODY, headers={"authorization": header})
            assert answer.status_code == 401
            assert "missing" in answer.json()["error"]["message"]
    assert presented_key({"headers": [], "subprotocols": ["openai-insecure-api-key."]}) is None


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer", "first key", "Basic first key", "Bearer first"]
)
def test_a_wrong_key_is_a_401(keyed: Server, header: str) -> None:
    with keyed.client() as client:
        answer = client.post(TEXT, json=BODY, headers={"authorization": header})
        assert answer.status_code == 401


def test_each_of_several_keys_opens(keyed: Server) -> None:
    with keyed.client() as client:
        for header in (b"Bearer first key", b"bearer first key", "Bearer schlüssel".encode()):
            answer = client.post(TEXT, json=BODY, headers={b"authorization": header})
            assert answer.status_code == 200, answer.text


def test_the_official_client_sends_the_key_its_way(keyed: Server) -> None:
    create = keyed.openai(api_key="first key").completions.create
    assert create(model=MODEL, prompt="hi", max_tokens=1).choices
    with pytest.raises(openai.AuthenticationError):
        keyed.openai(api_key="other").completions.create(model=MODEL, prompt="hi")


def test_a_websocket_shows_its_key_in_a_header_or_as_a_subprotocol(keyed: Server) -> None:
    async def main() -> None:
        assert await upgrade(keyed) == (401, None)
        header = {"additional_headers": {"Authorization": "Bearer first key"}}
        assert await upgrade(keyed, **header) == (101, None)
        wrong = ["realtime", "openai-insecure-api-key.nope"]
        assert await upgrade(keyed, subprotocols=wrong) == (401, None)

    asyncio.run(main())
    with serve(api_key=("sk-1",)) as server:
        offered = ["realtime", "openai-insecure-api-key.sk-1"]
        assert asyncio.run(upgrade(server, subprotocols=offered)) == (101, "realtime")


def test_the_subprotocol_accepted_is_never_a_key_unless_nothing_else_was_offered() -> None:
    key = "openai-insecure-api-key.k"
    assert accepted_subprotocol({"subprotocols": [key, "realtime", "other"]}) == "realtime"
    assert accepted_subprotocol({"subprotocols": [key]}) == key
    assert accepted_subprotocol({"subprotocols": []}) is None


def test_a_websocket_of_a_foreign_page_is_refused_before_it_opens(server: Server) -> None:
    async def main() -> None:
        assert (await upgrade(server, origin="https://evil.example"))[0] == 403
        assert (await upgrade(server, origin="null"))[0] == 403
        assert (await upgrade(server, origin=f"http://127.0.0.1:{server.port + 1}"))[0] == 403
        assert (await upgrade(server, origin=server.url))[0] == 101
        assert (await upgrade(server))[0] == 101

    asyncio.run(main())


def test_an_allowed_origin_may_open_websockets() -> None:
    with serve(allowed_origins=("https://app.example",)) as server:
        assert asyncio.run(upgrade(server, origin="https://app.example"))[0] == 101
        assert asyncio.run(upgrade(server, origin="https://app.example.evil"))[0] == 403


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "",
        "evil.example@localhost",
        "localhost/evil.example",
        "localhost?evil.example",
        "localhost#evil.example",
        "localhost\\evil.example",
        "localhost:80:80",
        "localhost:x",
        "localhost, evil.example",
        "[::1",
        "[::1]evil.example",
    ],
)
def test_a_loopback_server_answers_to_loopback_names_only(server: Server, host: str) -> None:
    with server.client() as client:
        for path in ("/health", "/v1/models", "/", TEXT):
            answer = client.get(path, headers={"host": host})
            assert answer.status_code == 403
            assert answer.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:", "LOCALHOST:1", "127.0.0.1:9", "[::1]:80", "[::1]"]
)
def test_loopback_names_pass_with_any_port(server: Server, host: str) -> None:
    with server.client() as client:
        assert client.get("/health", headers={"host": host}).status_code == 200


def test_a_public_server_answers_to_any_name() -> None:
    with serve(host="0.0.0.0") as server, server.client() as client:
        for host in ("llm.example", "LLM.example:80", "my_container:8000", "[fe80::1]:1"):
            assert client.get("/health", headers={"host": host}).status_code == 200
        assert client.get("/health", headers={"host": "evil@llm.example"}).status_code == 403


def test_without_cors_a_foreign_page_can_neither_read_nor_send(server: Server) -> None:
    headers = {"origin": "https://evil.example"}
    with server.client() as client:
        preflight = client.options(
            TEXT, headers=headers | {"access-control-request-method": "POST"}
        )
        assert "access-control-allow-origin" not in preflight.headers
        assert client.post(TEXT, json=BODY, headers=headers).status_code == 403
        assert "access-control-allow-origin" not in client.get("/health", headers=headers).headers
        same = client.post(TEXT, json=BODY, headers={"origin": server.url})
        assert same.status_code == 200


def test_an_allowed_origin_may_read_and_send_and_see_its_refusals(keyed: Server) -> None:
    headers = {"origin": "https://app.example"}
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with keyed.client() as client:
        preflight = client.options(TEXT, headers=headers | asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = client.post(TEXT, json=BODY, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        key = {"authorization": "Bearer first key"}
        answer = client.post(TEXT, json=BODY, headers=headers | key)
        assert answer.status_code == 200
        foreign = client.post(TEXT, json=BODY, headers=key | {"origin": "https://evil.example"})
        assert foreign.status_code == 403


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://a.example", "a.example", True),
        ("http://a.example", "a.example:80", True),
        ("https://a.example", "a.example:443", True),
        ("https://a.example", "a.example:80", False),
        ("http://A.example:8000", "a.example:8000", True),
        ("http://a.example:8000", "a.example", False),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://a.example.evil", "a.example", False),
        ("null", "a.example", False),
        ("", "", False),
        ("http://", "", False),
        ("http://[", "[", False),
        ("http://a:99999", "a:99999", False),
        ("http://evil@a.example", "a.example", False),
        ("http://a.example/", "a.example", False),
        ("file://a.example", "a.example", False),
    ],
)
def test_same_origin_compares_host_and_port(origin: str, host: str, same: bool) -> None:
    assert is_same_origin(origin, host) is same


def test_loopback_names() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "10.0.0.1", "localhost.evil", "127.0.0.1.x")))
