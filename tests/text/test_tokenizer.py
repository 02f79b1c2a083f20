"""Tokenizer against `tokenizers`, `transformers` and the models' published rules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from corpus import TEXTS
from tiny import CHATML, sentencepiece_backend, tiny_gguf_metadata, tiny_tokenizer
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from streamkv.errors import InvalidRequestError, ModelLoadError
from streamkv.text.detokenizer import Detokenizer
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


# --- GGUF ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_pre_tokenizers_cut_as_transformers_does(pre: str, tmp_path: Path) -> None:
    metadata = metadata_that_shows_cuts(pre)
    write_gguf(tmp_path / "vocab.gguf", metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="vocab.gguf")
    ours = Tokenizer.from_gguf(metadata)
    more = ("1234 1234123 a=1", "HE'S he's .a !!\n\n\n  1", "e\u0301 \u1e9b\u0323 \uff21")
    for text in (*TEXTS, *more):
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if pre == "qwen2":  # Qwen2's own tokenizer.json normalizes; so must the oracle
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
    ],
)
def test_a_beginning_token_is_added_where_the_file_says(
    overrides: dict[str, Any], added: list[int]
) -> None:
    tokenizer = tiny_tokenizer(**overrides)
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == [*added, *plain]


def test_llama_bpe_adds_a_beginning_token_when_the_file_does_not_say() -> None:
    metadata = tiny_gguf_metadata(**{"tokenizer.ggml.pre": "llama-bpe"})
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(metadata).encode("a")[0] == 1


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
    ("overrides", "named"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
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


# --- folders ---------------------------------------------------------------------------------


def test_a_folder_tokenizes_as_transformers_does(tiny_folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_folder)
    ours = Tokenizer.from_folder(tiny_folder)
    assert ours.vocab_size == len(theirs) == 339
    assert ours.eos_token_ids == {0, 2}  # generation_config says [2, 0], config says 2
    assert ours.bos_token_id == theirs.bos_token_id == 1
    assert ours.special_token_ids == set(theirs.all_special_ids)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == text


def folder_with(tmp_path: Path, tiny_folder: Path, **files: Any) -> Path:
    """A copy of the tiny tokenizer.json with these JSON files beside it."""
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 5}}, {5}),
        ({"config": {"eos_token_id": [5, 6]}, "generation_config": {"eos_token_id": 7}}, {5, 6, 7}),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "config": {"eos_token_id": None}}, {2}),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}}, {2}),
        ({"special_tokens_map": {"eos_token": "<|im_start|>"}}, {1}),
        ({"tokenizer_config": {"eos_token": "not a token"}, "config": {"eos_token_id": 9}}, {9}),
    ],
)
def test_end_tokens_are_the_union_of_what_the_files_declare(
    tmp_path: Path, tiny_folder: Path, files: dict[str, Any], expected: set[int]
) -> None:
    folder = folder_with(tmp_path, tiny_folder, **files)
    assert Tokenizer.from_folder(folder).eos_token_ids == expected


@pytest.mark.parametrize("name", ["config", "generation_config"])
@pytest.mark.parametrize(
    "value", ["2", 2.5, 2.0, 2**40, 2**31, -1, True, [None], [2, "3"], [[2]], {"a": 1}]
)
def test_an_end_token_that_is_no_token_id_is_refused(
    tmp_path: Path, tiny_folder: Path, name: str, value: Any
) -> None:
    folder = folder_with(tmp_path, tiny_folder, **{name: {"eos_token_id": value}})
    with pytest.raises(ModelLoadError, match=rf"/{name}\.json: expected eos_token_id"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "template", [[{"x": 1}], ["a"], [{"name": []}], [{"name": "default"}], 5, {"a": 1}]
)
def test_a_chat_template_of_another_shape_is_refused(
    tmp_path: Path, tiny_folder: Path, template: Any
) -> None:
    folder = folder_with(tmp_path, tiny_folder, tokenizer_config={"chat_template": template})
    with pytest.raises(ModelLoadError, match="expected the chat template to be a string or a list"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"],
)
@pytest.mark.parametrize(
    "content", [b'{"a":' * 100_000, b"[" * 100_000, b'{"a": "\xff"}', b"", b"3"]
)
def test_a_broken_file_beside_the_tokenizer_is_one_line_that_names_it(
    tmp_path: Path, tiny_folder: Path, name: str, content: bytes
) -> None:
    folder = folder_with(tmp_path, tiny_folder)
    (folder / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name) as caught:
        Tokenizer.from_folder(folder)
    assert caught.value.message.isprintable()


def test_a_chat_template_that_is_not_text_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    folder = folder_with(tmp_path, tiny_folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: expected text in UTF-8"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"]
)
def test_a_pipe_among_the_files_is_refused_and_not_waited_for(
    tmp_path: Path, tiny_folder: Path, name: str
) -> None:
    folder = folder_with(tmp_path, tiny_folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelLoadError, match=f"{name}: expected a regular file"):
        Tokenizer.from_folder(folder)


def test_a_folder_without_any_tokenizer_is_told_so_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.message.isprintable() and len(caught.value.message) < 300


def test_a_token_id_that_would_need_a_huge_table_is_refused(
    tmp_path: Path, tiny_folder: Path
) -> None:
    content = json.loads((tiny_folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"]["far away"] = 300_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelLoadError, match="below 4194304, got 300000000"):
        Tokenizer.from_folder(tmp_path)


def test_the_chat_template_is_found_wherever_it_is_kept(tmp_path: Path, tiny_folder: Path) -> None:
    def rendered(**files: Any) -> str:
        folder = folder_with(tmp_path, tiny_folder, **files)
        return Tokenizer.from_folder(folder).apply_chat_template([])

    with pytest.raises(InvalidRequestError, match="chat template"):
        rendered(tokenizer_config={"bos_token": "<|im_start|>"})
    assert rendered(tokenizer_config={"chat_template": "one"}) == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    assert rendered(tokenizer_config={"chat_template": named}) == "two"
    special = {"bos_token": {"content": "<|im_start|>"}, "chat_template": "{{ bos_token }}three"}
    assert rendered(tokenizer_config=special) == "<|im_start|>three"
    assert rendered(chat_template={"chat_template": "four"}) == "four"
    (tmp_path / "chat_template.jinja").write_text("fünf", encoding="utf-8")
    assert rendered() == "fünf"


def test_a_message_without_a_chat_template_is_refused_with_a_remedy() -> None:
    metadata = tiny_gguf_metadata()
    del metadata["tokenizer.chat_template"]
    with pytest.raises(InvalidRequestError, match="completions") as caught:
        Tokenizer.from_gguf(metadata).apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_limits_kept_in_tokenizer_json_cut_nothing(tmp_path: Path, tiny_folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    assert len(ours.encode("0123456789")) == 10
    assert len(ours.encode("0")) == 1


def test_a_folder_from_before_tokenizer_json_is_converted(tmp_path: Path) -> None:
    metadata = tiny_gguf_metadata()
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    merges = "#version: 0.2\n" + "\n".join(metadata["tokenizer.ggml.merges"]) + "\n"
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_token_ids == {0}
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "tokenizer"), ('{"model": {"type": "Magic"}}', "tokenizer"), (None, "tokenizer")],
)
def test_a_broken_or_missing_tokenizer_is_an_error(
    tmp_path: Path, content: str | None, named: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=named):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_config_beside_the_tokenizer_is_an_error_that_names_the_file(
    tmp_path: Path, tiny_folder: Path
) -> None:
    folder = folder_with(tmp_path, tiny_folder)
    (folder / "generation_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        Tokenizer.from_folder(folder)


def test_reading_tokenizer_json_imports_neither_transformers_nor_torch(tiny_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from streamkv.text.tokenizer import Tokenizer; "
        "Tokenizer.from_folder(Path(sys.argv[1])).encode('x'); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tiny_folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


# --- bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_are_its_utf8(text: str) -> None:
    tokenizer = tiny_tokenizer()
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    assert joined == text.encode()


def test_ids_without_a_token_add_nothing() -> None:
    tokenizer = tiny_tokenizer()
    assert [tokenizer.token_bytes(i) for i in (-1, tokenizer.vocab_size, 10**9)] == [b""] * 3
    assert tokenizer.token_text(-1) == ""


def test_a_token_that_is_not_in_the_byte_alphabet_is_literal_text() -> None:
    metadata = tiny_gguf_metadata()
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["｜x", "é｜"]
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    tokenizer = Tokenizer.from_gguf(metadata)
    for token_id, text in ((first, "｜x"), (first + 1, "é｜")):
        assert tokenizer.token_text(token_id) == tokenizer.decode([token_id]) == text


def test_half_a_character_is_shown_as_replacement_character() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]
    assert [tokenizer.token_text(i) for i in ids] == ["\ufffd", "\ufffd"]


def test_a_folder_and_transformers_agree_on_a_chat_prompt(tiny_folder: Path) -> None:
    messages = [{"role": "user", "content": "<b> & 'ü'"}, {"role": "assistant", "content": "ok"}]
    theirs = AutoTokenizer.from_pretrained(tiny_folder)
    assert isinstance(theirs, PreTrainedTokenizerFast) and theirs.chat_template == CHATML
    for add in (True, False):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
        ours = Tokenizer.from_folder(tiny_folder)
        assert ours.apply_chat_template(messages, add_generation_prompt=add) == expected


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace"])
def test_sentencepiece_tokens_join_to_the_text(kind: str, tmp_path: Path) -> None:
    backend = sentencepiece_backend(kind)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "he  hé a" if kind == "metaspace" else " he 日本 hé 😀 a  "
    ids = tokenizer.encode(text)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined.lstrip(" ") == text.lstrip(" ")
    for skip in (True, False):
        expected = backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
        # the stream of another text: special tokens first, a mark alone, half of 日
        stream = [1, *tokenizer.encode("  he"), 2, *tokenizer.encode("x日")[:-1]]
        assert "".join(Detokenizer(tokenizer, skip_special_tokens=skip).push(ids)) == expected
        pushed = Detokenizer(tokenizer, skip_special_tokens=skip).push(stream)
        assert pushed == backend.decode(stream, skip_special_tokens=skip).rstrip("\ufffd")


def test_a_decoder_whose_bytes_are_not_known_is_an_error(tmp_path: Path) -> None:
    backend = sentencepiece_backend("gemma")
    for decoder in (decoders.WordPiece(), decoders.Sequence([decoders.Fuse()])):
        backend.decoder = decoder
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ModelLoadError, match="byte-level|ByteLevel"):
            Tokenizer.from_folder(tmp_path)
