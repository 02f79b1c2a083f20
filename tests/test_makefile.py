"""The Makefile says what it makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_make_help_names_each_target_and_how_to_pass_flags():
    help_ = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    (phony,) = (
        line.removeprefix(".PHONY:").split()
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith(".PHONY:")
    )
    said = help_.stdout.replace(",", " ").split()
    assert [name for name in phony if name not in said] == ["help"]
    assert 'make serve ARGS="' in help_.stdout
