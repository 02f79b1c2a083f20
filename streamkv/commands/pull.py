"""`streamkv pull`: fetch a checkpoint before it is needed, and say where it lies.

Owns what is said: the path alone on standard output, for scripts, the rest beside it.
"""

from __future__ import annotations

from ..config import EngineConfig
from ..weights.hub import Checkpoint, checkpoint_files, checkpoint_of
from .terminal import Terminal


def pull(engine_config: EngineConfig) -> int:
    """Fetch what isn't here yet. Returns the exit code."""
    checkpoint = checkpoint_of(engine_config)
    print(checkpoint.path)
    Terminal.standard().notice(describe_size(checkpoint))
    return 0


def describe_size(checkpoint: Checkpoint) -> str:
    files = checkpoint_files(checkpoint)
    num_bytes = sum(path.stat().st_size for path in files)
    in_files = "one file" if len(files) == 1 else f"{len(files)} files"
    return f"{num_bytes / 2**20:,.1f} MiB in {in_files} ({checkpoint.kind})"
