"""The Response object of OpenAI's Responses API, as it is written to clients.

Owns its Structs; knows nothing of events, transports or the engine's loop. Names and fields are
those of the official `openai` package (`openai/types/responses/response.py`), and whatever is
built here validates with its models. Everything is frozen: an event may hold a Response and be
encoded later.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Raw, Struct

from ..engine.outputs import TokenLogprob, Usage
from .wire import json_logprob

ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
CacheRetention: TypeAlias = Literal["in_memory", "24h"]


class TopLogprobBody(Struct, frozen=True):
    token: str
    bytes: list[int]
    logprob: float


class LogprobBody(Struct, frozen=True):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprobBody]

    @classmethod
    def build(cls, logprob: TokenLogprob) -> LogprobBody:
        top = [TopLogprobBody(t.token, list(t.bytes), json_logprob(t.logprob)) for t in logprob.top]
        return cls(logprob.token, list(logprob.bytes), json_logprob(logprob.logprob), top)


class OutputText(Struct, frozen=True, kw_only=True, tag="output_text"):
    annotations: tuple[()] = ()
    logprobs: Raw = Raw(b"[]")  # LogprobBody's
    text: str = ""


class OutputMessage(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...] = ()


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # counts explicit cache writes, which are not offered


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int

    @classmethod
    def build(cls, usage: Usage) -> ResponseUsage:
        return cls(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.num_cached_tokens),
            output_tokens=usage.num_generated_tokens,
            total_tokens=usage.num_prompt_tokens + usage.num_generated_tokens,
        )


class ResponseError(Struct, frozen=True, kw_only=True):
    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class TextFormat(Struct, frozen=True, tag="text"): ...


class TextConfig(Struct, frozen=True):
    format: TextFormat = TextFormat()


class Response(Struct, frozen=True, kw_only=True):
    """One response. Null fields are written, as OpenAI does.

    `store` is false whatever was asked: a response lives no longer than its connection.
    `service_tier` names the only tier there is.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int  # unix, seconds
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Mapping[str, str] = {}
    model: str
    output: tuple[OutputMessage, ...] = ()
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float
    text: TextConfig = TextConfig()
    tool_choice: Literal["auto", "none"] = "auto"
    tools: tuple[()] = ()
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None

    @property
    def output_text(self) -> str:
        """All text of the output."""
        return "".join(part.text for item in self.output for part in item.content)


def new_id(prefix: str) -> str:
    """An id of OpenAI's form: `resp_…`, `msg_…`."""
    return f"{prefix}_{uuid.uuid4().hex}"
