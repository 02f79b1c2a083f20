"""How a command ends: closed streams, full disks, signals, Ctrl-C at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = [sys.executable, "-m", "streamkv"]
DEADLINE_S = 30.0


def run(checkpoint: Path, *arguments: str, redirect: str) -> subprocess.CompletedProcess[str]:
    words = [*PYTHON, *arguments, "--model", str(checkpoint)]
    shell = ["sh", "-c", f'"$@" {redirect}', "sh", *words]
    return subprocess.run(
        shell, input="", capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-"])
@pytest.mark.parametrize("command", [("generate", "hi", "--max-tokens", "2"), ("chat",), ("pull",)])
def test_closed_streams_are_no_error(command, redirect, checkpoint):
    done = run(checkpoint, *command, redirect=redirect)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    if command == ("pull",) and redirect != ">&-":
        assert done.stdout == f"{checkpoint}\n"


def test_an_error_is_never_written_to_the_output(tmp_path):
    done = run(tmp_path / "nope", "pull", redirect="2>&-")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", [("generate", "hi"), ("pull",), ("info",)])
def test_output_that_can_not_be_written_is_one_line(command, checkpoint):
    done = run(checkpoint, *command, redirect=">/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "streamkv: input or output: No space left on device"
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("line", ["without --api-key", "streamkv 0."])
def test_a_signal_while_a_server_starts_is_quiet(line, number, checkpoint):
    process = subprocess.Popen(
        [*PYTHON, "serve", "--model", str(checkpoint), "--host", "0.0.0.0", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        while line not in (said := process.stderr.readline()):
            assert said
        process.send_signal(number)
        _, rest = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in rest and "rror" not in rest
