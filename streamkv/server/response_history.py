"""The conversations that `previous_response_id` can go on from.

Owns what one connection remembers of its finished responses; knows nothing of lanes or sockets.
Invariant: the conversations kept take no more than `max_bytes`; the oldest go first.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

from ..errors import InvalidRequestError
from .response_object import Response
from .response_request import TemplateMessage


class ResponseHistory:
    """Finished responses by id. Owner: the connection."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._conversations: OrderedDict[str, list[TemplateMessage]] = OrderedDict()

    def add(self, response: Response, conversation: Sequence[TemplateMessage]) -> None:
        """Keep what a next turn goes on from: the conversation and this response's text."""
        kept = list(conversation)
        if response.output:
            kept.append(TemplateMessage(role="assistant", content=response.output_text))
        self._num_bytes -= _size_bytes(self._conversations.pop(response.id, ()))
        self._conversations[response.id] = kept
        self._num_bytes += _size_bytes(kept)
        while self._num_bytes > self._max_bytes:
            _, dropped = self._conversations.popitem(last=False)
            self._num_bytes -= _size_bytes(dropped)

    def conversation(self, response_id: str | None) -> Sequence[TemplateMessage]:
        """The conversation that ends with this response; none for None."""
        if response_id is None:
            return ()
        if response_id not in self._conversations:
            raise previous_response_not_found(
                response_id,
                "it is not a finished response of this connection, or was dropped for newer ones; "
                "send the whole conversation as input",
            )
        return self._conversations[response_id]


def _size_bytes(conversation: Sequence[TemplateMessage]) -> int:
    # What turns share is counted for each of them: the limit is never exceeded.
    return sum(sys.getsizeof(message["content"]) for message in conversation)


def previous_response_not_found(response_id: str, why: str) -> InvalidRequestError:
    """OpenAI's error for a `previous_response_id` that leads nowhere."""
    return InvalidRequestError(
        f"previous_response_id: no response {response_id!r} here: {why}",
        param="previous_response_id",
        code="previous_response_not_found",
    )
