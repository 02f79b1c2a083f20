"""What a matcher may do for a token: enough for large schemas, not for a text of many readings."""

from __future__ import annotations

import itertools

from llguidance import LLMatcher

from streamkv.structured import StructuredOutputs
from streamkv.text.grammar_source import grammar_source
from streamkv.text.grammar_tokens import Greedy, Vocabulary, build_tokenizer, new_matcher, reason_of

LETTERS = [bytes([number]) for number in range(32, 127)]
WORDS = [bytes(word) for length in range(2, 6) for word in itertools.product(b"ab", repeat=length)]
VOCABULARY = Vocabulary([b"", *LETTERS, *WORDS], [0], [0])
TOKENIZER = build_tokenizer(VOCABULARY, Greedy(VOCABULARY))


def matcher_of(**structured: object) -> LLMatcher:
    return new_matcher(TOKENIZER, grammar_source(StructuredOutputs(**structured), []))


def num_followed(matcher: LLMatcher, text: str) -> int:
    """How many of its characters came before it failed."""
    for number, character in enumerate(text):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(1 + LETTERS.index(character.encode())):
            return number
    return len(text)


def test_a_text_of_many_readings_is_ended_while_its_tokens_take_milliseconds():
    matcher = matcher_of(grammar='start: s\ns: s s | s s s | "a" | "b" | s "a" s\n')
    assert 5 < num_followed(matcher, "ab" * 50) < 25
    assert "Too many items" in reason_of(matcher.get_error())


def test_an_object_may_have_hundreds_of_properties_that_may_be_left_out():
    properties = {f"p{number}": {"type": "integer"} for number in range(300)}
    matcher = matcher_of(json={"properties": properties, "type": "object"})
    text = '{"p0": 1, "p7": 23, "p299": 4}'
    assert num_followed(matcher, text) == len(text)
    assert not matcher.is_error()
    assert matcher.is_accepting()
