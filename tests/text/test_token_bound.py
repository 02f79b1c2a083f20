"""The least number of tokens of a text, against tokenizing it."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from corpus import TEXTS
from tiny import sentencepiece_backend, tiny_gguf_metadata, tiny_tokenizer
from tokenizers import AddedToken, normalizers, pre_tokenizers

from streamkv.text.pre_tokenizers import PRE_TOKENIZERS
from streamkv.text.token_bound import NFC_SHRINKS
from streamkv.text.tokenizer import Tokenizer


def from_backend(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def texts_of(tokenizer: Tokenizer) -> list[str]:
    """Nasty texts, and for each long token the text that it stands for."""
    words = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    longest = sorted(words, key=len)[-20:]
    return [
        *TEXTS,
        *(word.decode(errors="ignore") * 50 for word in longest),
        "".join(map(chr, range(256))) * 20,
        "\u1fbe\u0308\u0301" * 200,  # what NFC makes most shorter
        "\u1112\u1161\u11ab" * 200,
        "\u2581" * 300 + " " * 300,
    ]


def check_bound(tokenizer: Tokenizer) -> int:
    """How many of the texts have a bound above 0; none has one above its number of tokens."""
    bounds = []
    for text in texts_of(tokenizer):
        bounds.append(tokenizer.min_num_tokens(text))
        assert bounds[-1] <= len(tokenizer.encode(text, add_special_tokens=False)), text[:50]
    return sum(bound > 0 for bound in bounds)


def test_no_text_has_fewer_tokens_than_the_default_models_bound(
    default_tokenizer: Tokenizer,
) -> None:
    assert check_bound(default_tokenizer) > 20
    text = "the quick brown fox " * 1000
    assert default_tokenizer.min_num_tokens(text) > len(default_tokenizer.encode(text)) / 30


def test_bytes_without_a_token_are_no_reason_to_refuse_a_text(
    default_tokenizer: Tokenizer,
) -> None:
    text = "\x04" * 100_000  # the model knows no such byte
    assert default_tokenizer.encode(text) == []
    assert default_tokenizer.min_num_tokens(text) == 0


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_text_has_fewer_tokens_than_its_bound_by_any_rule_of_cutting(pre: str) -> None:
    assert check_bound(tiny_tokenizer(**{"tokenizer.ggml.pre": pre})) > 20


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_no_text_has_fewer_tokens_than_its_bound_in_sentencepiece(
    kind: str, tmp_path: Path
) -> None:
    assert check_bound(from_backend(sentencepiece_backend(kind), tmp_path)) > 20


def test_nfc_shortens_no_character_by_more_than_the_factor() -> None:
    longest: dict[str, int] = {}  # of the characters that decompose to one: bytes of the longest
    for char in map(chr, range(sys.maxunicode + 1)):
        if not unicodedata.category(char) == "Cs":
            one = unicodedata.normalize("NFD", char)
            if len(one) == 1:
                longest[one] = max(longest.get(one, 0), len(char.encode()))
    worst = 0.0
    for char in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(char) == "Cs" or unicodedata.normalize("NFC", char) != char:
            continue
        parts = unicodedata.normalize("NFD", char)
        worst = max(worst, sum(longest[part] for part in parts) / len(char.encode()))
    assert 3 < worst <= NFC_SHRINKS


def strip_normalizer(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def removing_normalizer(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Replace("x", "")


def removing_pre_tokenizer(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )


def swallowing_token(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken("<|end|>", special=True, rstrip=True)])


@pytest.mark.parametrize(
    "change", [strip_normalizer, removing_normalizer, removing_pre_tokenizer, swallowing_token]
)
def test_a_tokenizer_that_may_drop_any_amount_of_text_has_no_bound(change, tmp_path: Path) -> None:
    backend = tiny_tokenizer()._backend
    change(backend)
    tokenizer = from_backend(backend, tmp_path)
    assert check_bound(tokenizer) == 0
    assert tokenizer.min_num_tokens("a" * 10**6) == 0


def test_sentencepiece_without_bytes_may_make_one_token_of_anything(tmp_path: Path) -> None:
    backend = sentencepiece_backend("gemma")
    backend.model.byte_fallback = False
    backend.model.fuse_unk = True
    tokenizer = from_backend(backend, tmp_path)
    text = "日" * 10_000
    assert len(tokenizer.encode(text)) == 1
    assert tokenizer.min_num_tokens(text) == 0


def test_a_replacement_that_shortens_counts() -> None:
    metadata = tiny_gguf_metadata()
    backend = Tokenizer.from_gguf(metadata)._backend
    backend.normalizer = normalizers.Replace("longword", "a")
    tokenizer = Tokenizer(
        backend, vocab_size=339, eos_token_ids=(), special_tokens={}, chat_templates={}
    )
    text = "longword" * 1000
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text)) == 1000
