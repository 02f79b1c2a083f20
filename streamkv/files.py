"""Files of a checkpoint as they are found: regular ones, texts, JSON objects.

Owns what may be wrong with a file before anybody looks at what it says. Knows no format but JSON,
and no key. Invariant: a file that is missing, cut, not what it is called, not a regular file or
absurdly large is one ModelLoadError that names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ModelLoadError

MAX_TEXT_BYTES = 256 << 20  # what is larger is weights under a wrong name

A_GGUF_FILE = "a GGUF file"

# First bytes -> what that is; for files that are not what they are called.
KINDS = {
    b"version https://git-lfs": "a Git LFS pointer (git lfs pull gets the file itself)",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"%PDF": "a PDF document",
    b"<": "an HTML page or XML",
    b"GGUF": A_GGUF_FILE,
    b"{": "JSON",
}


def is_file(path: Path) -> bool:
    """Whether there is such a file. ModelLoadError for what may never end when it is read, such
    as a pipe, and for a link to nowhere, which shows that there should be one."""
    try:
        if path.is_file():
            return True
        if os.path.lexists(path):
            is_broken = not path.exists()
            reason = "it is a link to a file that isn't there" if is_broken else "it is no file"
            raise ModelLoadError(f"{path}: expected a regular file, {reason}; get it again")
    except OSError as error:  # such as a folder that may not be entered
        raise unreadable(path, error) from None
    return False


def what_it_is(path: Path) -> str:
    """A file by its first bytes, or by their lack: "a PDF document"; empty if they say nothing."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
    except OSError:
        return ""
    if not start:
        return "an empty file"
    return next((kind for magic, kind in KINDS.items() if start.startswith(magic)), "")


def read_text(path: Path) -> str:
    """The file as text in UTF-8. ModelLoadError."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_TEXT_BYTES:
            raise ModelLoadError(
                f"{path}: expected text of at most {MAX_TEXT_BYTES >> 20} MiB, got "
                f"{num_bytes >> 20} MiB; get the file again"
            )
        return path.read_text(encoding="utf-8-sig")  # without the mark that some editors put first
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        found = what_it_is(path) or f"{error.reason} at byte {error.start}"
        raise ModelLoadError(
            f"{path}: expected text in UTF-8, got {found}; get the file again"
        ) from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. ModelLoadError."""
    is_file(path)
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = what_it_is(path)
        reason = str(error) if found in ("", "JSON") else found
        raise ModelLoadError(f"{path}: expected JSON, got {reason}; get the file again") from None
    if not isinstance(value, dict):
        raise ModelLoadError(
            f"{path}: expected a JSON object, got {type(value).__name__}; get the file again"
        )
    return value


def read_object_if_any(path: Path) -> dict[str, Any]:
    """The same; empty if there is no such file."""
    return read_object(path) if is_file(path) else {}


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Have each ModelLoadError in the block name the path."""
    try:
        yield
    except ModelLoadError as error:
        if str(path) in error.message:
            raise
        raise ModelLoadError(f"{path}: {error.message.removeprefix('GGUF: ')}") from error


def unreadable(path: Path, error: OSError, what: str = "") -> ModelLoadError:
    """The error for a file, or something in it, that the system doesn't let us read."""
    reason = error.strerror or str(error)
    return ModelLoadError(f"{path}: {what}{' ' if what else ''}cannot be read: {reason}")
