"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shapes.

Owns these endpoints' wire types. Invariant: /tokenize gives the ids that a completion of the same
prompt, or a chat completion of the same messages, would compute.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..engine.async_engine import AsyncEngine
from ..errors import InvalidRequestError, UnknownModelError
from .messages import Messages, TemplateKwargs, template_kwargs, template_messages
from .wire import Name, NotHonoured, TokenId, json_response, read_body, ready_engine

NOT_HONOURED: NotHonoured = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": (),
    "tools": ([],),
}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`prompt` or `messages`. Special tokens around it: by default with a prompt only, since chat
    templates write their own."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


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
    tokens = await _tokens(body, engine)
    strings = [engine.tokenizer.token_text(token_id) for token_id in tokens]
    return json_response(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=engine.info.max_model_len,
            tokens=tokens,
            token_strs=strings if body.return_token_strs else None,
        )
    )


async def _tokens(body: TokenizeRequest, engine: AsyncEngine) -> list[int]:
    if body.messages is None:
        if body.prompt is None:
            raise InvalidRequestError("prompt: expected prompt or messages", param="prompt")
        return await engine.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    if body.prompt is not None:
        raise InvalidRequestError("prompt: expected prompt or messages, got both", param="prompt")
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens: not supported with messages; the chat template writes them",
            param="add_special_tokens",
        )
    return await engine.encode_chat(
        template_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        **template_kwargs(body.chat_template_kwargs, "chat_template_kwargs"),
    )


async def detokenize(request: Request) -> Response:
    body = await read_body(request, _detokenize_decoder)
    engine = ready_engine(request)
    _check_model(engine, body.model)
    vocab_size = engine.info.vocab_size
    for i, token_id in enumerate(body.tokens):
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"tokens[{i}]: expected a token id below {vocab_size}, got {token_id}",
                param=f"tokens[{i}]",
            )
    text = engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text))


routes = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
