"""Log lines for somebody at a terminal: on stderr, above a progress bar if there is one."""

from __future__ import annotations

import logging
from typing import TextIO


def log_to_stderr(level: str) -> None:
    """From now on, for the whole process. Only a command may do that, never the library."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
        handlers=[log_lines()],
    )


def log_lines() -> logging.Handler:
    """A handler whose lines leave a progress bar whole."""
    from tqdm import tqdm

    class LogLines(logging.StreamHandler[TextIO]):
        def emit(self, record: logging.LogRecord) -> None:
            with tqdm.external_write_mode(self.stream):
                super().emit(record)

    return LogLines()
