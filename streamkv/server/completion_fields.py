"""The fields that chat and completions share, besides those of every generating endpoint.

Owns their Struct. Knows neither endpoint.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ..errors import InvalidRequestError
from ..protocol import MAX_LOGPROBS
from .request_fields import StreamOptions
from .response_format import StructureFields


class CompletionFields(StructureFields, kw_only=True):
    """What chat and completions take besides."""

    echo: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    return_progress: bool | None = None  # of the prompt, in chunks
    stream_options: StreamOptions | None = None

    def checked_stream_options(self) -> StreamOptions:
        """How to stream. InvalidRequestError if that is said where nothing streams."""
        if self.return_progress and not self.stream:
            raise InvalidRequestError(
                "return_progress: only allowed with stream: true; leave it out",
                param="return_progress",
            )
        return StreamOptions.checked(self.stream_options, stream=bool(self.stream))
