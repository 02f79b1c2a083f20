"""What the page's tests share: one Chromium, a scripted server, and pages that may not complain.

Invariant: a page that logged an error, broke its Content-Security-Policy or threw fails its test,
unless the test named that message beforehand.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from web.scripted_server import OpenPage, ScriptedServer

TIMEOUT_MS = 10_000
CHROMIUM_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run"
).split()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ScriptedServer]:
    with ScriptedServer().running() as server:
        yield server


@pytest.fixture
def server(shared_server: ScriptedServer) -> ScriptedServer:
    """As new: no script, key or event of another test."""
    shared_server.reset()
    return shared_server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """`open_page(url, expect=("503",), **context_options)`: a page in a fresh profile."""
    complaints: list[str] = []
    contexts = []

    def open_page(url: str, *, expect: tuple[str, ...] = (), **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)

        def complain(text: str) -> None:
            if not any(part in text for part in expect):
                complaints.append(text)

        page.on("console", lambda m: complain(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complain(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
