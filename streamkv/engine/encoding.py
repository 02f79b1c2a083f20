"""Texts and conversations to token ids, without holding up the event loop.

Owns what is done in a thread, and that huge texts go one by one. It must not know requests.
Invariant: what is too long for the context at first sight is refused before it is tokenized.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol import RunnerInfo
from ..text.chat_messages import num_chars
from ..text.tokenizer import Tokenizer
from .admission import check_num_messages, check_text, check_unicode

LONG_TEXT_CHARS = 8192  # tokenizing more than this would hold up the loop: a thread does it
HUGE_TEXT_CHARS = 1 << 20  # more than this takes a second: one at a time, to leave others threads
MANY_MESSAGES = 256  # rendering more than this would hold up the loop


class Encoder:
    """What an engine does of it; the tokenizer comes with each call."""

    def __init__(self) -> None:
        self._huge_text = asyncio.Lock()

    async def encode(
        self,
        tokenizer: Tokenizer,
        text: str,
        *,
        add_special_tokens: bool = True,
        must_fit_in: RunnerInfo | None = None,
    ) -> list[int]:
        """Token ids of a text. InvalidRequestError; with `must_fit_in`, ContextLengthError for a
        text too long for that context at first sight. One that is not may still be too long."""
        if must_fit_in is None:
            check_unicode(text)
        else:
            check_text(text, tokenizer, must_fit_in)
        encode = functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if len(text) <= LONG_TEXT_CHARS:
            return encode()
        if len(text) <= HUGE_TEXT_CHARS:
            return await asyncio.to_thread(encode)
        async with self._huge_text:
            return await asyncio.to_thread(encode)

    async def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        info: RunnerInfo,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation. InvalidRequestError; ContextLengthError for one with more
        messages than the context has tokens, and for one whose text is too long at first sight."""
        check_num_messages(messages, info)
        render = functools.partial(tokenizer.apply_chat_template, messages, **template_kwargs)
        is_long = (
            len(messages) > MANY_MESSAGES or num_chars(messages, LONG_TEXT_CHARS) > LONG_TEXT_CHARS
        )
        text = await asyncio.to_thread(render) if is_long else render()
        check_text(text, tokenizer, info, "messages")
        return await self.encode(tokenizer, text, add_special_tokens=False)  # the template has them
