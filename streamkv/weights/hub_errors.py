"""What the errors of huggingface_hub mean to somebody who wants a model.

Owns the words. Knows the library's errors and nothing of downloads. Invariant: one line that says
what to do, whatever the error.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from ..errors import one_line
from .hub_ids import HubId

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ELSE = "or give a folder or .gguf file"


def explain(error: BaseException, hub_id: HubId, cache: Path) -> str:
    """In one line, what is wrong and what to do."""
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    page = f"{host}/{hub_id.repo}"
    token = _token()
    to_set = "another HF_TOKEN" if token else "HF_TOKEN"
    cause = error
    while cause.__cause__ is not None and not (
        isinstance(cause, errors.HfHubHTTPError) or _is_of_network(cause)
    ):
        cause = cause.__cause__
    match cause:
        case errors.OfflineModeIsEnabled():
            return (
                "expected it in the cache, as HF_HUB_OFFLINE is set, but it isn't there; unset it, "
                f"{_ELSE}"
            )
        case errors.GatedRepoError():
            return f"its owner has to let you in: ask on {page}, and set {to_set} to your token"
        case errors.DisabledRepoError():
            return f"{page} is disabled by the hub; find another repository"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no folder of that name and no {page}, or it is private; check the name, "
                f"or set {to_set} to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return f"it has no revision {hub_id.revision!r}; see {page}/branches, or leave it out"
        case errors.HfHubHTTPError():
            return _refused(cause, page, token)
        case UnicodeEncodeError() if not token.isascii():
            return "HF_TOKEN: expected a token such as hf_…, got other letters; set it again"
        case OSError() if cause.filename is not None or cause.errno in _DISK_FULL:
            return (
                f"can't use {cause.filename or cache}: {cause.strerror}; make room or mend its "
                "permissions, or name another folder with --download-dir or HF_HOME"
            )
    got = f"{type(cause).__name__}: {one_line(cause)}"
    if _is_of_network(cause):
        return f"can't reach {host} ({got}); check the network, the proxy and HF_ENDPOINT, {_ELSE}"
    if isinstance(cause, (ValueError, TypeError, LookupError)):
        return f"{host} gave an answer that is no hub's ({got}); check HF_ENDPOINT, {_ELSE}"
    return f"the download failed ({got}); try again, {_ELSE}"


def _token() -> str:
    from huggingface_hub import get_token

    with contextlib.suppress(OSError):  # of the file where the library keeps it
        return get_token() or ""
    return ""


def _is_of_network(error: BaseException) -> bool:
    """By name: which of its forks of httpx the library uses depends on its version."""
    return type(error).__module__.startswith("http") or isinstance(error, ConnectionError)


def _refused(error: Exception, page: str, token: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403) and not token:
        return f"{page} answers {status}: it wants a token: set HF_TOKEN to one that may read it"
    to_do = {
        401: "the token is not valid: set HF_TOKEN to one that is, or unset it",
        403: "the token may not read it: set HF_TOKEN to one that may",
        429: "too many requests: wait some minutes, or set HF_TOKEN",
        451: "it may not be given to you for legal reasons; find another repository",
    }
    is_lasting = 400 <= status < 500 and status != 408
    other = f"check the name and HF_ENDPOINT, {_ELSE}" if is_lasting else "try again later"
    return f"{page} answers {status}: {to_do.get(status, other)}"
