"""The chat page against the real server and the default model, as a person would use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect
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


@pytest.fixture
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


def test_a_person_chats_with_the_default_model(url: str, open_page: OpenPage) -> None:
    """Types, sees the answer stream, stops a long one, asks again."""
    page = open_page(url, expect=("status of 503",))
    expect(page.locator("#link-text")).to_have_text(DEFAULT_MODEL, timeout=LOAD_TIMEOUT_MS)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("120")
    page.get_by_role("button", name="Done").click()
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

    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("2000")
    page.get_by_role("button", name="Done").click()
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
