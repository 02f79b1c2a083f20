"""The text of an evaluation: which tokens are predicted, and what each prediction may see.

Owns the windows. Invariant: every token but the first is predicted once; after the first window
each prediction sees at least half a window of tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 64  # more than any text has on average: what is read of a file
STEP_TOKENS = 256  # so that the logits of a step aren't larger than many a model
NUM_PROMPTS = 16
PROMPT_LEN = 32


class Piece(NamedTuple):
    """Part of a window, computed in one step; of its last `num_wanted` tokens the predictions are
    wanted."""

    start: int
    token_ids: Sequence[int]
    num_wanted: int


class Window(NamedTuple):
    """Tokens of one sequence; those from `first_scored` on are predicted."""

    token_ids: Sequence[int]
    first_scored: int

    def pieces(self) -> Iterator[Piece]:
        """What must be computed to predict them: all but the last token."""
        num_tokens, first = len(self.token_ids) - 1, self.first_scored - 1
        for start in range(0, num_tokens, STEP_TOKENS):
            end = min(start + STEP_TOKENS, num_tokens)
            wanted = min(end - start, max(0, end - first))
            yield Piece(start, self.token_ids[start:end], wanted)


class Lengths(NamedTuple):
    """How many tokens a model is given at once."""

    context: int  # of a window
    prompt: int  # before a continuation
    greedy: int  # tokens of a continuation

    @property
    def continued(self) -> int:
        return self.prompt + self.greedy if self.greedy else 0


class EvalText(NamedTuple):
    """The tokens, and what the model's tokenizer puts before a text."""

    token_ids: list[int]
    bos: int | None
    source: str  # in words

    def windows(self, context: int) -> Iterator[Window]:
        """Of at most `context` tokens, each half a window further."""
        num_tokens, end, first = len(self.token_ids), min(context, len(self.token_ids)), 1
        while True:
            start = max(0, end - context)
            yield Window(self._begun(self.token_ids[start:end]), first - start)
            if end == num_tokens:
                return
            first, end = end, min(end + max(1, context // 2), num_tokens)

    def num_windows(self, context: int) -> int:
        return 1 + max(0, -(-(len(self.token_ids) - context) // max(1, context // 2)))

    def prompts(self, longest: int = PROMPT_LEN) -> list[list[int]]:
        """Beginnings for greedy continuations, of one length, spread over the text."""
        length = min(longest, len(self.token_ids))
        last = len(self.token_ids) - length
        starts = sorted({last * i // NUM_PROMPTS for i in range(NUM_PROMPTS)})
        return [self._begun(self.token_ids[start : start + length]) for start in starts]

    def _begun(self, token_ids: list[int]) -> list[int]:
        return token_ids if self.bos is None else [self.bos, *token_ids[1:]]


class Characters(NamedTuple):
    """A text before it is cut into tokens: a model's tokenizer decides which."""

    text: str
    source: str  # in words
    max_tokens: int

    def tokens(self, tokenizer: Tokenizer) -> EvalText:
        """One to begin with, and `max_tokens` to predict if there are so many. ConfigError."""
        token_ids = tokenizer.encode(self.text)
        begins = token_ids[:1] == [tokenizer.bos_token_id]
        token_ids = token_ids[: self.max_tokens + 1]
        if len(token_ids) < 2:
            raise ConfigError(
                f"--text: expected at least 2 tokens to predict one, got {len(token_ids)} in "
                f"{self.source}; give a longer text"
            )
        return EvalText(token_ids, token_ids[0] if begins else None, self.source)


def read_characters(path: str, max_tokens: int) -> Characters:
    """What `max_tokens` can take of the file at `path`, "" for Python's help texts. ConfigError."""
    num_chars = CHARS_PER_TOKEN * max_tokens
    text = _read_file(path, num_chars) if path else help_texts()[:num_chars]
    return Characters(text, path or "the help texts of Python (pydoc_data.topics)", max_tokens)


def read_text(path: str, tokenizer: Tokenizer, max_tokens: int) -> EvalText:
    """Its tokens. ConfigError."""
    return read_characters(path, max_tokens).tokens(tokenizer)


def help_texts() -> str:
    """English that comes with Python, some 700,000 characters. ConfigError."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(f"this Python has no help texts ({error}); give --text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def _read_file(path: str, num_chars: int) -> str:
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            return file.read(num_chars)
    except (OSError, ValueError, RuntimeError) as error:
        # ValueError: not UTF-8, or no possible name. RuntimeError: `~nobody`.
        raise ConfigError(f"--text {path}: expected a UTF-8 file: {error}") from error
