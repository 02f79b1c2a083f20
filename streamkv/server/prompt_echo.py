"""A prompt as the beginning of its choices' texts: `echo` of completions.

Owns what of the prompt's text and log-probabilities was shown. Knows nothing of how a choice is
written. Invariant: whatever the prompt's scores come in, what is shown of a choice before its first
token is the whole prompt, and each of its tokens has an entry where log-probabilities are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..engine.stream import TokenLogprob
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .logprobs import LogprobLists, Logprobs, LogprobWriter


class EchoedPrompt(NamedTuple):
    """What is echoed of a prompt."""

    text: str = ""
    is_sent: bool = False  # the client sent this text; otherwise token ids, of which it is made


class EchoPiece(NamedTuple):
    text: str
    logprobs: Logprobs | None


class PromptEcho:
    """One prompt's. What was written for its first choice is kept for the others."""

    def __init__(
        self,
        prompt: EchoedPrompt,
        tokenizer: Tokenizer,
        writer: LogprobWriter | None,
    ) -> None:
        """`writer`: None where no log-probabilities are wanted of the prompt."""
        self.text = prompt.text
        # All entries so far; the first choice has shown them.
        self.lists = None if writer is None else LogprobLists()
        self._tokenizer = tokenizer
        self._writer = writer
        self._walk = _Walk(tokenizer, prompt.text if prompt.is_sent else None)
        self._num_tokens = 0
        self._num_chars = 0  # shown in the first choice

    def push(self, token_ids: Sequence[int], items: Sequence[TokenLogprob | None]) -> EchoPiece:
        """More positions of the prompt `token_ids`: what they add to the first choice."""
        if self._writer is None or self.lists is None:
            return EchoPiece("", None)
        start = self._num_tokens
        self._num_tokens += len(items)
        pieces = [self._walk.piece(token_id) for token_id in token_ids[start : self._num_tokens]]
        entries = self._writer.write_prompt(token_ids[0], items, pieces, self._tokenizer)
        self.lists.extend(entries)
        begin, self._num_chars = self._num_chars, self._writer.num_chars
        return EchoPiece(self.text[begin : self._num_chars], entries)

    def rest(self, choice: int) -> str:
        """What of its text is still to be shown when the choice's first token is there."""
        return self.text if choice else self.text[self._num_chars :]


class _Walk:
    """What the tokens of a prompt add to its text, one by one."""

    def __init__(self, tokenizer: Tokenizer, sent: str | None) -> None:
        """Special tokens that the text which was `sent` doesn't have were put there by the
        tokenizer, and aren't shown."""
        self._tokenizer = tokenizer
        self._sent = sent
        self._num_chars = 0
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)

    def piece(self, token_id: int) -> bytes:
        """What the next token adds to the text's bytes."""
        if self._sent is not None and token_id in self._tokenizer.special_token_ids:
            if not self._sent.startswith(self._tokenizer.token_text(token_id), self._num_chars):
                return b""
        piece = self._detokenizer.piece(token_id)
        self._num_chars += len(self._detokenizer.decode(piece))
        return piece
