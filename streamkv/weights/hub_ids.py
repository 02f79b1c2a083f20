"""Names of models on a hub, as people write and paste them → `HubId`.

Owns their grammar alone: it asks neither disk nor network. Invariant: what it returns is safe as
part of a URL and of a path.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from ..errors import ConfigError, ModelLoadError
from .hub_files import is_read, normal_quant

_SITE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/+|hf://(?:models/)?", re.IGNORECASE
)
_COMPONENT = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_REVISION = re.compile(r"[\w][\w.+-]*(?:/[\w.+-]+)*", re.ASCII)
_QUANT = re.compile(r"[\w.-]+", re.ASCII)
MAX_REPO_CHARS = 96


class NotAHubId(ValueError):
    """Why."""


class HubId(NamedTuple):
    """A repository of a hub, and what of it is meant."""

    repo: str  # org/name
    revision: str = ""  # branch, tag or commit; "": the repository's main branch
    quant: str = ""  # of its .gguf files the one in this format, such as "Q4_K_M"
    file: str = ""  # or the .gguf file of this name


def parse_hub_id(text: str, revision: str = "") -> HubId:
    """`org/name`, `org/name:Q4_K_M`, `org/name/file.gguf`, or the page of one of them.

    NotAHubId for anything else, ModelLoadError for a format that is not read, ConfigError for a
    revision that can't be or contradicts the page's.
    """
    site = _SITE.match(text)
    path, _, quant = text[site.end() if site else 0 :].partition(":")
    if site:
        path = path.partition("#")[0].partition("?")[0].rstrip("/")
    parts, file = path.split("/"), ""
    if site and len(parts) > 3 and parts[2] in ("tree", "blob", "resolve"):
        revision = _one_revision(unquote(parts[3]), revision)
        file = unquote("/".join(parts[4:]))
    elif len(parts) > 2:
        file = "/".join(parts[2:])
    is_other = not site and len(parts) > 2 and not file.endswith(".gguf")
    if is_other or len(parts) < 2 or text.startswith(("/", ".", "~")):
        raise NotAHubId("expected org/name, org/name:Q4_K_M or org/name/file.gguf")
    hub_id = HubId("/".join(parts[:2]), revision, normal_quant(quant), file)
    _check(hub_id, is_url=bool(site))
    return hub_id


def _one_revision(of_page: str, asked: str) -> str:
    if asked and asked != of_page:
        raise ConfigError(
            f"revision: expected the page's own, {of_page!r}, or none, got {asked!r}; leave "
            "--revision out, or give org/name as the model"
        )
    return of_page


def _check(hub_id: HubId, *, is_url: bool) -> None:
    repo, revision, quant, file = hub_id
    parts = repo.split("/")
    if not all(map(_COMPONENT.fullmatch, parts)) or len(repo) > MAX_REPO_CHARS:
        raise NotAHubId(
            f"expected letters, digits, '-', '_' and '.' around one '/', {MAX_REPO_CHARS} "
            "characters at most"
        )
    if "--" in repo or ".." in repo or repo.endswith(".git"):
        raise NotAHubId("expected no '--', '..' or '.git' at the end")
    if not is_url and not file and repo.endswith(".gguf"):
        raise NotAHubId("expected org/name/file.gguf for a file of a repository")
    if file and (not file.endswith(".gguf") or not is_safe(file)):
        raise NotAHubId("expected the name of a .gguf file after org/name/")
    if quant and (file or not _QUANT.fullmatch(quant)):
        raise NotAHubId("expected a format such as Q4_K_M after ':', and no file before it")
    if quant and not is_read(quant):
        raise ModelLoadError(
            f"{repo}:{quant}: expected a format that is read here, such as Q4_K_M, Q4_0, Q5_K_M, "
            f"Q6_K, Q8_0 or BF16, got {quant}; give one of these, or org/name alone for the best"
        )
    if revision and not (_REVISION.fullmatch(revision) and is_safe(revision)):
        raise ConfigError(f"revision: expected a branch, tag or commit, got {revision!r:.100}")


def is_safe(path: str) -> bool:
    """As the name of a file, or of a revision, which is part of one in the cache."""
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(path.split("/"))
