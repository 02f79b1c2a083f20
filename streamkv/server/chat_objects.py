"""What /v1/chat/completions answers: the completion and its chunks.

Owns these wire types, OpenAI's names and shapes with vLLM's additions. Knows nothing of how they
are made. Invariant: a chunk has no more fields than it needs; a whole answer has all of them.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from .logprobs import ChatLogprobs, PromptLogprob
from .request_fields import Usage


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning has both names that clients look for. `content` is null where tools were called
    without a word, or had to be called."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The first of a call has `id`, `type` and the function's name, the others more arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET  # in a choice's last chunk
    token_ids: tuple[int, ...] | UnsetType = UNSET


class PromptProgress(msgspec.Struct, frozen=True):
    """llama.cpp's: how many tokens of the prompt are computed. What the cache had counts too."""

    total: int
    processed: int
    cache: int


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET  # of more positions
    prompt_progress: PromptProgress | UnsetType = UNSET
