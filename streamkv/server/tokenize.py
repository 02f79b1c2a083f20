"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shapes.

Owns these endpoints' wire types. Invariant: /tokenize gives the ids that a completion of the same
prompt, or a chat completion of the same messages, would compute. What /tokenize takes is bounded as
a prompt is that is truncated, what /detokenize takes by MAX_DETOKENIZE_TOKENS; long ones run in a
thread, and their JSON is written in pieces.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..engine.async_engine import AsyncEngine
from ..engine.encoding import decode_whole
from ..errors import InvalidRequestError, UnknownModelError
from .json_list import JsonList
from .messages import Documents, Messages, ReasoningEffort, TemplateKwargs, template_arguments
from .request_fields import Name, TokenId
from .tools import Tools
from .wire import NotHonoured, json_response, read_body, ready_engine

MAX_DETOKENIZE_TOKENS = 1 << 20

NOT_HONOURED: NotHonoured = {"media_io_kwargs": (), "mm_processor_kwargs": ()}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`prompt` or `messages`. Special tokens around it: by default with a prompt only, since chat
    templates write their own."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    documents: Documents | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: msgspec.Raw  # list[int]
    token_strs: msgspec.Raw | None = None  # list[str]


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: Name | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def _check_model(engine: AsyncEngine, model: str | None) -> None:
    if model and model not in engine.model_ids:
        served = ", ".join(engine.model_ids)
        raise UnknownModelError(f"model: {model!r} is not served here; expected {served}")


async def tokenize(request: Request) -> Response:
    body = await read_body(request, _tokenize_decoder, not_honoured=NOT_HONOURED)
    engine = ready_engine(request)
    _check_model(engine, body.model)
    token_ids = await _tokens(body, request)
    tokens, strings = JsonList(), JsonList()
    await tokens.extend_long(token_ids, int)
    if body.return_token_strs:
        await strings.extend_long(token_ids, engine.tokenizer.token_text)
    return json_response(
        TokenizeResponse(
            count=len(token_ids),
            max_model_len=engine.info.max_model_len,
            tokens=tokens.raw(),
            token_strs=strings.raw() if body.return_token_strs else None,
        )
    )


async def _tokens(body: TokenizeRequest, request: Request) -> list[int]:
    engine = ready_engine(request)
    if body.messages is None:
        if body.prompt is None:
            raise InvalidRequestError("prompt: expected prompt or messages", param="prompt")
        _check_no_template(body)
        return await engine.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    if body.prompt is not None:
        raise InvalidRequestError("prompt: expected prompt or messages, got both", param="prompt")
    arguments = template_arguments(
        body, request, tools=body.tools or None, reasoning_effort=body.reasoning_effort
    )
    return await engine.encode_chat(body.messages, **arguments)


def _check_no_template(body: TokenizeRequest) -> None:
    for name in ("tools", "documents", "chat_template", "chat_template_kwargs"):
        if getattr(body, name):
            raise InvalidRequestError(
                f"{name}: only allowed with messages; leave it out", param=name
            )


async def detokenize(request: Request) -> Response:
    body = await read_body(request, _detokenize_decoder)
    engine = ready_engine(request)
    _check_model(engine, body.model)
    tokens, vocab_size = body.tokens, engine.info.vocab_size
    if len(tokens) > MAX_DETOKENIZE_TOKENS:
        raise InvalidRequestError(
            f"tokens: expected at most {MAX_DETOKENIZE_TOKENS} token ids, got {len(tokens)}; "
            "send them in parts",
            param="tokens",
        )
    if max(tokens, default=0) >= vocab_size:
        i, token_id = next((i, item) for i, item in enumerate(tokens) if item >= vocab_size)
        raise InvalidRequestError(
            f"tokens[{i}]: expected a token id below {vocab_size}, got {token_id}",
            param=f"tokens[{i}]",
        )
    return json_response(DetokenizeResponse(await decode_whole(engine.tokenizer, tokens)))


routes = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
