"""FolderLock: a folder is one process's, for as long as its file `lock` is the one that it locked.

Owns the folder's making, that file, and the words for a folder that can't be used. Must not know
what else is in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from ..errors import ConfigError
from .kv_segments import OPEN_FLAGS

NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)  # of opening what should be one
NO_FOLDER = (errno.EEXIST, errno.ENOTDIR)  # of making one


class FolderLock:
    """Not taken yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    def take(self) -> None:
        """Make the folder if there is none. OSError; BlockingIOError: another process has it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    def is_there(self) -> bool:
        """Whether the one that is held is still the folder's. OSError."""
        try:
            there = os.lstat(self._folder / "lock")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def release(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def unusable(folder: Path, error: OSError) -> ConfigError:
    """What to say of a folder whose opening failed so."""
    if isinstance(error, BlockingIOError):
        return ConfigError(
            "kv_cache_dir (--kv-cache-dir): expected a folder of this server's own, got "
            f"{folder}, which another one is using; stop that one, or give another folder "
            "with --kv-cache-dir"
        )
    where = Path(error.filename or folder)
    what, remedy = error.strerror or str(error), ""
    if isinstance(error, PermissionError):
        remedy = "fix its permissions, "
    elif where.parent == folder and error.errno in NO_FILE:
        remedy = "delete that, "
    elif error.errno in NO_FOLDER:
        where = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
        what = "it is a file" if where.is_file() else "it is no folder"
    at = "" if where == folder else f"{where}: "
    return ConfigError(
        f"kv_cache_dir (--kv-cache-dir): expected a folder that can be written, got {folder}: "
        f"{at}{what}; {remedy}give another one with --kv-cache-dir, or leave it out"
    )
