"""What the errors of huggingface_hub mean to somebody who wants a model.

Owns the words. Knows the library's errors and nothing of downloads. Invariant: one line that says
what to do, whatever the error.
"""

from __future__ import annotations

import errno
from pathlib import Path

from ..errors import one_line
from .hub_ids import HubId

_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def explain(error: BaseException, hub_id: HubId, cache: Path) -> str:
    """In one line, what is wrong and what to do."""
    from huggingface_hub import constants, errors, get_token

    host = constants.ENDPOINT
    page = f"{host}/{hub_id.repo}"
    token = "another HF_TOKEN" if get_token() else "HF_TOKEN"
    cause = error
    while cause.__cause__ is not None and not (
        isinstance(cause, errors.HfHubHTTPError) or _is_of_network(cause)
    ):
        cause = cause.__cause__
    match cause:
        case errors.OfflineModeIsEnabled():
            return (
                "expected it in the cache, as HF_HUB_OFFLINE is set, but it isn't there; unset it, "
                "or give a folder or .gguf file"
            )
        case errors.GatedRepoError():
            return f"its owner has to let you in: ask on {page}, and set {token} to your token"
        case errors.DisabledRepoError():
            return f"{page} is disabled by the hub; find another repository"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no folder of that name and no {page}, or it is private; check the name, "
                f"or set {token} to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return f"it has no revision {hub_id.revision!r}; see {page}/branches, or leave it out"
        case errors.HfHubHTTPError():
            return _refused(cause, host)
        case OSError(errno=int(number)) if number in _OF_DISK:
            return (
                f"can't write to {cache}: {cause.strerror}; "
                "make room or mend its permissions, or name another folder with --download-dir"
            )
    got = f"{type(cause).__name__}: {one_line(cause)}"
    folder = "or give a folder or .gguf file"
    if _is_of_network(cause):
        return f"can't reach {host} ({got}); check the network, the proxy and HF_ENDPOINT, {folder}"
    if isinstance(cause, (ValueError, TypeError, LookupError)):
        return f"{host} gave an answer that is no hub's ({got}); check HF_ENDPOINT, {folder}"
    return f"the download failed ({got}); try again, {folder}"


def _is_of_network(error: BaseException) -> bool:
    """By name: which of its forks of httpx the library uses depends on its version."""
    return type(error).__module__.startswith("http") or isinstance(error, ConnectionError)


def _refused(error: Exception, host: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    what_to_do = {
        401: "the token is not valid: set HF_TOKEN to one that is, or unset it",
        403: "the token may not read it: set HF_TOKEN to one that may",
        429: "too many requests: wait some minutes, or set HF_TOKEN",
    }.get(status, "try again later")
    return f"{host} answers {status}: {what_to_do}"
