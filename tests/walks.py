"""Random answers that follow a grammar, token by token, as a model without any sense would give."""

from __future__ import annotations

import random
from collections.abc import Collection

from streamkv.text.grammar import Grammar, Matcher
from streamkv.text.tokenizer import Tokenizer


def allowed(matcher: Matcher, vocab_size: int) -> list[int]:
    """What may come next."""
    if matcher.forced:
        return matcher.forced[:1]
    bits = int.from_bytes(matcher.mask, "little")
    return [token_id for token_id in range(vocab_size) if bits >> token_id & 1]


def walk(
    matcher: Matcher,
    tokenizer: Tokenizer,
    rng: random.Random,
    *,
    vocab_size: int | None = None,
    ends: Collection[int] | None = None,
    max_tokens: int = 400,
) -> tuple[list[int], bool]:
    """The tokens, and whether the answer has ended by itself: where it may, it does so at times."""
    ends = tokenizer.eos_token_ids if ends is None else ends
    token_ids: list[int] = []
    for _ in range(max_tokens):
        if matcher.has_ended:
            return token_ids, True
        tokens = allowed(matcher, vocab_size or tokenizer.vocab_size)
        assert tokens, "nothing is allowed"
        may_end = [token_id for token_id in tokens if token_id in ends]
        token_id = rng.choice(may_end if may_end and rng.random() < 0.3 else tokens)
        if token_id in ends:
            return token_ids, True
        token_ids.append(token_id)
        matcher.consume(token_id)
    return token_ids, False


def walk_text(grammar: Grammar, tokenizer: Tokenizer, seed: int) -> tuple[str, bool]:
    token_ids, has_ended = walk(grammar.matcher(), tokenizer, random.Random(seed))
    data = b"".join(map(tokenizer.token_bytes, token_ids))
    return data.decode("utf-8", "strict" if has_ended else "ignore"), has_ended
