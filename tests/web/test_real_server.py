"""The chat page against the real server and the default model, as a person would use it, also over
a network that breaks."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect
from web.scripted_server import OpenPage

from streamkv.config import DEFAULT_MODEL
from streamkv.weights.hub import Checkpoint

pytestmark = pytest.mark.browser

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
LOAD_TIMEOUT_MS = 60_000
# The browser needs the other: threads of a step that wait for each other and for it are slow.
ON_ONE_CORE = """
import os, sys
from streamkv.cli import main
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def url(default_checkpoint: Checkpoint) -> Iterator[str]:
    """`streamkv serve` with nothing but its defaults and a free port."""
    command = [sys.executable, "-c", ON_ONE_CORE, "serve", "--port", "0"]
    environment = {key: value for key, value in os.environ.items() if "STREAMKV" not in key}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[2]
    ) as server:
        assert server.stderr is not None
        lines: list[str] = []
        try:
            for line in server.stderr:
                lines.append(line)
                if found := re.search(r"http://[\d.:]+", line):
                    break
            else:
                pytest.fail("".join(lines))
            reader = threading.Thread(target=lines.extend, args=(server.stderr,))
            reader.start()  # so that a full pipe never stops the server
            yield found[0]
        finally:
            server.terminate()
            server.wait(30)
        reader.join()
    assert not [line for line in lines if " E " in line or "Traceback" in line], "".join(lines)


def configure(page: Page, *, max_tokens: int) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_role("button", name="Done").click()


def test_a_person_chats_with_the_default_model(url: str, open_page: OpenPage) -> None:
    """Types, sees the answer stream, stops a long one, asks again."""
    page = open_page(url, expect=("status of 503",))
    expect(page.locator("#link-text")).to_have_text(DEFAULT_MODEL, timeout=LOAD_TIMEOUT_MS)
    configure(page, max_tokens=120)
    draft = page.get_by_label("Message")
    answers = page.locator(".assistant")

    draft.fill("Write a Python function that adds two numbers. Explain it in one sentence.")
    draft.press("Enter")
    expect(answers).to_have_attribute("data-status", "streaming")
    expect(answers).to_have_attribute("data-status", re.compile("done|length"), timeout=30_000)
    expect(answers.locator(".body")).to_contain_text(re.compile("return|sum|add"))
    figures = re.compile(r"\d+ tokens\s*[\d.]+ tok/s\s*[\d.]+ m?s to first token")
    expect(answers.locator(".stats")).to_have_text(figures)
    page.mouse.move(0, 0)
    page.screenshot(path=ARTIFACTS / "chat.png")

    configure(page, max_tokens=2000)
    draft.fill("Tell me a very long story about a lighthouse keeper.")
    draft.press("Enter")
    expect(answers).to_have_count(2)  # before that, the last one is the first
    last = answers.last
    expect(last.locator(".body")).to_have_text(re.compile(r"\w+ \w+"))
    page.get_by_role("button", name="Stop").click()
    expect(last).to_have_attribute("data-status", "stopped")
    expect(last.locator(".stats")).to_contain_text("% cached")

    page.get_by_role("button", name="Regenerate").click()
    expect(last).to_have_attribute("data-status", "streaming")
    expect(last.locator(".body")).to_have_text(re.compile(r"\w+ \w+"))
    page.keyboard.press("Escape")
    expect(last).to_have_attribute("data-status", "stopped")
    expect(answers).to_have_count(2)


def test_an_answer_that_is_cut_and_reloaded_is_the_one_that_was_not(
    url: str, open_page: OpenPage
) -> None:
    with CuttingProxy(url).running() as proxy:
        page = open_page(proxy.url, expect=("status of 503", "ERR_", "WebSocket"))
        expect(page.locator("#link-text")).to_have_text(DEFAULT_MODEL, timeout=LOAD_TIMEOUT_MS)
        configure(page, max_tokens=120)
        answer, body = page.locator(".assistant"), page.locator(".assistant .body")
        page.get_by_label("Message").fill("Tell me a long story about a lighthouse keeper.")
        page.keyboard.press("Enter")
        expect(answer).to_have_attribute("data-status", re.compile("done|length"), timeout=30_000)
        whole = body.inner_text()

        page.get_by_role("button", name="Regenerate").click()
        is_longer = "num => document.querySelector('.assistant .body').innerText.length > num"
        expect(answer).to_have_attribute("data-status", "streaming")
        losses: list[Callable[[], object]] = [proxy.cut, page.reload]
        num_chars = 0
        for lose in losses:
            page.wait_for_function(is_longer, arg=num_chars)
            lose()
            num_chars = len(body.inner_text())
        expect(answer).to_have_attribute("data-status", re.compile("done|length"), timeout=30_000)
        assert body.inner_text() == whole
        expect(answer.locator(".stats")).not_to_contain_text("tok/s")


class CuttingProxy:
    """A TCP proxy to the server; `cut` resets the connections that it has."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._target = (address.hostname, address.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @contextmanager
    def running(self) -> Iterator[CuttingProxy]:
        accepting = threading.Thread(target=self._accept, daemon=True)
        accepting.start()
        try:
            yield self
        finally:
            with self._listener:
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for the next
                accepting.join()
            self.cut()

    def cut(self) -> None:
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with one, suppress(OSError):  # not connected any more
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RD)  # wakes who reads it

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # cut
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
