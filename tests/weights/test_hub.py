"""Finding checkpoints: what a string names. The default model is real, nothing needs a network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from streamkv.cache import cache_dir
from streamkv.config import DEFAULT_MODEL
from streamkv.errors import ConfigError, ModelLoadError
from streamkv.weights.hub import ALIASES, Checkpoint, resolve_checkpoint


def test_the_default_model_is_the_file_its_alias_names(default_checkpoint: Checkpoint) -> None:
    assert default_checkpoint.kind == "gguf"
    assert default_checkpoint.path.parent == cache_dir()
    digest = hashlib.sha256()
    with default_checkpoint.path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    assert digest.hexdigest() == ALIASES[DEFAULT_MODEL].sha256
    assert resolve_checkpoint(DEFAULT_MODEL) == default_checkpoint


def test_a_folder_with_a_config_is_a_huggingface_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert resolve_checkpoint(str(tmp_path)) == Checkpoint(tmp_path, "huggingface")


def test_a_gguf_file_is_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_checkpoint(str(file)) == Checkpoint(file, "gguf")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert resolve_checkpoint("~").path == tmp_path


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("smollm3", "does not exist and is no hub id: expected org/name"),
        ("/no/such/folder", "does not exist"),
        ("", "does not exist"),
        ("a\0b", "does not exist"),
        ("x" * 5000, "does not exist"),
        ("~nobody-of-that-name/model", "does not exist"),
        ("org/name/", "no hub id"),
        ("org/na me", "no hub id: expected letters"),
        ("org/name/model.safetensors", "no hub id: expected org/name"),
        ("models/model.gguf", "no hub id: expected org/name/file.gguf"),
        ("huggingface.co/org", "no hub id: expected org/name"),
        ("https://example.com/org/name", "no hub id"),
        ("{folder}", "folder without config.json"),
        ("{folder}/weights.bin", "file of another kind"),
    ],
)
def test_any_other_string_is_refused_and_told_what_is_accepted(
    tmp_path: Path, model: str, named: str
) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=named) as caught:
        resolve_checkpoint(model.replace("{folder}", str(tmp_path)))
    assert DEFAULT_MODEL in str(caught.value) and ".gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"STREAMKV_CACHE": "/a/b", "XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/streamkv"),
        ({"HOME": "/h"}, "/h/.cache/streamkv"),
        ({"STREAMKV_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/streamkv"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("STREAMKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


@pytest.mark.parametrize("own", [None, "~no-such-user/cache"])
def test_without_a_home_the_default_model_needs_a_folder(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    def no_home(*_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("STREAMKV_CACHE", raising=False)
    if own is None:
        monkeypatch.setattr(Path, "home", no_home)
    else:
        monkeypatch.setenv("STREAMKV_CACHE", own)
    with pytest.raises(ConfigError, match="set STREAMKV_CACHE"):
        resolve_checkpoint(DEFAULT_MODEL)
