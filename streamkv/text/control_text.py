"""Text of control tokens in what clients send: it stays text.

Owns how such text is told from the marks that the chat template writes, and how a prompt with both
becomes tokens. Knows no messages and no templates. Invariants: a special token is in the tokens of
a guarded prompt only where the template wrote it; without text of such tokens the ids are those
that `encode` gives.

A guard puts a character that occurs nowhere into each text of a special token before the template
sees it. What has none in it afterwards is the template's. For tokenizing, both change places: the
template's marks are what a second tokenizer, which shares the first one's model, knows as special
tokens, spelled with characters that nobody can guess; what the client wrote is as it was. So words
are cut and merged as if it were any other text.

Tokens that match only between words (`single_word`), or not as they are spelled (since their text
is normalized first, and changes), are not told apart; hardly a chat model has any.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from ..errors import InvalidRequestError

_MARKS = range(0xF0000, 0x10FFFE)  # Unicode's planes for private use
_SECRET = range(0xFDD0, 0xFDF0)  # code points that never stand for a character
_SECRET_LEN = 16


class ControlText:
    """The special tokens of one tokenizer. Immutable, for any thread."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = sorted(backend.get_added_tokens_decoder().items())
        normalizer = backend.normalizer
        guarded = {t.content: t for _, t in self._added if _can_be_guarded(t, normalizer)}
        self._guarded_texts = texts = frozenset(guarded)
        self._firsts = {text[0] for text in texts}
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        # What the model itself may make of text, were its merges so; the unknown token stands for
        # any text.
        model = backend.model
        unknown = getattr(model, "unk_token", None)
        self._of_the_model = {
            token_id: text
            for token_id, text in ((model.token_to_id(text), text) for text in texts)
            if token_id is not None and text != unknown
        }
        self._longest = max(map(len, texts), default=0)
        pattern = _any_of(sorted(texts)) if texts else r"(?!)"
        self._mark = re.compile(pattern)
        self._starts = re.compile(f"(?=({pattern}))")
        # A normalizer may make the text of a token of something else.
        self._always = normalizer is not None and any(t.normalized for t in guarded.values())

    @property
    def is_ready(self) -> bool:
        """Whether the second tokenizer is there; making it takes milliseconds."""
        return "_guarded" in vars(self)

    def guard(self, *values: Any) -> Guard | None:
        """What tells the text of control tokens in these values from a template's; None if there
        is none of it."""
        strings = list(_strings(values))
        if not self._always and not any(map(self._occurs, strings)):
            return None
        used = set().union(*strings)
        char = next((mark for mark in map(chr, _MARKS) if mark not in used), None)
        if char is None:
            raise InvalidRequestError(
                "messages: expected text, got every character for private use", param="messages"
            )
        return Guard(self, char)

    def marked(self, text: str, char: str) -> str:
        """The text with `char` in each control token's text, and in what may begin one."""
        if self._firsts.isdisjoint(text):
            return text
        found = {match.start() for match in self._starts.finditer(text)}
        places = [place + 1 for place in sorted(found.union(self._begun(text)))]
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        return char.join(pieces)

    def encode(self, text: str, char: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text with marks, written by a template."""
        secret, backend, ids = self._guarded
        text = self._mark.sub(lambda match: _spelled(match[0], secret), text).replace(char, "")
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        found = []
        for token_id, is_around in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if token_id in self._of_the_model and not is_around:
                raise InvalidRequestError(
                    f"messages: expected no text of {self._of_the_model[token_id]!r}, got some, "
                    "which this model's tokenizer can't write as text; leave it out",
                    param="messages",
                )
            found.append(token_id if is_around else ids.get(token_id, token_id))
        return found

    def _occurs(self, text: str) -> bool:
        if not any(first in text for first in self._firsts):
            return False
        return self._mark.search(text) is not None or next(self._begun(text), None) is not None

    def _begun(self, text: str) -> Iterator[int]:
        """Where at its end a control token may begin, which another text would complete."""
        text_len = len(text)
        for place in range(max(text_len - self._longest + 1, 0), text_len):
            if text[place] in self._firsts and text[place:] in self._beginnings:
                yield place

    @functools.cached_property
    def _guarded(self) -> tuple[str, tokenizers.Tokenizer, Mapping[int | None, int]]:
        """The secret, the tokenizer that knows special tokens by it, and its ids' meaning."""
        secret = "".join(chr(secrets.choice(_SECRET)) for _ in range(_SECRET_LEN))
        backend = tokenizers.Tokenizer(self._backend.model)
        for name in ("normalizer", "pre_tokenizer", "post_processor"):
            if (part := getattr(self._backend, name)) is not None:
                setattr(backend, name, part)
        tokens = {
            token_id: _spelled_token(token, secret)
            if token.content in self._guarded_texts
            else token
            for token_id, token in self._added
        }
        backend.add_special_tokens([token for token in tokens.values() if token.special])
        backend.add_tokens([token for token in tokens.values() if not token.special])
        ids = {backend.token_to_id(token.content): i for i, token in tokens.items()}
        return secret, backend, ids


class Guard:
    """One request's. It outlives neither the request nor its values."""

    def __init__(self, controls: ControlText, char: str) -> None:
        self._controls = controls
        self._char = char

    def mark(self, value: Any) -> Any:
        """The value with marks in its texts, keys too, for a template."""
        if isinstance(value, str):
            return self._controls.marked(value, self._char)
        if isinstance(value, Mapping):
            kind = type(value) if isinstance(value, dict) else dict
            return kind({self.mark(key): self.mark(item) for key, item in value.items()})
        if isinstance(value, Sequence):
            return [self.mark(item) for item in value]
        return value

    def plain(self, text: str) -> str:
        """The rendered text without marks."""
        return text.replace(self._char, "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of the rendered text."""
        return self._controls.encode(text, self._char, add_special_tokens=add_special_tokens)


def _can_be_guarded(
    token: tokenizers.AddedToken, normalizer: tokenizers.normalizers.Normalizer | None
) -> bool:
    if not token.special or token.single_word or not token.content:
        return False
    if normalizer is None or not token.normalized:
        return True
    return normalizer.normalize_str(token.content) == token.content


def _spelled_token(token: tokenizers.AddedToken, secret: str) -> tokenizers.AddedToken:
    """The token as the second tokenizer knows it."""
    flags = {name: getattr(token, name) for name in ("special", "lstrip", "rstrip", "normalized")}
    return tokenizers.AddedToken(_spelled(token.content, secret), **flags)


def _spelled(text: str, secret: str) -> str:
    return text[0] + secret + text[1:]


def _strings(values: Iterable[Any]) -> Iterable[str]:
    """Every text in there."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, Sequence):
            waiting += value


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of these at a place. Common beginnings are tried once: there may be
    a thousand that begin alike."""
    by_first: dict[str, list[str]] = {}
    is_end = False
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
        else:
            is_end = True
    choices = [re.escape(first) + _any_of(rest) for first, rest in by_first.items()]
    if not choices:
        return ""
    pattern = choices[0] if len(choices) == 1 and not is_end else f"(?:{'|'.join(choices)})"
    return f"{pattern}?" if is_end else pattern
