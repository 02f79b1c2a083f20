"""From a conversation to the tokens that the model reads.

Owns how a conversation that is too long is cut (`truncation`), and how one that was steered goes on
from the very tokens of the answer before. Knows no request and no transport. Invariants: what is
dropped is the oldest, whole turns of it, and never the instructions nor the last message; a prompt
that goes on begins with the tokens it goes on from.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...engine.async_engine import AsyncEngine
from ...errors import ContextLengthError, InvalidRequestError
from ...protocol import pack_ints
from .input import off_loop
from .items import TemplateMessage, messages_of
from .store import Turn

SHARE_FOR_ANSWER = 4  # a quarter of the context, where a prompt is cut and no limit was given
_MARK_LEN = 16


class Template(NamedTuple):
    """What the chat template is told besides the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    async def encode(self, engine: AsyncEngine, messages: Sequence[TemplateMessage]) -> list[int]:
        return await engine.encode_chat(messages, tools=self.tools, **self.variables)


async def to_messages(turn: Turn, most: int) -> list[TemplateMessage]:
    """The end of the conversation as a template reads it: all of it, or at least `most` items."""
    return await off_loop(turn.num_items, lambda: messages_of(turn.last(most)))


async def encode_truncated(
    engine: AsyncEngine,
    messages: Sequence[TemplateMessage],
    template: Template,
    *,
    fixed: Sequence[TemplateMessage],
    max_output_tokens: int | None,
) -> list[int]:
    """The prompt of `fixed` messages and as much of the end of the others as the context has room
    for. ContextLengthError if the last one alone is too long."""
    context = engine.info.max_model_len
    most = context - (max_output_tokens or 1)
    whole = await _fitting(engine, [*fixed, *messages], template, most)
    if whole is not None:
        return whole
    if max_output_tokens is None:
        most = context - context // SHARE_FOR_ANSWER
    starts = [i for i, message in enumerate(messages) if message["role"] == "user" and i]
    starts = starts or [max(len(messages) - 1, 0)]
    low, high, best = 0, len(starts) - 1, None
    while low < high:  # a later start makes a shorter prompt
        middle = (low + high) // 2
        found = await _fitting(engine, [*fixed, *messages[starts[middle] :]], template, most)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    if best is not None:
        return best
    return await template.encode(engine, [*fixed, *messages[starts[low] :]])


async def _fitting(
    engine: AsyncEngine, messages: Sequence[TemplateMessage], template: Template, most: int
) -> list[int] | None:
    """The prompt, if it has at most so many tokens."""
    if len(messages) > most:
        return None
    try:
        prompt = await template.encode(engine, messages)
    except ContextLengthError:
        return None
    return prompt if len(prompt) <= most else None


async def continue_prompt(
    engine: AsyncEngine,
    before: Sequence[int],
    messages: Sequence[TemplateMessage],
    template: Template,
    *,
    answer: int,
    closing: str,
) -> list[int] | None:
    """The tokens `before`, a prompt and its answer, and what the template writes between that
    answer, `messages[answer]`, and the next one. `closing` ends a part of the answer that was left
    open. None if the template doesn't show where the answer ends.
    """
    mark = "".join(secrets.choice(string.ascii_lowercase) for _ in range(_MARK_LEN))
    marked = [*messages]
    marked[answer] = {"role": "assistant", "content": mark}
    try:
        whole = await template.encode(engine, marked)
    except InvalidRequestError:
        return None
    mark_ids = await engine.encode(mark, add_special_tokens=False)
    end = _find_last(whole, mark_ids)
    if end is None:
        return None
    ids = list(before)
    eos_token_ids = engine.tokenizer.eos_token_ids
    while ids and ids[-1] in eos_token_ids:  # the template writes its own
        ids.pop()
    if closing:
        ids += await engine.encode(closing, add_special_tokens=False)
    return ids + whole[end:]


def _find_last(ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where the last place of these tokens ends."""
    haystack, needle = pack_ints(ids), pack_ints(wanted)
    width = len(pack_ints((0,)))
    end = len(haystack)
    while (place := haystack.rfind(needle, 0, end)) >= 0:
        if place % width == 0:
            return place // width + len(wanted)
        end = place + len(needle) - 1
    return None
