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
from ..text.chat_messages import template_messages
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .admission import (
    check_name,
    check_num_messages,
    check_prompt,
    check_text,
)

_FORMS = "expected text, token ids, or a dict with prompt or prompt_token_ids"
# A space at its end: where a template strips the message, that is missing, and tells of it.
_MARK = "<<the message goes on here>> "


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


def read_prompts(prompts: object, tokenizer: Tokenizer, info: RunnerInfo) -> list[Prompt]:
    """The prompts of `LLM.generate`, in order. InvalidRequestError, ContextLengthError."""
    found = []
    for name, prompt in _split(prompts, "prompts", (str, Mapping), (int,), _FORMS):
        with naming(name):
            found.append(_read_prompt(name, prompt, tokenizer, info))
    return found


def read_chats(
    messages: object,
    tokenizer: Tokenizer,
    info: RunnerInfo,
    *,
    chat_template: str | None,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> list[Prompt]:
    """The conversations of `LLM.chat`, as a template makes prompts of them: `chat_template`, or the
    model's. InvalidRequestError, ContextLengthError, ModelLoadError for a broken template."""
    template = None
    if chat_template is not None:
        template = ChatTemplate(chat_template, tokenizer.special_tokens)
    found = []
    for name, chat in _split(messages, "messages", (), (Mapping,), "expected a list of messages"):
        with naming(name):
            _check_chat(chat, info)
            ask = template_messages(chat)
            if continue_final_message:
                ask[-1]["content"] += _MARK
            render = tokenizer.apply_chat_template if template is None else template.render
            text = render(ask, **variables)
            text = _up_to_mark(text) if continue_final_message else text
            check_text(text, tokenizer, info)
            # The template has the special tokens.
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        found.append(Prompt(name, text, token_ids))
    return found


def _split(
    given: object,
    name: str,
    single_types: tuple[type, ...],
    item_types: tuple[type, ...],
    expected: str,
) -> list[tuple[str, Any]]:
    """Name and value of each of several, or of the one that was given: one of `single_types`, or a
    sequence of `item_types`."""
    given = plain(given)
    is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray))
    if is_list and isinstance(given, Sequence):
        if not given or not isinstance(plain(given[0]), item_types):
            return [(f"{name}[{index}]", one) for index, one in enumerate(given)]
    elif not isinstance(given, single_types):
        raise InvalidRequestError(
            f"{name}: {expected}, or a list of those, got {type(given).__name__}", param=name
        )
    return [(name, given)]


def _read_prompt(name: str, prompt: object, tokenizer: Tokenizer, info: RunnerInfo) -> Prompt:
    text, cache_salt = None, ""
    if isinstance(prompt, Mapping):
        fields = {key: value for key, value in prompt.items() if value is not None}
        text, cache_salt = fields.pop("prompt", None), fields.pop("cache_salt", "")
        check_name("cache_salt", cache_salt)
        prompt = fields.pop("prompt_token_ids", text)
        if fields or prompt is None:
            got = ", ".join(map(str, fields)) or "none of them"
            raise InvalidRequestError(f"prompt: {_FORMS}, got {got}", param="prompt")
    checked = check_prompt(prompt, info)
    if isinstance(checked, tuple):
        return Prompt(name, text, checked, cache_salt)
    check_text(checked, tokenizer, info)
    return Prompt(name, checked, tuple(tokenizer.encode(checked)), cache_salt)


def _check_chat(chat: object, info: RunnerInfo) -> None:
    if not isinstance(chat, Sequence) or isinstance(chat, (str, bytes)) or not chat:
        got = type(chat).__name__ if chat else "none"
        raise InvalidRequestError(f"messages: expected a list of messages, got {got}")
    check_num_messages(chat, info)


def _up_to_mark(text: str) -> str:
    """The prompt up to the mark; without the spaces before it if the template strips messages."""
    begin = text.rfind(_MARK.rstrip())
    if begin < 0:
        raise InvalidRequestError(
            "messages: the chat template leaves the last one out, so it can't be continued; leave "
            "continue_final_message out"
        )
    return text[:begin] if text.startswith(_MARK, begin) else text[:begin].rstrip()
