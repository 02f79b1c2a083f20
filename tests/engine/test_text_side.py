"""Which tokenizer, chat template and end tokens a model gets."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from engine.support import run
from fakes import FakeRunner
from tiny import save_tiny_tokenizer, tiny_gguf_metadata
from weights.gguf_files import write_gguf

from streamkv.config import EngineConfig
from streamkv.engine.async_engine import AsyncEngine
from streamkv.engine.loading import read_text_side
from streamkv.errors import ConfigError, EngineNotReadyError, ModelLoadError
from streamkv.text.tokenizer import Tokenizer
from streamkv.weights.hub import Checkpoint

HELLO = [{"role": "user", "content": "hi"}]


def write_json(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def text_side(path: Path, **config: Any) -> Tokenizer:
    checkpoint = Checkpoint(path, "gguf" if path.suffix == ".gguf" else "huggingface")
    return read_text_side(EngineConfig(model=str(path), **config), checkpoint).tokenizer


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with a tokenizer and nothing else, not even a config.json."""
    folder = tmp_path / "other"
    folder.mkdir()
    save_tiny_tokenizer(folder)
    return folder


def test_a_model_without_a_tokenizer_takes_the_one_that_is_named(
    tmp_path: Path, other: Path
) -> None:
    """It ends where the model's own files say, and where the tokenizer's do."""
    model = write_json(tmp_path / "model", config={"eos_token_id": 7})
    with pytest.raises(ModelLoadError, match="--tokenizer"):
        text_side(model)
    tokenizer = text_side(model, tokenizer=str(other))
    assert tokenizer.eos_token_ids == {2, 7}
    assert tokenizer.encode("the") == Tokenizer.from_folder(other).encode("the")
    bare = write_gguf(
        tmp_path / "bare.gguf", metadata={"tokenizer.ggml.eot_token_id": (9, "UINT32")}
    )
    assert text_side(bare, tokenizer=str(other)).eos_token_ids == {2, 9}


def test_a_tokenizer_of_tokens_that_the_model_lacks_is_said_before_weights_are_read(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitting = write_json(tmp_path / "fitting", config={"vocab_size": 339})
    assert text_side(fitting, tokenizer=str(other)).vocab_size == 339
    tokens = tiny_gguf_metadata()["tokenizer.ggml.tokens"][:-1]
    gguf = write_gguf(
        tmp_path / "short.gguf", metadata={"tokenizer.ggml.tokens": (tokens, "ARRAY")}
    )
    for short in (write_json(tmp_path / "short", config={"vocab_size": 338}), gguf):
        with pytest.raises(ConfigError, match=rf"--tokenizer .* 338 .*{short} has, .* 339;"):
            text_side(short, tokenizer=str(other))
    assert not caplog.messages
    write_json(other, config={"vocab_size": 338})
    text_side(other)
    assert "has 339 tokens, the model 338" in caplog.text


def test_a_template_from_a_file_is_used_whatever_the_checkpoint_has(
    tmp_path: Path, other: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}|{{ messages[0]['content'] }}|été", encoding="utf-8")
    expected = "<|im_start|>|hi|été"
    assert text_side(other, chat_template=str(file)).apply_chat_template(HELLO) == expected
    for broken in ("{% if", ["no", "templates"]):
        config = {"bos_token": "<|im_start|>", "chat_template": broken}
        write_json(other, tokenizer_config=config)
        assert text_side(other, chat_template=str(file)).apply_chat_template(HELLO) == expected
    tokenizer = Tokenizer.from_gguf(tiny_gguf_metadata(), chat_template=file.read_text("utf-8"))
    assert tokenizer.apply_chat_template(HELLO) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{% if x %}", "expected valid Jinja"),
        (b"\xff\xfe", "expected text in UTF-8"),
        (None, "no such file"),
    ],
)
def test_a_broken_template_file_is_refused_before_anything_is_read(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    engine_of_nothing = {"model": "/no/such/model", "runner": FakeRunner()}

    async def main() -> None:
        async with AsyncEngine(**engine_of_nothing, chat_template=str(file)):
            pass

    with pytest.raises(ConfigError, match=f"--chat-template .*{reason}") as caught:
        run(main)
    assert caught.value.message.isprintable()


def test_an_engine_says_what_its_checkpoint_recommends(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recommended = {"temperature": 0.5, "max_new_tokens": 9}
    model = write_json(tmp_path / "model", config={}, generation_config=recommended)
    caplog.set_level(logging.INFO, "streamkv")

    async def main() -> None:
        engine = AsyncEngine(str(model), runner=FakeRunner(), tokenizer=str(other))
        with pytest.raises(EngineNotReadyError):
            _ = engine.sampling_defaults
        async with engine:
            assert engine.sampling_defaults == {"temperature": 0.5, "max_tokens": 9}
            assert await engine.encode_chat(HELLO) == engine.tokenizer.encode(
                Tokenizer.from_folder(other).apply_chat_template(HELLO)
            )

    run(main)
    (line,) = (one for one in caplog.messages if "generation-config" in one)
    assert "temperature 0.5, max_tokens 9 (chats and responses, not completions);" in line
