"""`python -m loadtest.schemas` against a server whose answers are known."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REMOTE = {"$ref": "http://localhost:1234/draft2020-12/integer.json"}
ANSWERS: dict[str, tuple[int, str, str]] = {  # by the schema's title: status, text, finish reason
    "good": (200, '{"a": 1}', "stop"),
    "cut": (200, '{"a": [', "length"),
    "refused": (400, "response_format: no such type", ""),
    "remote": (200, "7", "stop"),
    "unknown pattern": (200, '"x"', "stop"),
    "wrong": (200, '{"a": "x"}', "stop"),
    "no JSON": (200, "{'a': 1}", "stop"),
    "NaN": (200, "NaN", "stop"),
    "remote, wrong": (200, '"x"', "stop"),
    "failed": (500, "sorry", ""),
    "gone": (0, "", ""),
}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMAS: dict[str, Any] = {
    "good": OBJECT,
    "cut": {"type": "object"},
    "refused": {"type": "nothing"},
    "remote": REMOTE,
    "unknown pattern": {"pattern": "\\p{Letter}"},
    "wrong": OBJECT,
    "no JSON": OBJECT,
    "NaN": {"type": "number"},
    "remote, wrong": REMOTE,
    "failed": {},
    "gone": {},
}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    asked = json.loads(await reader.readexactly(size))
    assert asked["temperature"] == 1 and asked["max_tokens"] == 9 and asked["model"] == "m"
    schema = asked["response_format"]["json_schema"]["schema"]
    status, text, finish_reason = ANSWERS[schema["title"]]
    if status:
        choice = {"message": {"content": text}, "finish_reason": finish_reason}
        body = json.dumps({"choices": [choice], "error": {"message": text}}).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
    writer.close()


def suite(folder: Path, titles: list[str]) -> Path:
    groups = [
        {"description": title, "schema": {"title": title, **SCHEMAS[title]}, "tests": []}
        for title in titles
    ]
    tests = folder / "tests" / "draft2020-12"
    tests.mkdir(parents=True)
    (tests / "some.json").write_text(json.dumps(groups))
    remotes = folder / "remotes" / "draft2020-12"
    remotes.mkdir(parents=True)
    (remotes / "integer.json").write_text('{"type": "integer"}')
    return folder


def run(folder: Path, titles: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    async def main() -> subprocess.CompletedProcess[str]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            command = [sys.executable, "-m", "loadtest.schemas", "--url", url, "--model", "m"]
            command += ["--suite", str(suite(folder, titles)), "--draft", "draft2020-12"]
            command += ["--max-tokens", "9", *arguments]
            return await asyncio.to_thread(
                subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60
            )

    return asyncio.run(main())


def test_answers_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    titles = ["good", "cut", "refused", "remote", "unknown pattern"]
    done = run(tmp_path, titles, "--seeds", "2")
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["counts"] == {"valid": 4, "length": 2, "refused": 2, "not judged": 2}
    assert document["reasons"] == {"response_format: no such type": 2}
    assert document["schemas"] == 5 and document["wrong"] == []
    assert 0 < document["slowest_s"]["refused"] < 60


@pytest.mark.parametrize(
    ("title", "what"),
    [
        ("wrong", "'x' is not of type 'integer'"),
        ("no JSON", "no JSON"),
        ("NaN", "no JSON"),
        ("remote, wrong", "'x' is not of type 'integer'"),
        ("failed", "error: draft2020-12 some.json#1: 500: "),
        ("gone", "no answer"),
    ],
)
def test_an_answer_that_is_wrong_is_shown_with_its_schema(
    tmp_path: Path, title: str, what: str
) -> None:
    done = run(tmp_path, ["good", title], "--seeds", "1")
    assert done.returncode == 1
    document = json.loads(done.stdout.splitlines()[-1])
    (wrong,) = document["wrong"]
    assert what in wrong and f'"title": "{title}"' in wrong and wrong in done.stdout
    assert document["counts"]["valid"] == 1


def test_a_folder_without_a_suite_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest.schemas", "--suite", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("loadtest: --suite: expected files") and "draft2020-12" in line
