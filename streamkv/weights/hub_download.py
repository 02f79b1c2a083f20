"""The program that downloads from a hub: `python -m streamkv.weights.hub_download REQUEST`.

Owns the talk with huggingface_hub, and what its errors mean to a user. It writes the messages of
`huggingface.py` to stdout, a line each. Invariants: descriptions are fetched before weights, so a
snapshot in the cache that has its weights has everything; a file is whole if its size is the one
that the hub tells; what is half there when nobody listens any more is removed, or else by the next
download, unless the library can go on from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import ModelLoadError
from ..text.tokenizer_files import TOKENIZER_FILES
from .hub_errors import explain
from .hub_files import INDEX_FILE, Choice, choose_files, descriptions_of, with_shards
from .hub_ids import is_safe
from .huggingface import Failed, Fetched, Message, Note, Request, Step

_BEAT_S = 0.2
ANNOUNCED_BYTES = 10**7  # less is done before anybody has looked
CHUNK_BYTES = 1 << 20
# What the library writes and never goes on from, as its name is for one process alone.
_UNIQUE_PART = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
_QUIET_S = 10.0  # nothing was written for so long to a part that nobody writes


def main() -> None:
    request = msgspec.json.decode(sys.argv[1], type=Request)
    teller = Teller()
    teller.start()
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    download = Download(request, teller)
    try:
        teller.tell(Fetched(str(download.run())))
    except ModelLoadError as error:
        teller.tell(Failed(error.message))
    except Exception as error:
        teller.tell(Failed(download.explain(error)))
    os._exit(0)  # whatever threads the library has left


class Teller:
    """Tells the other process how far it is, several times a second; ends this one if nobody
    listens."""

    def __init__(self) -> None:
        # What a library prints must not come among the messages.
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._blobs: Path | None = None
        self._total_bytes = self._before = 0

    def start(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()

    def watch(self, blobs: Path, total_bytes: int) -> None:
        """From now on, how much more is in the folder."""
        self._before = num_bytes_in(blobs)
        self._blobs, self._total_bytes = blobs, total_bytes

    def tell(self, message: Message) -> None:
        with self._lock:
            try:
                self._out.write(msgspec.json.encode(message) + b"\n")
            except BrokenPipeError:
                remove_parts()
                os._exit(1)

    def _beat(self) -> None:
        wait = threading.Event().wait
        while not wait(_BEAT_S):
            num_bytes = num_bytes_in(self._blobs) - self._before if self._blobs else 0
            self.tell(Step(max(0, min(num_bytes, self._total_bytes)), self._total_bytes))


class HubFile(NamedTuple):
    num_bytes: int  # 0: not told
    blob: str  # its name in the cache, where equal files of all revisions are one

    def is_whole(self, path: Path) -> bool:
        return path.is_file() and self.num_bytes in (0, path.stat().st_size)


class Listing(NamedTuple):
    """A revision of a repository, as the hub tells it."""

    commit: str
    files: Mapping[str, HubFile]  # by name


class Download:
    """One request."""

    def __init__(self, request: Request, teller: Teller) -> None:
        from huggingface_hub import constants

        # So much is lost when a connection breaks, and seen when nothing breaks: 10 MiB of old.
        constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
        self._request, self._teller = request, teller
        self._repo = request.hub_id.repo
        self._revision = request.hub_id.revision or None
        self._cache = Path(request.cache_dir or constants.HF_HUB_CACHE)
        self._folder = self._cache / f"models--{self._repo.replace('/', '--')}"

    def run(self) -> Path:
        """The .gguf file or the folder of the snapshot. ModelLoadError, or the library's errors."""
        try:
            listing = self._list()
        except Exception as error:
            return self._without_hub(error)
        chosen = self._choose(listing.files)
        snapshot = self._folder / "snapshots" / listing.commit
        self._fetch(listing, chosen.descriptions)
        weights = with_shards(chosen.weights, snapshot)
        missing = sorted(set(weights) - set(listing.files))
        if missing:
            raise _broken(f"its index names {missing[0]!r:.100}, which it does not have")
        self._fetch(listing, weights)
        return _result(snapshot, chosen)

    def explain(self, error: Exception) -> str:
        """In one line, what is wrong and what to do."""
        return explain(error, self._request.hub_id, self._cache)

    def _list(self) -> Listing:
        from huggingface_hub import HfApi, constants

        info = HfApi(library_name="streamkv").model_info(
            self._repo,
            revision=self._revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        if not info.sha or info.siblings is None:
            raise ValueError("expected a commit and files")
        return Listing(
            info.sha,
            {
                file.rfilename: HubFile(
                    file.size or 0,
                    os.path.basename((file.lfs.sha256 if file.lfs else file.blob_id) or "?"),
                )
                for file in info.siblings
            },
        )

    def _choose(self, names: Iterable[str]) -> Choice:
        """ModelLoadError."""
        hub_id = self._request.hub_id
        if not self._request.text_only or hub_id.quant or hub_id.file:
            return choose_files(set(names), quant=hub_id.quant, file=hub_id.file)
        described = [name for name in descriptions_of(names) if name != INDEX_FILE]
        if not set(described) & set(TOKENIZER_FILES):
            raise ModelLoadError("expected a tokenizer's files, got none; name another tokenizer")
        return Choice(described, [])

    def _fetch(self, listing: Listing, names: list[str]) -> None:
        """Those that aren't whole in the cache, all at once. The first writes down what the
        revision's commit is, for a day without network."""
        from huggingface_hub import snapshot_download

        absent, blobs = self._absent(listing, names), self._folder / "blobs"
        if not absent:
            return
        remove_stale_parts(blobs, self._cache / ".locks" / self._folder.name)
        files = {listing.files[name] for name in absent}
        total_bytes = sum(file.num_bytes for file in files if not (blobs / file.blob).exists())
        self._check_space(total_bytes)
        if total_bytes > ANNOUNCED_BYTES:
            megabytes = total_bytes // 10**6
            self._teller.tell(Note(f"fetching {self._repo} ({megabytes} MB) to {self._cache}"))
            self._teller.watch(blobs, total_bytes)
        got = snapshot_download(
            self._repo,
            revision=self._revision,
            cache_dir=self._cache,
            allow_patterns=[glob.escape(name) for name in absent],
            library_name="streamkv",
        )
        if Path(got).name != listing.commit:
            raise ModelLoadError("its files were replaced meanwhile: try again")

    def _absent(self, listing: Listing, names: list[str]) -> list[str]:
        """Those that aren't whole. What there is of them is removed: the library would take it."""
        absent = []
        for name in names:
            if not is_safe(name):
                raise _broken(f"it lists a file {name!r:.100}")
            file, path = listing.files[name], self._folder / "snapshots" / listing.commit / name
            if file.is_whole(path):
                continue
            absent.append(name)
            for half in (path, self._folder / "blobs" / file.blob):
                if not file.is_whole(half):
                    half.unlink(missing_ok=True)
        return absent

    def _check_space(self, total_bytes: int) -> None:
        there = next(path for path in (self._cache, *self._cache.parents) if path.exists())
        free_bytes = shutil.disk_usage(there).free
        if free_bytes < total_bytes:
            raise ModelLoadError(
                f"expected {-(-total_bytes >> 20)} MiB for it in {self._cache}, got "
                f"{free_bytes >> 20} MiB free; make room, or name another folder with "
                "--download-dir or HF_HOME"
            )

    # --- without the hub ---------------------------------------------------------------------

    def _without_hub(self, error: Exception) -> Path:
        """What is in the cache, if that is all of it. ModelLoadError."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        reason, cached = self.explain(error), self._cached()
        if cached is None:
            raise ModelLoadError(reason) from error
        try:
            path = self._complete(cached)
        except ModelLoadError as incomplete:
            raise ModelLoadError(f"{reason}; in {cached}: {incomplete}") from None
        if not isinstance(error, OfflineModeIsEnabled):
            self._teller.tell(Note(f"using {cached}: {self._repo}: {reason}", is_warning=True))
        return path

    def _cached(self) -> Path | None:
        """The folder of the revision's snapshot, whatever is in it."""
        name = self._revision or "main"
        ref = self._folder / "refs" / name
        commit = ref.read_text().strip() if ref.is_file() else name
        snapshot = self._folder / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None

    def _complete(self, snapshot: Path) -> Path:
        """ModelLoadError unless everything is there."""
        files = filter(Path.is_file, snapshot.rglob("*"))
        names = {path.relative_to(snapshot).as_posix() for path in files}
        chosen = self._choose(names)
        missing = sorted(set(with_shards(chosen.weights, snapshot)) - names)
        if missing:
            raise ModelLoadError(f"{missing[0]} is missing")
        return _result(snapshot, chosen)


def _result(snapshot: Path, chosen: Choice) -> Path:
    return snapshot if chosen.descriptions else snapshot / chosen.weights[0]


def _broken(reason: str) -> ModelLoadError:
    return ModelLoadError(f"{reason}; the repository is broken: find another one")


# --- the disk --------------------------------------------------------------------------------


def num_bytes_in(blobs: Path) -> int:
    """Of files that are half there, what is written: they may have holes."""
    num_bytes = 0
    with contextlib.suppress(OSError), os.scandir(blobs) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # moved meanwhile
                stat = entry.stat()
                is_part = entry.name.endswith(".incomplete")
                written = min(stat.st_size, stat.st_blocks * 512)
                num_bytes += written if is_part else stat.st_size
    return num_bytes


def remove_parts() -> None:
    """Files that this process has open and nobody can go on from."""
    with contextlib.suppress(OSError):  # no /proc: they stay, as after a crash
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                path = os.readlink(entry.path)
                if _UNIQUE_PART.search(path):
                    os.unlink(path)


def remove_stale_parts(blobs: Path, locks: Path) -> None:
    """Those of processes that were killed: nobody has the lock of the file, nor writes it. (Some
    network filesystems give a lock to everybody.)"""
    for part in blobs.glob("*.incomplete"):
        lock = locks / f"{part.name.partition('.')[0]}.lock"
        with contextlib.suppress(OSError):  # gone meanwhile, or locked
            if _UNIQUE_PART.search(part.name) and time.time() - part.stat().st_mtime > _QUIET_S:
                with lock.open("ab") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    part.unlink()


if __name__ == "__main__":
    main()
