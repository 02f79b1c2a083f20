"""A hub on the loopback interface: repositories from a dictionary, over the hub's own protocol."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")


def commit_of(files: Mapping[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class FakeHub(ThreadingHTTPServer):
    """Answers for `repos`: repository → branch → file → content."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refused: tuple[int, dict[str, str], bytes] | None = None  # what it says to everybody
        self.fetched: list[str] = []  # files whose content was asked for
        self.ranges: list[str] = []  # and parts of which
        self.tokens: set[str] = set()
        self.sizes: dict[str, int] = {}  # of files, that it tells instead of their own
        self.stop_after: dict[str, int] = {}  # file → bytes after which its connection ends, once
        self.stuck: dict[str, int] = {}  # file → bytes after which nothing comes any more
        self.is_stuck = threading.Event()
        self.hung_up = threading.Event()  # who was stuck has gone

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        branches = self.repos.get(repo, {})
        by_commit = {commit_of(files): files for files in branches.values()}
        return branches.get(revision) or by_commit.get(revision)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.refused:
            status, headers, body = hub.refused
            self._send(status, body, headers)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._tell(match[1], match[2] or "main", is_tree=False)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
            self._tell(match[1], match[2], is_tree=True)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._send_file(match[1], match[2], match[3])
        else:
            self._send(404, b"{}", {})

    def _tell(self, repo: str, revision: str, *, is_tree: bool) -> None:
        files = self.server.files(repo, revision)
        if files is None:
            code = "RevisionNotFound" if repo in self.server.repos else "RepoNotFound"
            self._send(404, b"{}", {"X-Error-Code": code})
            return
        listed = []
        for name, content in files.items():
            size = self.server.sizes.get(name, len(content))
            entry = {"type": "file", "size": size}
            entry |= {"path": name, "oid": _etag(name, content)}
            entry |= {"rfilename": name, "blobId": _etag(name, content)}
            if name.endswith(LFS_SUFFIXES):
                sha256 = _etag(name, content)
                entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": size, "pointerSize": 9}
            listed.append(entry)
        info = {"id": repo, "sha": commit_of(files), "siblings": listed}
        self._send(200, json.dumps(listed if is_tree else info).encode(), {})

    def _send_file(self, repo: str, revision: str, name: str) -> None:
        hub, files = self.server, self.server.files(repo, revision) or {}
        content = files[name]
        headers = {"X-Repo-Commit": commit_of(files), "ETag": f'"{_etag(name, content)}"'}
        if self.command == "HEAD":
            self._send(200, content, headers)
            return
        hub.fetched.append(name)
        asked, status = self.headers.get("Range", ""), 200
        if match := re.fullmatch(r"bytes=(\d+)-", asked):
            hub.ranges.append(asked)
            first, status = int(match[1]), 206
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            content = content[first:]
        if name in hub.stop_after:
            self._send(status, content, headers, stop_after=hub.stop_after.pop(name))
            self.close_connection = True
        elif name in hub.stuck:
            self._send(status, content, headers, stop_after=hub.stuck[name])
            hub.is_stuck.set()
            with contextlib.suppress(ConnectionError):
                self.rfile.read(1)
            hub.hung_up.set()
            self.close_connection = True
        else:
            self._send(status, content, headers)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        stop_after: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:stop_after])
            self.wfile.flush()


def _etag(name: str, content: bytes) -> str:
    digest = hashlib.sha256 if name.endswith(LFS_SUFFIXES) else hashlib.sha1
    return digest(content).hexdigest()
