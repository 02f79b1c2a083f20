"""Tokenizer: folders and bytes, against `tokenizers` and `transformers`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from corpus import TEXTS
from tiny import CHATML, sentencepiece_backend, tiny_gguf_metadata, tiny_tokenizer
from tokenizers import decoders
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from streamkv.errors import InvalidRequestError, ModelLoadError
from streamkv.text.detokenizer import Detokenizer
from streamkv.text.tokenizer import Tokenizer

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


def added(text: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": text, "special": True, "normalized": False} | flags


@pytest.mark.parametrize("knows", ["tokens matched whole", "a vocabulary"])
@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({}, set()),
        ({"eos_token": "<|im_end|>", "mask_token": "not a token"}, {2}),
        ({"bos_token": added("<|im_start|>", lstrip=True), "pad_token": "<|endoftext|>"}, {0, 1}),
        ({"extra_special_tokens": {"image_token": "<|im_start|>"}}, {1}),
        ({"added_tokens_decoder": {"1": added("<|im_start|>", rstrip=True)}}, {1}),
        (
            {"added_tokens_decoder": {"2": added("<|im_end|>", special=False, lstrip=True)}},
            set(),
        ),
    ],
)
def test_tokens_that_only_the_configs_call_special_are_left_out_as_in_transformers(
    tmp_path: Path, tiny_folder: Path, knows: str, config: dict[str, Any], special: set[int]
) -> None:
    content = json.loads((tiny_folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = False
    if knows == "a vocabulary":
        content["added_tokens"] = []
    folder = folder_with(tmp_path, tiny_folder, tokenizer=content, tokenizer_config=config)
    ours = Tokenizer.from_folder(folder)
    assert ours.special_token_ids == special
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("a <|im_start|> user the<|im_end|> x<|endoftext|>", "<|im_end|>  <|im_start|>"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        shown = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == Detokenizer(ours).push(ids) == shown


def test_a_list_of_special_tokens_counts_and_what_is_no_token_does_not(
    tmp_path: Path, tiny_folder: Path
) -> None:
    content = json.loads((tiny_folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = False
    config = {
        "additional_special_tokens": ["<|im_start|>", {"content": "<|im_end|>"}, 7, {}, "new"],
        "sep_token": 7,
        "added_tokens_decoder": {"0": "x", "x": {"content": None}},
    }
    folder = folder_with(tmp_path, tiny_folder, tokenizer=content, tokenizer_config=config)
    ours = Tokenizer.from_folder(folder)
    assert (ours.special_token_ids, ours.vocab_size) == ({1, 2}, 339)


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


# --- as transformers has it --------------------------------------------------------------------


def test_a_folders_tokenizer_is_given_as_transformers_has_it(tiny_folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_folder)
    given = Tokenizer.from_folder(tiny_folder).to_transformers(256)
    assert given.model_max_length == 256
    assert len(given) == len(theirs) == 339
    assert given.special_tokens_map == theirs.special_tokens_map
    assert given.convert_tokens_to_ids("<|im_end|>") == given.eos_token_id == 2
    chat = [{"role": "user", "content": "hi"}]
    assert given.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    for text in TEXTS:
        assert given(text)["input_ids"] == theirs(text)["input_ids"]
    assert given.decode(5) == theirs.decode(5)


def test_what_is_done_to_it_leaves_ours_as_it_is() -> None:
    ours = tiny_tokenizer()
    given = ours.to_transformers(256)
    assert (given.bos_token_id, given.eos_token_id, given.pad_token_id) == (1, 2, 0)
    padded = given(["a", "the quick brown fox"], padding=True, truncation=True, max_length=2)
    assert [len(ids) for ids in padded["input_ids"]] == [2, 2]
    given.add_tokens(["brown fox"])
    for text in TEXTS:
        assert ours.encode(text) == tiny_tokenizer().encode(text)


def test_a_special_token_that_the_model_has_not_is_left_out(tmp_path: Path) -> None:
    sentencepiece_backend("llama").save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "</s>", "pad_token": "<not there>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ours = Tokenizer.from_folder(tmp_path)
    given = ours.to_transformers(256)
    assert len(given) == ours.vocab_size
    assert given.pad_token is None and given.chat_template is None
    for text in TEXTS:
        assert given(text)["input_ids"] == ours.encode(text)
