"""Grammars: which tokens may come next, so that an answer is what was asked for.

Owns how StructuredOutputs become a compiled grammar for one tokenizer, the ones compiled before,
and what one answer's Matcher says. It must not know threads, slots or the device.

Invariants: nothing is compiled here that wasn't tried out in a process of its own, with bounded
time, memory and stack. A Matcher says for each position what may follow, from the tokens so far
alone: the same whether tokens that it forces were computed or skipped. Where it leaves nothing but
the end, the answer ends.

A Matcher is for one thread at a time; all else is for any.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence

from llguidance import LLMatcher

from ..errors import InvalidRequestError, OverloadedError
from ..structured import StructuredOutputs
from .grammar_process import ALL, LITTLE, GrammarProcess, Result
from .grammar_tokens import Greedy, Vocabulary, build_tokenizer, new_matcher, reason_of
from .tokenizer import Tokenizer

MAX_CACHED = 64
MAX_CACHED_BYTES = 128 << 20
GROWTH_BYTES = 256 << 10  # of a matcher, by the tokens that come

_MARK = "\n"  # SentencePiece puts a space before a text, not after this


class GrammarFailure(Exception):
    """A matcher can't go on; the message says why."""


class Grammar:
    """A compiled one."""

    def __init__(self, matcher: LLMatcher, ends: _Ends, num_bytes: int, copy_bytes: int) -> None:
        """GrammarFailure."""
        self.num_bytes = num_bytes  # of what its matchers share, about
        # Of each matcher: what a copy of it took, and what some thousand tokens add. One that is
        # made to grow adds more, tens of MB until it fails: only answers that run do.
        self.matcher_bytes = copy_bytes + GROWTH_BYTES
        self.slow_share = 0.0  # of its matchers' latest tokens: kept by who times them
        # What is known before the first token is the same for all. Of this one nobody consumes.
        self._prototype = Matcher(matcher, ends)

    def matcher(self, *, ignore_end: bool = False) -> Matcher:
        """For one answer, which with `ignore_end` ends only where nothing else is left."""
        return self._prototype.copy(self, ignore_end=ignore_end)


class Matcher:
    """Follows one answer. After each token one of three holds: it `has_ended`, `forced` is not
    empty, or `mask` says what may come."""

    __slots__ = ("_ends", "_matcher", "_unwanted", "forced", "grammar", "has_ended", "mask")

    def __init__(self, matcher: LLMatcher, ends: _Ends) -> None:
        """GrammarFailure."""
        self.grammar: Grammar | None = None  # that it is of
        self._matcher = matcher
        self._ends = ends
        self._unwanted = 0 if ends.ids else ends.bits
        self.forced: list[int] = []  # the tokens that come, as far as is known
        self.has_ended = False  # nothing may follow, and there is no token that says so
        self.mask = b""  # bit i % 8 of byte i // 8 is token i's
        self._look_ahead()

    def copy(self, grammar: Grammar, *, ignore_end: bool) -> Matcher:
        """One of that grammar that goes its own way from here."""
        other = Matcher.__new__(Matcher)
        other.grammar = grammar
        other._matcher = self._matcher.deep_copy()
        other._ends, other._unwanted = self._ends, self._unwanted
        other.forced, other.has_ended, other.mask = self.forced[:], self.has_ended, self.mask
        if ignore_end and self._ends.ids:
            other._unwanted = self._ends.bits
            other.mask = other._allowed(self.mask)
        return other

    def consume(self, token_id: int) -> None:
        """The next token. GrammarFailure."""
        if self.forced:
            if token_id != self.forced.pop(0):
                raise GrammarFailure("a token came that the grammar doesn't allow")
            if self.forced:
                return
        elif not self._matcher.consume_token(token_id):
            raise GrammarFailure(reason_of(self._matcher.get_error()))
        self._look_ahead()

    def _look_ahead(self) -> None:
        matcher = self._matcher
        if matcher.is_stopped() and not matcher.is_error():
            self._end()
            return
        forced = matcher.compute_ff_tokens()
        num_forced = matcher.validate_tokens(forced) if forced else 0
        if num_forced:
            self.forced = forced[:num_forced]
            matcher.consume_tokens(self.forced)
        else:
            self.mask = self._allowed(matcher.compute_bitmask())
        if matcher.is_error():
            raise GrammarFailure(reason_of(matcher.get_error()))

    def _end(self) -> None:
        if len(self._ends.ids) == 1:
            self.forced = list(self._ends.ids)
        elif self._ends.ids:
            self.mask = self._ends.mask
        else:
            self.has_ended = True

    def _allowed(self, mask: bytes) -> bytes:
        """Without an end that isn't wanted, unless nothing else is left."""
        if not self._unwanted:
            return mask
        bits = int.from_bytes(mask, "little") & ~self._unwanted
        if bits:
            return bits.to_bytes(len(mask), "little")
        self.has_ended = not self._ends.ids
        return mask


class _Ends:
    """How an answer ends in this vocabulary."""

    def __init__(self, ids: Collection[int], stand_in: int, num_tokens: int) -> None:
        self.ids = tuple(sorted(ids))
        self.bits = _bits(ids or (stand_in,))  # the library's for the end, where there is no token
        self.mask = _bits(ids).to_bytes(4 * -(-num_tokens // 32), "little")


def _bits(token_ids: Collection[int]) -> int:
    bits = 0
    for token_id in token_ids:
        bits |= 1 << token_id
    return bits


class GrammarCompiler:
    """For one tokenizer and the model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        end_ids = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        special_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        if not end_ids:
            tokens.append(b"<end>")
        stand_in = [vocab_size] if not end_ids else []
        self._vocabulary = Vocabulary(tokens, special_ids + stand_in, end_ids or stand_in)
        self._encoder = _Encoder(tokenizer, self._vocabulary)
        self._tokenizer = build_tokenizer(self._vocabulary, self._encoder)
        self._ends = _Ends(end_ids, vocab_size, len(tokens))
        # Two: what takes long keeps only its like waiting.
        self._process = GrammarProcess(self._vocabulary)
        self._quick_process = GrammarProcess(self._vocabulary)
        self._cached: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._alive: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._lock = threading.Lock()  # of these two

    @property
    def num_bytes(self) -> int:
        """Of all grammars that are kept or followed, without their matchers."""
        with self._lock:
            return sum(grammar.num_bytes for grammar in self._alive)

    def find(self, structured: StructuredOutputs) -> Grammar | None:
        """It, if it is kept from an earlier time."""
        with self._lock:
            grammar = self._cached.get(structured)
            if grammar is not None:
                self._cached.move_to_end(structured)
            return grammar

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """Takes bounded time, but seconds perhaps. InvalidRequestError with the reason;
        OverloadedError if that shows nothing of the grammar."""
        if (grammar := self.find(structured)) is not None:
            return grammar
        result = self._process.check(structured, ALL)
        if result.is_open:
            raise OverloadedError(
                f"the grammar couldn't be prepared: {result.error}; try again", retry_after_s=5
            )
        return self._built(structured, result)

    def compile_if_easy(self, structured: StructuredOutputs) -> Grammar | None:
        """Like `compile`, but None if that takes longer than it does for most."""
        if (grammar := self.find(structured)) is not None:
            return grammar
        result = self._quick_process.check(structured, LITTLE)
        return None if result.is_open else self._built(structured, result)

    def rest(self) -> None:
        """Nothing is to be compiled for a while."""
        self._process.rest()
        self._quick_process.rest()

    def close(self) -> None:
        """Idempotent."""
        self._process.close()
        self._quick_process.close()

    def _built(self, structured: StructuredOutputs, result: Result) -> Grammar:
        if result.error:
            raise _refused(structured, result.error)
        matcher = new_matcher(self._tokenizer, result.source)
        try:
            grammar = Grammar(matcher, self._ends, result.num_bytes, result.copy_bytes)
        except GrammarFailure as exc:
            raise _refused(structured, str(exc)) from None
        self._keep(structured, grammar)
        return grammar

    def _keep(self, structured: StructuredOutputs, grammar: Grammar) -> None:
        with self._lock:
            self._alive.add(grammar)
            self._cached[structured] = grammar
            num_bytes = sum(one.num_bytes for one in self._cached.values())
            while len(self._cached) > MAX_CACHED or num_bytes > MAX_CACHED_BYTES:
                _, dropped = self._cached.popitem(last=False)
                num_bytes -= dropped.num_bytes


def _refused(structured: StructuredOutputs, reason: str) -> InvalidRequestError:
    name = "structured_outputs"
    return InvalidRequestError(
        f"{name}: expected {structured.kind} that can be followed, got one that can't: {reason}",
        param=name,
    )


class _Encoder:
    """Text that a grammar forces, as the model would write it."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._size = len(vocabulary.tokens)
        self._greedy = Greedy(vocabulary)

    def __call__(self, text: str) -> Sequence[int]:
        encode = self._tokenizer.encode
        token_ids = encode(text, add_special_tokens=False)
        if self._is_spelled(token_ids, text):
            return token_ids
        token_ids = encode(_MARK + text, add_special_tokens=False)
        for start in (1, 2):  # the mark, perhaps with the space before it
            if self._is_spelled(token_ids[start:], text):
                return token_ids[start:]
        return self._greedy(text)

    def _is_spelled(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether these are just the text, written with ordinary tokens of the model."""
        tokenizer = self._tokenizer
        return (
            b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
            and tokenizer.special_token_ids.isdisjoint(token_ids)
            and max(token_ids, default=0) < self._size
        )
