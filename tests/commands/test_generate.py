"""`streamkv generate`: what comes after prompts, in which order and form, and how it ends."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from continuation import continued_text

from streamkv.cli import main

PROMPTS = ["the quick brown fox", "what is the answer", "over"]
GREEDY = ["--temperature", "0", "--dtype", "float32"]


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_texts_come_in_the_order_of_the_prompts(checkpoint, capsys):
    asked = ["--model", str(checkpoint), *GREEDY, "--max-tokens", "12"]
    # One waits at most: the third prompt is sent when the first is done.
    assert main(["generate", *PROMPTS, *asked, "--max-num-queued-reqs", "1"]) == 0
    texts = [continued_text(checkpoint, prompt, 12) for prompt in PROMPTS]
    assert capsys.readouterr().out == "---\n".join(f"{text}\n" for text in texts)


def test_lines_of_json_say_what_came_of_each_prompt(checkpoint, capsys):
    asked = ["--model", str(checkpoint), *GREEDY, "--max-tokens", "12"]
    assert main(["generate", *PROMPTS, *asked, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    texts = [continued_text(checkpoint, prompt, 12) for prompt in PROMPTS]
    assert [line["text"] for line in lines] == texts
    assert {line["finish_reason"] for line in lines} <= {"length", "stop"}
    assert all(line["num_prompt_tokens"] > 0 for line in lines)


def test_a_prompt_from_stdin_is_answered_as_a_message_with_chat(checkpoint, monkeypatch, capsys):
    pipe_in(monkeypatch, "the lazy dog – déjà vu\n".encode())
    assert (
        main(["generate", "--model", str(checkpoint), *GREEDY, "--max-tokens", "9", "--chat"]) == 0
    )
    message = {"role": "user", "content": "the lazy dog – déjà vu"}
    text = continued_text(checkpoint, [message], 9)
    assert capsys.readouterr().out == f"{text}\n"
    pipe_in(monkeypatch, b"over")
    assert main(["generate", "the", "-", "--model", str(checkpoint), *GREEDY, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["the", "over"]
    assert lines[0]["num_generated_tokens"] == 256  # where nobody says how many


def test_the_same_seed_gives_the_same_text(checkpoint, capsys):
    asked = ["--model", str(checkpoint), "--max-tokens", "24"]
    texts = []
    for seed in (7, 7, 8):
        assert main(["generate", *PROMPTS, *asked, "--seed", str(seed)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "stdin", "exit_code", "said"),
    [
        (["x", "--temperature", "-1"], b"", 2, "--temperature: expected a number"),
        (["x", "--max-tokens", "0"], b"", 2, "--max-tokens: expected a number"),
        (["x", "--stop", ""], b"", 2, "--stop: expected"),
        (["x", "--system", "be brief"], b"", 2, "--system: expected --chat"),
        (["-", "-"], b"x", 2, "more than once"),
        ([], b"\xff\xfe", 1, "expected text in UTF-8"),
        ([], b"", 1, "expected at least one token"),
        (["x", "", "y"], b"", 1, "prompt 2 of 3"),
        (["x", "z" * 4096, "--max-model-len", "64"], b"", 1, "prompt 2 of 2"),
        (["x", "--model", "/nowhere/model.gguf"], b"", 1, "gguf', which does not exist"),
    ],
)
def test_what_is_wrong_is_one_line(
    checkpoint, monkeypatch, capsys, arguments, stdin, exit_code, said
):
    pipe_in(monkeypatch, stdin)
    assert main(["generate", "--model", str(checkpoint), *arguments]) == exit_code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("streamkv: ")
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_nobody_to_ask_is_said(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate"]) == 2
    assert "expected a prompt" in capsys.readouterr().err


def start(checkpoint: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that writes for minutes."""
    command = [sys.executable, "-m", "streamkv", "generate", "the quick", "--model"]
    return subprocess.Popen(
        [*command, str(checkpoint), *GREEDY, "--max-tokens", "1000000", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_it_ends_quietly_when_its_reader_has_left(checkpoint):
    with start(checkpoint) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(64)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 141


def test_it_ends_quietly_by_ctrl_c(checkpoint):
    with start(checkpoint) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(64)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait(20) == 130
