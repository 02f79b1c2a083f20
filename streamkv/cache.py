"""The folder that keeps what is made or brought once: models, packed weights, a machine's tuning.

Owns where it is. What is in it can always be made again: losing it costs time alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError


def cache_dir() -> Path:
    """STREAMKV_CACHE, else XDG_CACHE_HOME/streamkv, else ~/.cache/streamkv. ConfigError where that
    takes a home folder and there is none."""
    own, shared = os.environ.get("STREAMKV_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared) if shared else Path.home() / ".cache") / "streamkv"
    except RuntimeError as error:
        got = f"STREAMKV_CACHE={own}" if own else "no home folder"
        raise ConfigError(
            f"the cache folder: expected a folder that can be written, got {got} ({error}): set "
            "STREAMKV_CACHE to one"
        ) from error
