"""Prompts and conversations as `LLM` takes them, in all their forms, and as token ids.

Owns the forms, and the names that errors give to what was wrong (`prompts[3]`). It must not know
the engine. Invariant: what is returned are prompts that fit in the context.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from ..errors import InvalidRequestError
from ..plain import plain
from ..protocol import RunnerInfo
from ..text.chat_prompt import render_chat
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .admission import (
    check_name,
    check_num_messages,
    check_prompt,
    check_text,
    check_unicode,
)

_FORMS = "expected text, token ids, or a dict with prompt or prompt_token_ids"


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # shown in the output
    cache_salt: NotRequired[str]


class Prompt(NamedTuple):
    """One prompt, ready to run."""

    name: str  # prompts[3], for errors
    text: str | None  # None if it was given as token ids
    token_ids: tuple[int, ...]
    cache_salt: str = ""


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Have an error say that it is about `name`: in place of "prompt" and "messages", at which
    messages begin, or before anything else."""
    try:
        yield
    except InvalidRequestError as error:
        message, found = re.subn(r"^(prompt|messages)(?=[:.\[])", lambda _: name, error.message)
        error.message = message if found else f"{name}: {message}"
        error.args = (error.message,)
        error.param = name if found or not error.param else f"{name}.{error.param}"
        raise


class Asked(NamedTuple):
    """One prompt or conversation, as it was given."""

    name: str  # prompts[3], for errors
    given: Any


def split_prompts(prompts: object) -> list[Asked]:
    """The prompts of `LLM.generate`, in order. InvalidRequestError."""
    return _split(prompts, "prompts", (str, Mapping), (int,), _FORMS)


def split_chats(messages: object) -> list[Asked]:
    """The conversations of `LLM.chat`, in order. InvalidRequestError."""
    return _split(messages, "messages", (), (Mapping,), "expected a list of messages")


def read_prompt(
    asked: Asked, tokenizer: Tokenizer, info: RunnerInfo, num_kept: int | None = None
) -> Prompt:
    """With the last `num_kept` of its tokens. InvalidRequestError, ContextLengthError."""
    with naming(asked.name):
        return _read_prompt(asked.name, asked.given, tokenizer, info, num_kept)


def read_chat(
    asked: Asked,
    tokenizer: Tokenizer,
    info: RunnerInfo,
    num_kept: int | None = None,
    *,
    chat_template: ChatTemplate | None,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> Prompt:
    """As a template makes a prompt of it: `chat_template`, or the model's; with the last `num_kept`
    of its tokens. InvalidRequestError, ContextLengthError."""
    with naming(asked.name):
        _check_chat(asked.given)
        if num_kept is None:
            check_num_messages(asked.given, info)
        prompt = render_chat(
            tokenizer,
            asked.given,
            chat_template=chat_template,
            continue_final_message=continue_final_message,
            **variables,
        )
        if num_kept is None:
            check_text(prompt.text, tokenizer, info)
        token_ids = _last(prompt.encode(tokenizer), num_kept)
        return Prompt(asked.name, prompt.text, token_ids)


def _split(
    given: object,
    name: str,
    single_types: tuple[type, ...],
    item_types: tuple[type, ...],
    expected: str,
) -> list[Asked]:
    """Each of several, or the one that was given: one of `single_types`, or a sequence of
    `item_types`."""
    given = plain(given)
    is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray))
    if is_list and isinstance(given, Sequence):
        if not given or not isinstance(plain(given[0]), item_types):
            return [Asked(f"{name}[{index}]", one) for index, one in enumerate(given)]
    elif not isinstance(given, single_types):
        raise InvalidRequestError(
            f"{name}: {expected}, or a list of those, got {type(given).__name__}", param=name
        )
    return [Asked(name, given)]


def _read_prompt(
    name: str, prompt: object, tokenizer: Tokenizer, info: RunnerInfo, num_kept: int | None
) -> Prompt:
    text, cache_salt = None, ""
    if isinstance(prompt, Mapping):
        fields = {key: value for key, value in prompt.items() if value is not None}
        text, cache_salt = fields.pop("prompt", None), fields.pop("cache_salt", "")
        check_name("cache_salt", cache_salt)
        prompt = fields.pop("prompt_token_ids", text)
        if fields or prompt is None:
            got = ", ".join(map(str, fields)) or "none of them"
            raise InvalidRequestError(f"prompt: {_FORMS}, got {got}", param="prompt")
    checked = check_prompt(prompt, info, num_kept)
    if isinstance(checked, tuple):
        return Prompt(name, text, checked, cache_salt)
    if num_kept is None:
        check_text(checked, tokenizer, info)
    else:
        check_unicode(checked)
    return Prompt(name, checked, _last(tokenizer.encode(checked), num_kept), cache_salt)


def _last(token_ids: Sequence[int], num_kept: int | None) -> tuple[int, ...]:
    return tuple(token_ids if num_kept is None else token_ids[-num_kept:])


def _check_chat(chat: object) -> None:
    if not isinstance(chat, Sequence) or isinstance(chat, (str, bytes)) or not chat:
        got = type(chat).__name__ if chat else "none"
        raise InvalidRequestError(f"messages: expected a list of messages, got {got}")
