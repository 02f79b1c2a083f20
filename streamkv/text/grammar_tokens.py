"""A vocabulary as llguidance takes it, and how much its matchers may do.

Owns the limits that bound each of their steps, and what of their errors is told. It must not know
tokenizers: it gets tables. Invariant: a grammar that compiles with these limits in one process does
so in another with the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..errors import one_line

# A token takes some 50 us. What needs more than these ends with an error. They bound the work of a
# token, and not its time by much: an object with 300 optional properties needs 5,000 items in 1 ms,
# a grammar of which texts have many readings 10 to 60 ms for as many. So whoever follows an answer
# measures its time besides (engine/matcher_slot.py).
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=20_000,  # 1 to 2 KB each
    verbose_errors=False,
)


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """Of a model: what each of its ids adds to a text."""

    tokens: list[bytes]  # b"" for ids that no text has
    special_ids: list[int]  # only their names stand for them, no text does
    end_ids: list[int]  # any of them ends an answer; at least one


class _Tokens:
    """What the library reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self._encode = encode

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)


def build_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> LLTokenizer:
    """`encode` makes tokens of text that a grammar forces; it must not raise."""
    tokens: object = _Tokens(vocabulary, encode)
    return LLTokenizer(
        tokens,  # type: ignore[arg-type]  # it takes whatever has the attributes
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.end_ids,
    )


class Greedy:
    """Text to tokens, the longest at each place: not as the model would write it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = set(vocabulary.special_ids)
        self._ids = {
            token: token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if token and token_id not in special
        }
        self._max_len = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        data, start, token_ids = text.encode(), 0, []
        while start < len(data):
            for end in range(min(start + self._max_len, len(data)), start, -1):
                if (token_id := self._ids.get(data[start:end])) is not None:
                    token_ids.append(token_id)
                    break
            else:
                return token_ids  # nothing begins so: what follows isn't forced
            start = end
        return token_ids


def new_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """It may be in error."""
    return LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)


def reason_of(error: str) -> str:
    """The library's words on one line, without what only who wrote the library needs."""
    if "NoExtension" in error:
        return "it matches no text"
    if error.startswith("panic"):
        return "it is too large"
    if "too many expressions" in error:
        return "it has too many repetitions within repetitions"
    if "Failed to generate regex for" in error:
        return f"{one_line(error)}; a bound of more than 18 digits needs one on the other side"
    head, _, tail = error.partition("\nerror: ")  # a picture of the regex stands before it
    text = f"{head.partition(chr(10))[0]} {tail.partition(chr(10))[0]}" if tail else head
    for end in ("; following special tokens", "; try avoiding", "Enable 'coerce_one_of'", "<non-"):
        text = text.partition(end)[0]
    return one_line(text.strip(" .") or "it can't be followed")
