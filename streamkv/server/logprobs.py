"""Log-probabilities as they are written: OpenAI's shapes, of chat and responses and of completions,
and vLLM's of prompts.

Owns these shapes and the names of tokens in them. Knows nothing of requests. Invariants: no number
is NaN or infinite; of what was generated all bytes joined are the text that is shown; an offset is
of the character, in the text that is shown, that the token's first byte belongs to.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from ..engine.stream import TokenLogprob
from ..errors import InvalidRequestError
from ..text.tokenizer import Tokenizer
from .json_list import JsonList
from .wire import json_logprob

# --- chat and responses -----------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's shape. `content` has an entry for each token, as it was sampled: also for those of
    reasoning and tool calls; those that the text doesn't show (special tokens, the end token) have
    no bytes."""

    content: list[ContentLogprob] | msgspec.Raw
    refusal: None = None


def content_logprobs(
    items: Sequence[TokenLogprob], *, as_ids: bool = False
) -> list[ContentLogprob]:
    """The entries of these tokens; `as_ids`: they are called by their ids."""
    return [
        ContentLogprob(
            _id_name(item.token_id) if as_ids else item.token,
            json_logprob(item.logprob),
            list(item.bytes),
            [
                TopLogprob(
                    _id_name(top.token_id) if as_ids else top.token,
                    json_logprob(top.logprob),
                    list(top.bytes),
                )
                for top in item.top
            ],
        )
        for item in items
    ]


# --- completions ------------------------------------------------------------------------------


class Logprobs(msgspec.Struct, frozen=True):
    """Four parallel lists, one entry per token, also for those that the text doesn't show. The
    first token of an echoed prompt follows nothing: it has no log-probability."""

    tokens: Sequence[str] | msgspec.Raw
    token_logprobs: Sequence[float | None] | msgspec.Raw
    top_logprobs: Sequence[dict[str, float] | None] | msgspec.Raw
    text_offset: Sequence[int] | msgspec.Raw


class LogprobWriter:
    """OpenAI's lists for one choice, from chunk to chunk."""

    def __init__(self, num_top: int, *, as_ids: bool, num_chars: int = 0) -> None:
        """`num_top` of the most likely tokens are shown; `num_chars` of text come before the first
        token."""
        self._num_top = num_top
        self._as_ids = as_ids
        self.num_chars = num_chars  # of the text so far
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, items: Sequence[TokenLogprob]) -> Logprobs:
        """The next tokens' entries."""
        entries = Logprobs([], [], [], [])
        for item in items:
            self._add(entries, item, item.bytes)
        return entries

    def write_prompt(
        self,
        first: int,
        items: Sequence[TokenLogprob | None],
        pieces: Sequence[bytes],
        tokenizer: Tokenizer,
    ) -> Logprobs:
        """The entries of the next tokens of an echoed prompt, which add these pieces to its text.
        What is None is the prompt's first token, `first`."""
        entries = Logprobs([], [], [], [])
        for item, piece in zip(items, pieces, strict=True):
            if item is not None:
                self._add(entries, item, piece)
                continue
            name = self._name(first, tokenizer.token_text(first), tokenizer.token_bytes(first))
            self._append(entries, name, None, None, piece)
        return entries

    def _add(self, entries: Logprobs, item: TokenLogprob, piece: bytes) -> None:
        name, value = self._name(item.token_id, item.token, item.bytes), json_logprob(item.logprob)
        top = {
            self._name(other.token_id, other.token, other.bytes): json_logprob(other.logprob)
            for other in item.top[: self._num_top]
        }
        self._append(entries, name, value, {**top, name: value}, piece)

    def _append(
        self,
        entries: Logprobs,
        name: str,
        value: float | None,
        top: dict[str, float] | None,
        piece: bytes,
    ) -> None:
        for column, entry in zip(
            msgspec.structs.astuple(entries), (name, value, top, self.num_chars), strict=True
        ):
            column.append(entry)
        self.num_chars += len(self._decoder.decode(piece))

    def _name(self, token_id: int, token: str, data: bytes) -> str:
        """The token's text; its bytes, as OpenAI writes them, when it is part of a character."""
        if self._as_ids:
            return _id_name(token_id)
        if "\N{REPLACEMENT CHARACTER}" not in token or not data:
            return token
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class LogprobLists:
    """All entries of one choice, as JSON that takes little memory."""

    def __init__(self, entries: Logprobs | None = None) -> None:
        self._lists = [JsonList() for _ in Logprobs.__struct_fields__]
        if entries is not None:
            self.extend(entries)

    def extend(self, entries: Logprobs) -> None:
        for column, more in zip(self._lists, msgspec.structs.astuple(entries), strict=True):
            column.extend(more)

    def whole(self, before: LogprobLists | None = None) -> Logprobs:
        """All of them, after those of another."""
        if before is None:
            return Logprobs(*(column.raw() for column in self._lists))
        pairs = zip(before._lists, self._lists, strict=True)
        return Logprobs(*(first.raw(column) for first, column in pairs))


# --- prompts ----------------------------------------------------------------------------------


MAX_NUM_SCORES = 1 << 21  # log-probabilities of prompts in an answer: about 100 MB of JSON


def check_num_scores(num_positions: int, num_top: int | None) -> None:
    """InvalidRequestError for more than an answer may have."""
    num_scores = num_positions * (1 + (num_top or 0))
    if num_scores > MAX_NUM_SCORES:
        raise InvalidRequestError(
            f"prompt: expected at most {MAX_NUM_SCORES} log-probabilities of prompts in an answer, "
            f"got {num_scores}; send fewer prompts, or ask for fewer of the most likely tokens",
            param="prompt",
        )


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


def prompt_logprobs(
    items: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's shape: for each position its token first, then `num_top` of the most likely ones."""
    return [None if item is None else _position(item, num_top) for item in items]


def _position(item: TokenLogprob, num_top: int) -> dict[int, PromptLogprob]:
    own = PromptLogprob(json_logprob(item.logprob), item.rank, item.token)
    found = {item.token_id: own}
    for rank, top in enumerate(item.top[:num_top], start=1):
        found.setdefault(top.token_id, PromptLogprob(json_logprob(top.logprob), rank, top.token))
    return found


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"
