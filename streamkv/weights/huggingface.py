"""Files of a hub's repository on disk: a process of its own downloads them.

Owns that process and what is told of it; `hub_download.py` is what runs in it. Another process,
because only a process can be ended at any moment, and the hub's library, its threads and its
buffers are gone when it has done its work. Knows nothing of what the files hold. Invariant: when
`download` returns or raises, the process has ended.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from ..errors import ModelLoadError, one_line
from ..progress import Watch, unwatched
from .hub_ids import HubId

_PROGRAM = f"{__package__}.hub_download"
_END_S = 5.0  # until a process that was asked to end is killed

logger = logging.getLogger(__name__)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is to do: its one argument."""

    hub_id: HubId
    cache_dir: str  # "": the library's own
    text_only: bool  # of a folder, the tokenizer's files alone


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Several times a second, whatever happens: it is how the process finds out that nobody
    listens any more."""

    num_bytes: int
    total_bytes: int  # 0: not known yet


class Note(msgspec.Struct, frozen=True, tag="note"):
    text: str
    is_warning: bool = False


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The last one. A .gguf file, or the folder of a snapshot."""

    path: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last one."""

    reason: str


Message = Step | Note | Fetched | Failed


def download(
    hub_id: HubId,
    *,
    download_dir: str = "",
    progress: Watch = unwatched,
    text_only: bool = False,
) -> Path:
    """The .gguf file or the folder, fetched if it isn't in the cache that huggingface_hub shares
    with other programs, or in `download_dir`. ModelLoadError. What `progress` raises ends it."""
    cache_dir = os.path.abspath(os.path.expanduser(download_dir)) if download_dir else ""
    request = Request(hub_id=hub_id, cache_dir=cache_dir, text_only=text_only)
    with tempfile.TemporaryFile() as errors, _process(request, errors) as messages:
        path = _follow(messages, hub_id.repo, progress)
        if path is not None:
            return path
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise ModelLoadError(
        f"{hub_id.repo}: the download ended without a result: {one_line(last) or 'no message'}; "
        "try again"
    )


@contextmanager
def _process(request: Request, errors: IO[bytes]) -> Iterator[IO[bytes]]:
    """The messages of a new process. It runs in a session of its own: a Ctrl-C is for this
    program, which then ends it."""
    process = subprocess.Popen(
        # -P: no file of the folder that somebody happens to be in is taken for a module
        [sys.executable, "-P", "-m", _PROGRAM, msgspec.json.encode(request).decode()],
        # the library would take an empty HF_HOME or HF_ENDPOINT for one
        env={name: value for name, value in os.environ.items() if value}
        | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if sys.stderr.isatty() else errors,  # where the library shows its bars
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.stdout.close()  # its next message fails: it clears away what is half there
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _follow(messages: IO[bytes], repo: str, progress: Watch) -> Path | None:
    """Pass on what is told until there is a result; None if there is none."""
    for line in messages:
        match msgspec.json.decode(line, type=Message):
            case Step(num_bytes, total_bytes):
                fraction = num_bytes / total_bytes if total_bytes else 0.0
                progress(f"downloading {repo}", fraction)
            case Note(text, is_warning):
                logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
            case Fetched(path):
                return Path(path)
            case Failed(reason):
                raise ModelLoadError(f"{repo}: {reason}")
    return None
