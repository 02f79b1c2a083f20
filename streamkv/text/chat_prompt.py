"""A conversation as a prompt: its text, and its tokens.

Owns that text of control tokens in what a client sent stays text. Knows no requests. Invariant: the
tokens are those of the text, but for control tokens that the client wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InvalidRequestError
from .chat_messages import template_messages
from .chat_template import ChatTemplate
from .control_text import Guard
from .tokenizer import Tokenizer


class ChatPrompt(NamedTuple):
    """What the template made."""

    text: str
    guard: Guard | None = None
    marked: str = ""  # the text with the guard's marks

    def encode(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids. The template writes its special tokens; `add_special_tokens` adds those that
        the checkpoint puts around a text."""
        if self.guard is None:
            return tokenizer.encode(self.text, add_special_tokens=add_special_tokens)
        return self.guard.encode(self.marked, add_special_tokens=add_special_tokens)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    chat_template: str | ChatTemplate | None = None,
    **kwargs: Any,
) -> ChatPrompt:
    """The prompt, by the template that `chat_template` names or is, or the model's. The others are
    what `Tokenizer.apply_chat_template` takes. InvalidRequestError."""
    render: Callable[..., str] = tokenizer.apply_chat_template
    if isinstance(chat_template, ChatTemplate):
        render = chat_template.render
    elif chat_template is not None:
        render = functools.partial(render, chat_template=chat_template)
    try:
        values: Any = (template_messages(messages), kwargs)
        guard = tokenizer.controls.guard(values)
        if guard is not None:
            values = guard.mark(values)
    except RecursionError:
        raise InvalidRequestError(
            "messages: expected lists and objects in one another to some depth, got too many",
            param="messages",
        ) from None
    found, kwargs = values
    if guard is None:
        return ChatPrompt(render(found, **kwargs))
    try:
        text = render(found, **kwargs)
    except InvalidRequestError as error:
        error.message = guard.plain(error.message)
        error.args = (error.message,)
        raise
    return ChatPrompt(guard.plain(text), guard, text)
