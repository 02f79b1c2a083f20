"""SentencePiece vocabularies of GGUF files, against the `sentencepiece` library."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from corpus import TEXTS
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2
from transformers import AutoTokenizer

from streamkv.errors import ModelLoadError
from streamkv.text.detokenizer import Detokenizer
from streamkv.text.gguf_vocab import build_backend
from streamkv.text.tokenizer import Tokenizer

CONTROL = ("<s>", "</s>", "<unk>", "[INST]", "[/INST]")
PLAIN_TEXTS = tuple(text for text in TEXTS if not any(token in text for token in CONTROL))
MARKS = ("\u2581", "\u2581a \u2581\u2581 b", " \u2581", "a\u2581")
MORE_TEXTS = (
    *(" " * num_spaces + "x" + " " * num_spaces for num_spaces in (2, 3, 7, 19, 31)),
    *("<0x41><0x0A>", "aaaa abab ababab", "the then there the", "\u0000\u0301\u200d"),
)


@cache
def model(**options: Any) -> bytes:
    """A SentencePiece BPE model, trained on the corpus."""
    file = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in PLAIN_TEXTS if 0 < len(text) < 400]),
        model_writer=file,
        model_type="bpe",
        vocab_size=700,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
        **{"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True} | options,
    )
    return file.getvalue()


def metadata_of(spm: bytes, **overrides: Any) -> dict[str, Any]:
    """What a converter writes of the model."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(spm)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [int(piece.type) for piece in proto.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in overrides.items()}


def streamed(tokenizer: Tokenizer, token_ids: list[int], **options: Any) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    return "".join(detokenizer.push([token_id]) for token_id in token_ids)


@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        ({}, {}),
        ({"add_dummy_prefix": False}, {"add_space_prefix": False}),
        ({"remove_extra_whitespaces": True}, {"remove_extra_whitespaces": True}),
        (
            {"remove_extra_whitespaces": True, "add_dummy_prefix": False},
            {"remove_extra_whitespaces": True, "add_space_prefix": False},
        ),
    ],
)
def test_texts_have_the_tokens_of_sentencepiece(
    options: dict[str, Any], overrides: dict[str, Any]
) -> None:
    spm = model(**options)
    theirs = SentencePieceProcessor(model_proto=spm)
    ours = Tokenizer.from_gguf(metadata_of(spm, **overrides))
    # SentencePiece removes some marks too, where it removes spaces
    marks = () if "remove_extra_whitespaces" in options else MARKS
    for text in (*PLAIN_TEXTS, *MORE_TEXTS, *marks):
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        decoded = theirs.decode(ids)
        assert ours.decode(ids) == streamed(ours, ids) == decoded
        assert ours.min_num_tokens(text) <= len(ids)
    assert ours.vocab_size == theirs.vocab_size() == 700
    assert ours.special_token_ids == {0, 1, 2}


def test_each_stretch_between_special_tokens_is_a_text_of_its_own() -> None:
    theirs = SentencePieceProcessor(model_proto=model())
    ours = Tokenizer.from_gguf(metadata_of(model()))
    for text in ("<s>the</s>", "the<s> the</s>fox the", "</s>", "<unk>dog"):
        expected = []
        for part in text.replace("<", "\0<").replace(">", ">\0").split("\0"):
            known = {"<unk>": [0], "<s>": [1], "</s>": [2]}
            expected += known.get(part, theirs.encode(part))
        assert ours.encode(text, add_special_tokens=False) == expected


def test_templates_with_inst_tokens_write_the_spaces_themselves() -> None:
    spm = model(control_symbols="[INST],[/INST]")
    theirs = SentencePieceProcessor(model_proto=spm)
    ours = Tokenizer.from_gguf(metadata_of(spm))
    begin, end = theirs.piece_to_id("[INST]"), theirs.piece_to_id("[/INST]")
    prompt = "<s>[INST] the fox\n the[/INST] dog</s>"
    expected = [1, begin, *theirs.encode("the fox\n the"), end, *theirs.encode("dog"), 2]
    assert ours.encode(prompt, add_special_tokens=False) == expected
    assert ours.encode("the[INST]", add_special_tokens=False) == [*theirs.encode("the"), begin]


def test_merges_in_the_file_come_before_scores() -> None:
    metadata = metadata_of(model())
    expected = Tokenizer.from_gguf(metadata)
    backend = build_backend(metadata)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    ours = Tokenizer.from_gguf(
        metadata
        | {
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.scores": [0.0] * 700,  # as some converters write
        }
    )
    for text in PLAIN_TEXTS:
        assert ours.encode(text) == expected.encode(text)


def test_a_folder_says_the_same_as_the_gguf_file(tmp_path: Path) -> None:
    """tokenizer.model → transformers' conversion → tokenizer.json → ours."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.model").write_bytes(model())
    config = '{"tokenizer_class": "LlamaTokenizer", "legacy": false}'
    (tmp_path / "model" / "tokenizer_config.json").write_text(config, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs.save_pretrained(tmp_path / "fast")
    of_file = Tokenizer.from_gguf(metadata_of(model()))
    for folder in (tmp_path / "model", tmp_path / "fast"):
        of_folder = Tokenizer.from_folder(folder)
        for text in PLAIN_TEXTS:
            ids = theirs.encode(text, add_special_tokens=False)
            assert of_folder.encode(text, add_special_tokens=False) == ids
            if not text.startswith(" "):  # where the conversion puts no space and SentencePiece one
                assert of_file.encode(text, add_special_tokens=False) == ids
            for tokenizer in (of_folder, of_file):
                decoded = theirs.decode(ids, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids) == streamed(tokenizer, ids) == decoded


def test_words_that_end_with_their_space_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="words begin with their space.*--tokenizer"):
        Tokenizer.from_gguf(metadata_of(model(treat_whitespace_as_suffix=True)))
    Tokenizer.from_gguf(metadata_of(model(split_by_whitespace=False)))  # both ends


def test_token_types_decide_what_is_matched_whole_and_how() -> None:
    spm = model(user_defined_symbols="<tool>,a\u2581word", control_symbols="<|im_end|>")
    ours = Tokenizer.from_gguf(metadata_of(spm))
    by_text = {ours.token_text(i): i for i in range(ours.vocab_size)}
    ids = ours.encode("x<tool>a word<|im_end|>", add_special_tokens=False)
    assert ids[-3:] == [by_text["<tool>"], by_text["a word"], by_text["<|im_end|>"]]
    assert ours.decode(ids) == "x<tool>a word" == streamed(ours, ids)
    assert ours.special_token_ids == {0, 1, 2, by_text["<|im_end|>"]}
    assert ours.eos_token_ids == {2, by_text["<|im_end|>"]}


@pytest.mark.parametrize(
    ("overrides", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    ],
)
def test_tokens_are_put_around_a_text_as_the_file_says(
    overrides: dict[str, Any], before: list[int], after: list[int]
) -> None:
    ours = Tokenizer.from_gguf(metadata_of(model(), **overrides))
    plain = ours.encode("the fox", add_special_tokens=False)
    assert ours.encode("the fox") == [*before, *plain, *after]


def test_a_stream_that_goes_on_with_a_text_keeps_its_first_space() -> None:
    ours = Tokenizer.from_gguf(metadata_of(model()))
    prompt, answer = (ours.encode(text, add_special_tokens=False) for text in ("the fox", "the"))
    whole = ours.decode([*prompt, *answer])
    assert whole == "the fox the"
    assert ours.decode(prompt) + streamed(ours, answer, after=prompt[-1]) == whole
    assert streamed(ours, answer, after=2) == streamed(ours, answer) == "the"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"scores": None}, "scores to be a list of numbers, got None"),
        ({"scores": ["1"] * 700}, "scores to be a list of numbers"),
        ({"scores": [1.0]}, "700 token scores, got 1"),
        ({"scores": [-1000.0] * 700}, "scores to be in the order of merges, got 'the same"),
        ({"merges": ["qq qq"]}, "merges don't fit"),
        ({"token_type": [1]}, "700 token types, got 1"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        ({"add_space_prefix": 1}, "add_space_prefix to be true or false, got 1"),
        ({"remove_extra_whitespaces": "no"}, "remove_extra_whitespaces to be true or false"),
        ({"unknown_token_id": 700}, "unknown_token_id to be a whole number below 700"),
    ],
)
def test_a_broken_vocabulary_is_an_error_that_names_it(
    overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        Tokenizer.from_gguf(metadata_of(model(), **overrides))
    assert caught.value.message.isprintable() and len(caught.value.message) < 400
