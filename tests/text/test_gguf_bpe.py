"""Byte-level vocabularies of GGUF files, against `transformers` and the models' published rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from corpus import TEXTS
from tiny import tiny_gguf_metadata, tiny_tokenizer
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from streamkv.errors import ModelLoadError
from streamkv.text.gguf_vocab import build_backend
from streamkv.text.tokenizer import Tokenizer
from streamkv.weights.hub import Checkpoint

# A vocabulary in which the way text is cut shows: digits, punctuation, spaces and line ends merge.
EXTRA_MERGES = (
    *("1 2", "12 3", "3 4", "Ġ 1", "Ġ Ġ", "ĠĠ Ġ"),
    *("! !", "! Ċ", "' S", "' s", "Ċ Ċ", ". a", "a ="),
)


def metadata_that_shows_cuts(pre: str, **overrides: Any) -> dict[str, Any]:
    metadata = tiny_gguf_metadata(**{"tokenizer.ggml.pre": pre}, **overrides)
    merges = [m for m in EXTRA_MERGES if m not in metadata["tokenizer.ggml.merges"]]
    tokens = [*metadata["tokenizer.ggml.tokens"], *(m.replace(" ", "") for m in merges)]
    tokens = list(dict.fromkeys(tokens))
    return metadata | {
        "tokenizer.ggml.merges": [*merges, *metadata["tokenizer.ggml.merges"]],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
    }


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.fixture(scope="module")
def smollm2(default_checkpoint: Checkpoint) -> tokenizers.Tokenizer:
    """`transformers`' conversion of the default GGUF, with the pre-tokenizer of SmolLM2's own
    tokenizer.json, which the conversion has no entry for."""
    path = default_checkpoint.path
    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_the_default_model_tokenizes_as_smollm2(
    default_tokenizer: Tokenizer, smollm2: tokenizers.Tokenizer, text: str
) -> None:
    ids = smollm2.encode(text).ids
    assert default_tokenizer.encode(text) == ids
    for skip in (True, False):
        expected = smollm2.decode(ids, skip_special_tokens=skip)
        assert default_tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_a_long_text_tokenizes_as_smollm2(
    default_tokenizer: Tokenizer, smollm2: tokenizers.Tokenizer
) -> None:
    text = "\n".join(TEXTS) * 20
    ids = smollm2.encode(text).ids
    assert default_tokenizer.encode(text) == ids
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == smollm2.decode(
        ids, skip_special_tokens=False
    )


def test_a_digit_after_spaces_stands_alone_in_the_default_model(
    default_tokenizer: Tokenizer,
) -> None:
    assert pieces(default_tokenizer, "a  1") == ["a", "  ", "1"]
    # ids that SmolLM2's published tokenizer gives
    assert default_tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]


def test_the_default_model_has_its_special_tokens_and_template(
    default_tokenizer: Tokenizer,
) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.eos_token_ids == {2}
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.special_token_ids == frozenset(range(17))
    prompt = default_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "qwen35", "llama-bpe", "tekken", "llama4"])
def test_pre_tokenizers_cut_as_transformers_does(pre: str, tmp_path: Path) -> None:
    metadata = metadata_that_shows_cuts(pre)
    write_gguf(tmp_path / "vocab.gguf", metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="vocab.gguf")
    ours = Tokenizer.from_gguf(metadata)
    more = ("1234 1234123 a=1", "HE'S he's .a !!\n\n\n  1", "e\u0301 \u1e9b\u0323 \uff21")
    for text in (*TEXTS, *more):
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if pre.startswith("qwen"):  # Qwen's own tokenizer.json normalizes; so must the oracle
            assert theirs.backend_tokenizer.normalizer is None
            text_nfc = normalizers.NFC().normalize_str(text)
            expected = theirs.backend_tokenizer.encode(text_nfc, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, text


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # each expectation follows from the rule's patterns by hand
        ("default", "1234", ["123", "4"]),  # threes, from the left
        ("default", ".a", [".", "a"]),  # punctuation stands alone
        ("gpt-2", "1234", ["123", "4"]),  # one run; merges decide
        ("gpt-2", "34", ["34"]),
        ("gpt-2", " 1", [" 1"]),
        ("smollm", "34 1", ["3", "4", " ", "1"]),
        ("qwen2", "34 1", ["3", "4", " ", "1"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("llama-bpe", "2234", ["2", "2", "3", "4"]),  # 223|4, so 3 and 4 never meet
        ("llama-bpe", "'S", ["'S"]),  # contractions in any case
        ("gpt-2", "x'Sy", ["x", "'", "S", "y"]),  # 'S is no contraction: ' | Sy
    ],
)
def test_pre_tokenizers_cut_as_their_patterns_say(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(Tokenizer.from_gguf(metadata_that_shows_cuts(pre)), text) == expected


def test_llama_bpe_takes_a_word_that_is_a_token_whole() -> None:
    metadata = tiny_gguf_metadata(**{"tokenizer.ggml.pre": "llama-bpe"})
    metadata["tokenizer.ggml.tokens"].append("xyz")  # no merge leads to it
    metadata["tokenizer.ggml.token_type"].append(1)
    assert pieces(Tokenizer.from_gguf(metadata), "xyz") == ["xyz"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert pieces(Tokenizer.from_gguf(metadata), "xyz") == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        ({}, []),
        ({"tokenizer.ggml.add_bos_token": True}, [1]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, []),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, []),
    ],
)
def test_a_beginning_token_is_added_where_the_file_says(
    overrides: dict[str, Any], added: list[int]
) -> None:
    tokenizer = tiny_tokenizer(**overrides)
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == [*added, *plain]


@pytest.mark.parametrize(
    ("pre", "begins"),
    [("llama-bpe", True), ("tekken", True), ("smaug-bpe", False), ("qwen2", False)],
)
def test_the_rule_decides_on_a_beginning_token_when_the_file_does_not_say(
    pre: str, begins: bool
) -> None:
    metadata = tiny_gguf_metadata(**{"tokenizer.ggml.pre": pre})
    del metadata["tokenizer.ggml.add_bos_token"]
    assert (Tokenizer.from_gguf(metadata).encode("a")[0] == 1) is begins


def test_an_end_token_is_added_where_the_file_says() -> None:
    tokenizer = tiny_tokenizer(**{"tokenizer.ggml.add_eos_token": True})
    assert tokenizer.encode("a") == [*tokenizer.encode("a", add_special_tokens=False), 2]


def test_token_types_decide_what_is_matched_whole() -> None:
    metadata = tiny_gguf_metadata()
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<think> é", "[PAD0]", "<｜end｜>"]
    metadata["tokenizer.ggml.token_type"] += [4, 5, 3]
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("a<think> éb<｜end｜>")
    assert ids[1] == first and ids[-1] == first + 2
    assert tokenizer.special_token_ids == {0, 1, 2, first + 2}
    assert tokenizer.decode(ids) == "a<think> éb"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<think> éb<｜end｜>"
    assert tokenizer.token_bytes(first) == "<think> é".encode()
    assert first + 1 not in tokenizer.encode("[PAD0]")
    assert tokenizer.token_bytes(first + 1) == b"" == tokenizer.decode([first + 1]).encode()
    assert tokenizer.vocab_size == first + 3


def test_ends_of_turn_and_of_message_end_a_text_too() -> None:
    ends = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0}
    assert tiny_tokenizer(**ends).eos_token_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("token", "kind", "ends"),
    [
        ("<|eot_id|>", 3, True),
        ("<|im_end|>", 4, True),  # some converters take it for a user's
        ("<|eot_id|>", 1, False),  # plain text that looks like it
        ("<|eot_header|>", 3, False),
    ],
)
def test_a_control_token_known_to_end_turns_does_so_unnamed(
    token: str, kind: int, ends: bool
) -> None:
    metadata = tiny_gguf_metadata()
    metadata["tokenizer.ggml.tokens"] = ["<|endoftext|>", "<s>", "<e>"] + [
        *metadata["tokenizer.ggml.tokens"][3:],
        token,
    ]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], kind]
    # <|endoftext|> is the file's unknown token
    assert Tokenizer.from_gguf(metadata).eos_token_ids == ({2, 339} if ends else {2})
    del metadata["tokenizer.ggml.unknown_token_id"]
    assert Tokenizer.from_gguf(metadata).eos_token_ids == ({0, 2, 339} if ends else {0, 2})


def test_the_chat_template_is_the_one_without_a_name_or_the_default_one() -> None:
    plain, default = "tokenizer.chat_template", "tokenizer.chat_template.default"
    tools = {"tokenizer.chat_template.tool_use": "tools"}
    for templates, expected in (
        ({plain: "one", default: "two"}, "one"),
        ({plain: None, default: "two"}, "two"),
        ({plain: None}, None),
    ):
        template = tiny_tokenizer(**tools, **templates).chat_template
        assert (None if template is None else template.render([])) == expected


def test_a_tokenizer_json_in_the_file_is_used_as_it_stands() -> None:
    metadata = tiny_gguf_metadata()
    backend = build_backend(metadata)
    backend.normalizer = normalizers.Lowercase()
    metadata |= {"tokenizer.huggingface.json": backend.to_str(), "tokenizer.ggml.model": "other"}
    expected = backend.encode("The DOG<|im_end|>").ids
    for has_tokens in (True, False):
        if not has_tokens:
            del metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        tokenizer = Tokenizer.from_gguf(metadata)
        assert tokenizer.encode("The DOG<|im_end|>") == expected
        assert tokenizer.vocab_size == 339
        assert tokenizer.eos_token_ids == {2} and tokenizer.bos_token_id == 1
        assert tokenizer.apply_chat_template([]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre .* got a file without"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, r"\['gpt-2'\]"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["qq qq"]}, "merges"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "merges"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token types"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        (
            {"tokenizer.ggml.bos_token_id": 10**6, "tokenizer.ggml.add_bos_token": True},
            "bos_token_id",
        ),
        ({"tokenizer.chat_template": "{% for %}"}, "line 1"),
        ({"tokenizer.chat_template": 7}, "chat_template to be a string, got 7"),
        ({"tokenizer.ggml.tokens": 3}, "tokens to be a list of str, got 3"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens to be a list of str, got 'abc'"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens to be a list of str"),
        ({"tokenizer.ggml.token_type": 3}, "token_type to be a list of int, got 3"),
        ({"tokenizer.ggml.token_type": [1.5, 1]}, "token_type to be a list of int"),
        ({"tokenizer.ggml.merges": 3}, "merges to be a list of str, got 3"),
        ({"tokenizer.ggml.merges": None}, "merges to be a list of str, got None"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges to be a list of str"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id to be .* got '2'"),
        ({"tokenizer.ggml.eos_token_id": [2]}, r"eos_token_id to be .* got \[2\]"),
        ({"tokenizer.ggml.eos_token_id": 1.5}, "eos_token_id to be .* got 1.5"),
        ({"tokenizer.ggml.eos_token_id": True}, "eos_token_id to be .* got True"),
        ({"tokenizer.ggml.eot_token_id": -1}, "eot_token_id to be .* got -1"),
        ({"tokenizer.ggml.eom_token_id": 2**32 - 1}, "eom_token_id to be .* got 4294967295"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "bos_token_id to be .* got '1'"),
        ({"tokenizer.ggml.add_bos_token": "no"}, "add_bos_token to be true or false"),
        ({"tokenizer.ggml.add_eos_token": 1}, "add_eos_token to be true or false"),
        ({"tokenizer.huggingface.json": "{"}, "tokenizer.huggingface.json to be"),
        ({"tokenizer.huggingface.json": 7}, "tokenizer.huggingface.json to be"),
    ],
)
def test_a_broken_or_unknown_gguf_vocabulary_is_an_error_that_names_it(
    overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        tiny_tokenizer(**overrides)


def test_bytes_without_a_token_are_dropped_as_the_model_was_trained(
    default_tokenizer: Tokenizer, smollm2: tokenizers.Tokenizer
) -> None:
    expected = [*smollm2.encode("a").ids, *smollm2.encode("b").ids]
    assert default_tokenizer.encode("a\x04b") == expected == smollm2.encode("a\x04b").ids
