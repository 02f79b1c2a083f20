"""What the commands' options have in common, and types of options, each of which says what it
expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
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


COUNTED: dict[str, Any] = {"type": at_least(1), "metavar": "N"}


def new_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", type=server_url, default="http://127.0.0.1:8000", help="the server"
    )
    parser.add_argument("--api-key", default="none")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model id to ask for (default: left out)")


def add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds",
        **COUNTED,
        default=3,
        help="medians are taken over rounds (default: %(default)s)",
    )
