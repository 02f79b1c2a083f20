"""How words are cut, rule by rule: each expectation follows from the rule's patterns by hand."""

from __future__ import annotations

import pytest
from corpus import TEXTS

from streamkv.text.pre_tokenizers import PRE_TOKENIZERS


def cut(name: str, text: str) -> list[str]:
    pieces = PRE_TOKENIZERS[name].splitter().pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in pieces]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "don't  go 12a", ["don", "'t", " ", " go", " 12", "a"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "it'S 12345?!\n\n x", ["it", "'S", " ", "123", "45", "?!\n\n", " x"]),
        ("qwen2", "it'S 12?\r\n", ["it", "'S", " ", "1", "2", "?\r\n"]),
        ("qwen2", "नमस्ते", ["नमस", "्त", "े"]),  # marks are no letters
        ("qwen35", "नमस्ते", ["नमस्ते"]),  # here they are
        ("tekken", "aWordHTTP don't 1/\n", ["a", "Word", "HTTP", " don", "'t", " ", "1", "/\n"]),
        (
            "llama4",
            "aWordHTTP don'T 1234/\n",
            ["a", "Word", "HTTP", " don'T", " ", "123", "4", "/\n"],
        ),
        ("deepseek-coder", "Hi, 12\n\nx中文", ["Hi", ",", " ", "1", "2", "\n", "\n", "x", "中文"]),
        ("deepseek-llm", "Hi-yo 12中文a  ", ["Hi", "-", "yo", " ", "1", "2", "中文", "a", "  "]),
        ("deepseek-v3", "12345 don't中文a\n", ["123", "45", " don", "'t", "中文", "a", "\n"]),
    ],
)
def test_text_is_cut_as_the_patterns_say(name: str, text: str, expected: list[str]) -> None:
    assert cut(name, text) == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_rule_drops_or_changes_text(name: str) -> None:
    for text in TEXTS:
        assert "".join(cut(name, text)) == text
