"""Texts and conversations to token ids and back, without holding up the event loop.

Owns what is done in a thread, that huge texts go one by one, and how long one may be. It must not
know requests. Invariant: what is too long for the context at first sight is refused before it is
tokenized, and so is what would take too long, also where only some of its tokens are wanted.

Tokenizing takes hundreds of bytes and a microsecond or more for each character. Which tokens the
end of a text has depends on how all of it is cut into words, so a text is never cut here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ContextLengthError
from ..protocol import RunnerInfo
from ..text.chat_messages import num_chars
from ..text.chat_prompt import render_chat
from ..text.tokenizer import Tokenizer
from .admission import check_num_messages, check_text, check_unicode

LONG_TOKENS_LEN = 8192  # decoding more than this would hold up the loop
LONG_TEXT_CHARS = 8192  # tokenizing more than this would hold up the loop: a thread does it
HUGE_TEXT_CHARS = 1 << 20  # more than this takes a second: one at a time, to leave others threads
MOST_CHARS_PER_TOKEN = 16  # on average, of a text that fills the context; that of code is 3
MANY_MESSAGES = 256  # rendering more than this would hold up the loop


async def decode_whole(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of whole sequences, special tokens shown; that of a long one in a thread."""
    decode = functools.partial(tokenizer.decode, token_ids, skip_special_tokens=False)
    return await asyncio.to_thread(decode) if len(token_ids) > LONG_TOKENS_LEN else decode()


class Encoder:
    """What an engine does of it; the tokenizer comes with each call."""

    def __init__(self) -> None:
        self._huge_text = asyncio.Lock()
        self._own_template = asyncio.Lock()  # a request's may take its time: one thread does them

    async def encode(
        self,
        tokenizer: Tokenizer,
        text: str,
        info: RunnerInfo,
        *,
        add_special_tokens: bool = True,
        must_fit: bool = False,
    ) -> list[int]:
        """Token ids of a text. InvalidRequestError; ContextLengthError for one of too many
        characters, or, if it `must_fit`, too long for the context at first sight. One that is not
        may still be too long."""
        if must_fit:
            check_text(text, tokenizer, info)
        else:
            check_unicode(text)
        check_num_chars(text, info)
        encode = functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._encode(len(text), encode)

    async def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        info: RunnerInfo,
        /,
        *,
        add_special_tokens: bool = False,
        must_fit: bool = True,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation; the options are those of `render_chat`. Text of control
        tokens in it stays text. InvalidRequestError; ContextLengthError for one of too many
        characters, or, if it `must_fit`, with more messages than the context has tokens, or whose
        text is too long at first sight."""
        if must_fit:
            check_num_messages(messages, info)
        render = functools.partial(render_chat, tokenizer, messages, **options)
        if options.get("chat_template") is not None:
            async with self._own_template:
                prompt = await asyncio.to_thread(render)
        elif is_long(messages, options):
            prompt = await asyncio.to_thread(render)
        else:
            prompt = render()
        if must_fit:
            check_text(prompt.text, tokenizer, info, "messages")
        else:
            check_unicode(prompt.text, "messages")
        check_num_chars(prompt.text, info, "messages")
        encode = functools.partial(prompt.encode, tokenizer, add_special_tokens=add_special_tokens)
        if prompt.guard is not None and not tokenizer.controls.is_ready:
            return await asyncio.to_thread(encode)
        return await self._encode(len(prompt.text), encode)

    async def _encode(self, num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
        if num_chars <= LONG_TEXT_CHARS:
            return encode()
        if num_chars <= HUGE_TEXT_CHARS:
            return await asyncio.to_thread(encode)
        async with self._huge_text:
            return await asyncio.to_thread(_encode_huge, encode)


def max_num_chars(info: RunnerInfo) -> int:
    """How many characters of one text are tokenized."""
    return max(HUGE_TEXT_CHARS, MOST_CHARS_PER_TOKEN * info.max_model_len)


def check_num_chars(text: str, info: RunnerInfo, name: str = "prompt") -> None:
    """ContextLengthError if the text has too many characters to be tokenized."""
    longest = max_num_chars(info)
    if len(text) > longest:
        raise ContextLengthError(
            f"{name}: expected at most {longest} characters, with a context of "
            f"{info.max_model_len} tokens, got {len(text)}; send less, only the end where the rest "
            "is to be cut off",
            param=name,
        )


def _encode_huge(encode: Callable[[], list[int]]) -> list[int]:
    """With its memory given back, which the allocator would keep."""
    try:
        return encode()
    finally:
        with contextlib.suppress(OSError, AttributeError):  # another C library keeps little
            ctypes.CDLL(None).malloc_trim(0)


def is_long(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> bool:
    """Whether rendering them would hold up the loop."""
    if len(messages) > MANY_MESSAGES:
        return True
    return num_chars([messages, options], LONG_TEXT_CHARS) > LONG_TEXT_CHARS
