"""The Response object of OpenAI's Responses API, as it is written to clients.

Owns its Structs and those of its output items; knows nothing of events, transports or the engine's
loop. Names and fields are those of the official `openai` package
(`openai/types/responses/response.py`), and whatever is built here validates with its models.
Everything is frozen: an event may hold a Response and be encoded later.

Ids: a response is `resp_NAME`, and its items are `msg_NAME_0`, `fc_NAME_1` ...: an item's id tells
whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import UNSET, Raw, Struct, UnsetType

from ...engine.outputs import Usage
from ..ids import RESPONSE, answer_id_of

ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "cancelled", "failed"
]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
CacheRetention: TypeAlias = Literal["in_memory", "24h"]
ENDED: frozenset[ResponseStatus] = frozenset({"completed", "incomplete", "cancelled", "failed"})

MESSAGE, REASONING, CALL, CALL_OUTPUT = "msg", "rs", "fc", "fco"  # which items ids begin so


def response_id_of(name: str | None) -> str:
    """The id of a new response, under a name of the client's if there is one."""
    return answer_id_of(RESPONSE, name)


def item_id_of(kind: str, response_id: str, index: int | str) -> str:
    """The id of a response's item: `msg_…`, `fc_…`, `rs_…`."""
    return f"{kind}_{response_id.removeprefix(RESPONSE)}_{index}"


def owner_of_item(item_id: str) -> str:
    """The id of the response that made an item of that id, if one did."""
    name = item_id.partition("_")[2].rpartition("_")[0]
    return RESPONSE + name


# --- what is in the output --------------------------------------------------------------------


class OutputText(Struct, frozen=True, kw_only=True, tag="output_text"):
    annotations: tuple[()] = ()
    logprobs: Raw = Raw(b"[]")  # ContentLogprob's
    text: str = ""


class ReasoningText(Struct, frozen=True, kw_only=True, tag="reasoning_text"):
    text: str = ""


class OutputMessage(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...] = ()


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning"):
    """What the model thought, as it is: there is nothing to summarize or to encrypt it."""

    id: str
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...] = ()
    encrypted_content: None = None
    status: ItemStatus = "in_progress"


class FunctionCall(Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""  # JSON
    status: ItemStatus = "in_progress"


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCall


# --- the response -----------------------------------------------------------------------------


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
    def build(cls, usage: Usage, *, num_reasoning_tokens: int = 0) -> ResponseUsage:
        return cls(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.num_cached_tokens),
            output_tokens=usage.num_generated_tokens,
            output_tokens_details=OutputTokensDetails(num_reasoning_tokens),
            total_tokens=usage.num_prompt_tokens + usage.num_generated_tokens,
        )


class ResponseError(Struct, frozen=True, kw_only=True):
    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens", "steered"]


class TextFormat(Struct, frozen=True, kw_only=True):
    """`{"type": "text"}`, or what the client asked for."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType = UNSET
    schema: Raw | UnsetType = UNSET  # as the client wrote it
    description: str | None | UnsetType = UNSET
    strict: bool | None | UnsetType = UNSET


class TextConfig(Struct, frozen=True):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class ReasoningConfig(Struct, frozen=True):
    effort: str | None = None
    summary: None = None


class Response(Struct, frozen=True, kw_only=True):
    """One response. Null fields are written, as OpenAI does.

    `store` tells whether it can be retrieved later. `service_tier` names the only tier there is.
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
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    reasoning: ReasoningConfig = ReasoningConfig()
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float
    text: TextConfig = TextConfig()
    tool_choice: Raw = Raw(b'"auto"')  # as the client wrote it: small, and as large as it looks
    tools: Raw = Raw(b"[]")  # as the client wrote them
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None

    @property
    def output_text(self) -> str:
        """All text of the output's messages."""
        return "".join(
            part.text
            for item in self.output
            if isinstance(item, OutputMessage)
            for part in item.content
        )

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """The function calls of the output: the client's to answer."""
        return tuple(item for item in self.output if isinstance(item, FunctionCall))
