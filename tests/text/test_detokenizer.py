"""Detokenizer: any split of any ids gives the tokenizer's decode."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import sentencepiece_backend, tiny_tokenizer

from streamkv.text.detokenizer import Detokenizer
from streamkv.text.tokenizer import Tokenizer

TINY = tiny_tokenizer()


def stream(
    tokenizer: Tokenizer, token_ids: list[int], cuts: list[int], *, skip: bool = True
) -> list[str]:
    """The texts of pushing the ids in pieces, cut at these places."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    places = sorted(cut % (len(token_ids) + 1) for cut in cuts)
    bounds = zip([0, *places], [*places, len(token_ids)], strict=True)
    return [*(detokenizer.push(token_ids[a:b]) for a, b in bounds), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(st.text(), st.lists(st.integers(0, 2**16)))
def test_any_text_survives_any_split(text: str, cuts: list[int]) -> None:
    texts = stream(TINY, TINY.encode(text), cuts, skip=False)
    assert "".join(texts) == text
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in texts)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, TINY.vocab_size + 3)), st.lists(st.integers(0, 2**16)), st.booleans()
)
def test_any_ids_give_what_tokenizers_decodes(
    token_ids: list[int], cuts: list[int], skip: bool
) -> None:
    expected = TINY.decode(token_ids, skip_special_tokens=skip)
    got = "".join(stream(TINY, token_ids, cuts, skip=skip))
    # An incomplete end is dropped, where a decode of the whole shows one replacement character,
    # or two for the first two bytes of an encoded surrogate (ED A0 .. ED BF).
    dropped = expected.removeprefix(got)
    assert expected.startswith(got) and dropped in ("", "\ufffd", "\ufffd\ufffd")
    shown = [i for i in token_ids if not (skip and i in TINY.special_token_ids)]
    last_byte = b"".join(map(TINY.token_bytes, shown))[-1:]
    assert dropped == "" or not last_byte.isascii()


@pytest.mark.parametrize("second", [b"\xa0", b"\xae", b"\xbf"])
def test_half_an_encoded_surrogate_at_the_end_is_dropped_as_incomplete(second: bytes) -> None:
    by_bytes = {TINY.token_bytes(i): i for i in range(TINY.vocab_size)}
    ids = [by_bytes[b"\xed"], by_bytes[second]]
    for cuts in ([], [1]):
        assert "".join(stream(TINY, ids, cuts)) == ""
    assert TINY.decode(ids) == "\ufffd\ufffd"


@pytest.mark.parametrize("text", TEXTS)
def test_the_default_model_streams_each_text_token_by_token(
    default_tokenizer: Tokenizer, text: str
) -> None:
    ids = default_tokenizer.encode(text)
    one_by_one = stream(default_tokenizer, ids, list(range(len(ids))), skip=False)
    # a few control characters have no token in this vocabulary
    assert "".join(one_by_one) == default_tokenizer.decode(ids, skip_special_tokens=False)
    assert "\ufffd" not in "".join(one_by_one)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-1, TINY.vocab_size + 3), max_size=30), st.booleans(), st.booleans())
def test_one_token_at_a_time_gives_what_its_bytes_give(
    token_ids: list[int], skip: bool, mixed: bool
) -> None:
    whole, bytewise = (Detokenizer(TINY, skip_special_tokens=skip) for _ in range(2))
    for index, token_id in enumerate(token_ids):
        expected = bytewise.decode(bytewise.piece(token_id))
        if mixed and index % 3 == 0:
            assert whole.decode(whole.piece(token_id)) == expected
        else:
            assert whole.add(token_id) == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 40, 100, 300]), max_size=12))
def test_spaces_between_special_tokens_are_put_by_no_tokenizer_that_is_used_here(
    token_ids: list[int],
) -> None:
    theirs = TINY.to_transformers(256)
    for spaces in (True, False):
        assert Detokenizer(TINY, skip_special_tokens=False).push(token_ids) == theirs.decode(
            token_ids, skip_special_tokens=False, spaces_between_special_tokens=spaces
        )


def test_a_character_is_held_until_its_last_byte() -> None:
    ids = TINY.encode("a👋b")
    detokenizer = Detokenizer(TINY)
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "", "👋", "b"]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = TINY.encode("<|im_start|>hi<|im_end|>")
    assert Detokenizer(TINY).push(ids) == "hi"
    shown = Detokenizer(TINY, skip_special_tokens=False).push(ids)
    assert shown == "<|im_start|>hi<|im_end|>"


def test_a_skipped_token_does_not_break_a_character() -> None:
    first, *rest = TINY.encode("👋")
    assert Detokenizer(TINY).push([first, 2, *rest]) == "👋"


def test_the_end_drops_an_incomplete_character() -> None:
    detokenizer = Detokenizer(TINY)
    assert detokenizer.push(TINY.encode("a👋")[:-1]) == "a"
    assert detokenizer.flush() == ""
    assert detokenizer.push(TINY.encode("b")) == "b"


def test_bytes_that_are_no_utf8_become_replacement_characters() -> None:
    start_byte = TINY.encode("é")[0]
    assert Detokenizer(TINY).push([start_byte, *TINY.encode("ab")]) == "\ufffdab"


@settings(max_examples=100, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace"])
def test_sentencepiece_streams_give_what_tokenizers_decodes(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tokenizer = sentencepiece(kind, tmp_path_factory)
    num_bytes_end = 3 + 256  # ids 3 .. 258 are bytes; at random they are no UTF-8
    any_id = st.sampled_from([0, 1, 2, *range(num_bytes_end, tokenizer.vocab_size + 2)])
    text = data.draw(st.text(" abcdefghij" if kind == "metaspace" else " abchē日😀"))
    ids = [*data.draw(st.lists(any_id, max_size=4)), *tokenizer.encode(text)]
    ids += data.draw(st.lists(any_id, max_size=6))
    cuts = data.draw(st.lists(st.integers(0, 2**16), max_size=8))
    for skip in (True, False):
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, cuts, skip=skip)) == expected


_BUILT: dict[str, Tokenizer] = {}


def sentencepiece(kind: str, folders: pytest.TempPathFactory) -> Tokenizer:
    if kind not in _BUILT:
        folder: Path = folders.mktemp(kind)
        sentencepiece_backend(kind).save(str(folder / "tokenizer.json"))
        _BUILT[kind] = Tokenizer.from_folder(folder)
    return _BUILT[kind]
