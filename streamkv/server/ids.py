"""The ids of answers, as clients see them and as the engine does.

Owns what they begin with, and how they are made. Knows nothing of what they name. Invariant: the
engine's ids are never the same, whatever clients call their requests: who shares a name with
another client learns nothing of it.
"""

from __future__ import annotations

import itertools
import uuid

CHAT, COMPLETION, RESPONSE = "chatcmpl-", "cmpl-", "resp_"
PREFIXES = (CHAT, COMPLETION, RESPONSE)

_numbers = itertools.count()


def answer_id_of(prefix: str, name: str | None) -> str:
    """The id of a new answer, under a name of the client's if there is one."""
    return prefix + (name or uuid.uuid4().hex)


def name_of(answer_id: str) -> str:
    """The name in an answer's id: the client's, if there was one."""
    prefix = next((one for one in PREFIXES if answer_id.startswith(one)), "")
    return answer_id.removeprefix(prefix)


def engine_id_of(answer_id: str) -> str:
    """An id for one of its requests to the engine; each time another."""
    return f"{answer_id}#{next(_numbers)}"
