"""What somebody at a terminal sees while weights are loaded."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from drive import load_runner
from tiny import save_tiny_checkpoint
from tqdm import tqdm

from streamkv.commands.log import log_lines
from streamkv.weights import jobs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(jobs, "BAR_DELAY_S", 0.0)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread that outlives the test


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_bar_shows_how_far_loading_is_and_goes(tmp_path, monkeypatch, quantization):
    folder, terminal = save_tiny_checkpoint(tmp_path, head_dim=16), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    config = {"ops": "native", "dtype": "bfloat16", "quantization": quantization}
    load_runner(folder, **config)[0].close()
    frames = terminal.getvalue().split("\r")
    assert any(frame.startswith("loading weights:   0%|") for frame in frames)
    assert frames[-1].strip() == ""


def test_nobody_who_reads_a_log_gets_bars(tmp_path, monkeypatch):
    folder, log = save_tiny_checkpoint(tmp_path, head_dim=16), io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    load_runner(folder, ops="native")[0].close()
    assert log.getvalue() == ""


def test_log_lines_stand_above_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = log_lines()
    record = logging.LogRecord("test", logging.INFO, "", 0, "a line", None, None)
    with jobs.progress_bar(100, "loading"):
        handler.handle(record)
    before, after = terminal.getvalue().split("a line\n")
    assert before.rpartition("\r")[2] == "" and "loading:   0%|" in before
    assert "loading:   0%|" in after
