"""Types of options. Each says what it expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option: a whole number."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got {text!r}")
        return value

    return number


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def server_url(text: str) -> str:
    try:
        url = urlsplit(text)
        is_url = url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:  # of the port
        is_url = False
    if not is_url or url.path not in ("", "/") or url.query or url.fragment:
        raise argparse.ArgumentTypeError(
            f"not a URL of a server: {text!r}; expected one like http://127.0.0.1:8000"
        )
    return text


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"folder not found: {text}")
    return Path(text)
