"""Runs the page's pure modules under Node: their tests are the *.test.mjs files beside this one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = sorted(Path(__file__).parent.glob("*.test.mjs"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_the_module_passes_its_own_tests(path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js: apt-get install nodejs")
    run = subprocess.run(
        [node, "--test", "--test-reporter=spec", path], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr
