"""Downloading from a hub: huggingface_hub talks to a small one on the loopback interface."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import save_tiny_tokenizer
from weights.fake_hub import FakeHub, commit_of, fake_hub

from streamkv.config import EngineConfig
from streamkv.engine.loading import read_text_side
from streamkv.errors import ConfigError, ModelLoadError
from streamkv.weights import huggingface
from streamkv.weights.hub import (
    Checkpoint,
    checkpoint_files,
    resolve_checkpoint,
    resolve_tokenizer,
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
DESCRIPTIONS = {
    "config.json": b"{}",
    "generation_config.json": b"{ }",
    "tokenizer.json": b"{  }",
    "tokenizer_config.json": b"{   }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
}
WEIGHTS = {SHARDS[0]: b"first" * 1000, SHARDS[1]: b"second" * 2000}
BESIDES = {
    "README.md": b"#",
    ".gitattributes": b"*",
    "consolidated.safetensors": b"c",
    "model.fp32.safetensors": b"m",
    "pytorch_model.bin": b"p",
    "original/params.json": b"o",
    "onnx/model.onnx": b"n",
}
GGUF = {
    "README.md": b"#",
    "mmproj-F16.gguf": b"not it",
    "tiny-IQ2_M.gguf": b"iq2",
    "tiny-Q8_0.gguf": b"q8",
    "tiny-Q4_K_M.gguf": b"q4km",
    "more/tiny-BF16.gguf": b"bf16",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        server.repos["org/tiny"] = {"main": DESCRIPTIONS | BESIDES | WEIGHTS}
        server.repos["org/tiny-GGUF"] = {"main": dict(GGUF)}
        yield server


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def useless_parts(folder: Path) -> list[Path]:
    """Files that are half there under a name that no other process will use."""
    parts = folder.rglob("*.incomplete")
    return [part for part in parts if re.search(r"\.[0-9a-f]{8}\.incomplete$", part.name)]


def unplug(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there


def downloading_program() -> subprocess.Popen[bytes]:
    code = (
        "from streamkv.weights.hub import resolve_checkpoint; resolve_checkpoint('org/tiny-GGUF')"
    )
    return subprocess.Popen([sys.executable, "-c", code])


# --- what is fetched -------------------------------------------------------------------------


def test_a_model_is_fetched_once_without_what_is_not_read(hub: FakeHub, tmp_path: Path) -> None:
    stages = set()
    checkpoint = resolve_checkpoint("org/tiny", lambda stage, fraction: stages.add(stage))
    assert checkpoint.kind == "huggingface"
    assert names_in(checkpoint.path) == {*DESCRIPTIONS, *WEIGHTS}
    assert (checkpoint.path / SHARDS[1]).read_bytes() == WEIGHTS[SHARDS[1]]
    assert {path.name for path in checkpoint_files(checkpoint)} == {*DESCRIPTIONS, *WEIGHTS}
    assert stages == {"downloading org/tiny"}
    # the cache is the library's own, as other programs know it
    commit = commit_of(hub.repos["org/tiny"]["main"])
    assert checkpoint.path == tmp_path / f"home/hub/models--org--tiny/snapshots/{commit}"
    assert set(hub.fetched[-2:]) == set(SHARDS)  # weights last: who has them has everything
    hub.fetched.clear()
    assert resolve_checkpoint("org/tiny") == checkpoint
    assert hub.fetched == []


def test_a_single_file_of_weights_needs_no_index(hub: FakeHub) -> None:
    hub.repos["org/one"] = {"main": {"config.json": b"{}", "model.safetensors": b"w"} | BESIDES}
    path = resolve_checkpoint("https://huggingface.co/org/one/").path
    assert names_in(path) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("model", "content"),
    [
        ("org/tiny-GGUF", b"q4km"),
        ("hf.co/org/tiny-GGUF:q8_0", b"q8"),
        ("org/tiny-GGUF/more/tiny-BF16.gguf", b"bf16"),
        ("https://huggingface.co/org/tiny-GGUF/blob/main/tiny-Q8_0.gguf", b"q8"),
    ],
)
def test_of_gguf_files_one_is_fetched(hub: FakeHub, model: str, content: bytes) -> None:
    checkpoint = resolve_checkpoint(model)
    assert checkpoint.kind == "gguf" and checkpoint.path.suffix == ".gguf"
    assert checkpoint.path.read_bytes() == content
    assert len(hub.fetched) == 1


def test_a_tokenizer_is_fetched_without_weights(hub: FakeHub) -> None:
    tokenizer = resolve_tokenizer("org/tiny")
    assert tokenizer.kind == "huggingface"
    assert names_in(tokenizer.path) == set(DESCRIPTIONS) - {"model.safetensors.index.json"}
    with pytest.raises(ModelLoadError, match="org/tiny-GGUF: expected a tokenizer's files"):
        resolve_tokenizer("org/tiny-GGUF")


@pytest.mark.parametrize("name", ["spiece.model", "sentencepiece.bpe.model", "tekken.json"])
def test_a_tokenizer_may_be_one_file_of_an_older_format(hub: FakeHub, name: str) -> None:
    hub.repos["org/words"] = {"main": {"config.json": b"{}", name: b"words"}}
    assert (resolve_tokenizer("org/words").path / name).read_bytes() == b"words"


def test_what_only_describes_a_tokenizer_is_none(hub: FakeHub) -> None:
    hub.repos["org/words"] = {"main": {"tokenizer_config.json": b"{}"}}
    with pytest.raises(ModelLoadError, match="org/words: expected a tokenizer's files"):
        resolve_tokenizer("org/words")


def test_a_revision_is_a_branch_or_a_commit(hub: FakeHub) -> None:
    other = DESCRIPTIONS | WEIGHTS | {"config.json": b'{"other": 1}'}
    hub.repos["org/tiny"]["refs/pr/1"] = other
    path = resolve_checkpoint("org/tiny", revision="refs/pr/1").path
    assert (path / "config.json").read_bytes() == other["config.json"]
    assert resolve_checkpoint("org/tiny", revision=commit_of(other)).path == path
    assert resolve_checkpoint("org/tiny").path != path


def test_a_new_commit_brings_only_what_changed(hub: FakeHub) -> None:
    old = resolve_checkpoint("org/tiny").path
    hub.fetched.clear()
    hub.repos["org/tiny"]["main"] = hub.repos["org/tiny"]["main"] | {"config.json": b'{"new": 1}'}
    new = resolve_checkpoint("org/tiny").path
    assert new != old and names_in(new) == names_in(old)
    assert hub.fetched == ["config.json"]


@pytest.mark.parametrize("is_commit", [False, True])
def test_what_is_missing_or_cut_in_the_cache_is_fetched_again(
    hub: FakeHub, is_commit: bool
) -> None:
    files = DESCRIPTIONS | WEIGHTS
    revision = commit_of(hub.repos["org/tiny"]["main"]) if is_commit else ""
    snapshot = resolve_checkpoint("org/tiny", revision=revision).path
    (snapshot / "tokenizer.json").resolve().unlink()
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "config.json").write_bytes(b"")  # the blob, as these are links
    (snapshot / SHARDS[0]).write_bytes(WEIGHTS[SHARDS[0]][:-1])
    (snapshot / SHARDS[1]).write_bytes(b"")
    (snapshot / SHARDS[1]).unlink()
    hub.fetched.clear()
    assert resolve_checkpoint("org/tiny", revision=revision).path == snapshot
    assert {name: (snapshot / name).read_bytes() for name in names_in(snapshot)} == files
    assert set(hub.fetched) == {"tokenizer.json", "config.json", *SHARDS}


def test_a_hub_that_tells_no_sizes_is_believed(hub: FakeHub) -> None:
    hub.sizes["tiny-Q4_K_M.gguf"] = 0
    resolve_checkpoint("org/tiny-GGUF")
    resolve_checkpoint("org/tiny-GGUF")
    assert hub.fetched == ["tiny-Q4_K_M.gguf"]


def test_a_tokenizer_of_the_model_s_repository_has_its_revision(hub: FakeHub) -> None:
    other = DESCRIPTIONS | WEIGHTS | {"tokenizer.json": b'{"other": 1}'}
    hub.repos["org/tiny"]["v1"] = other
    hub.repos["org/tiny-GGUF"]["v1"] = dict(GGUF)
    commit = commit_of(other)
    page = "https://huggingface.co/org/tiny"
    for tokenizer, model, revision in [
        ("org/tiny", "org/tiny", "v1"),
        (page, "hf.co/org/tiny:Q8_0", "v1"),
        ("org/tiny", f"{page}/tree/v1", ""),
        (f"{page}/tree/v1", "org/tiny", "main"),
    ]:
        found = resolve_tokenizer(tokenizer, model=model, revision=revision)
        assert found.path.name == commit
    for model in ("org/tiny-GGUF", "smollm2-135m-instruct", "/no/path"):
        found = resolve_tokenizer("org/tiny", model=model, revision="v1")
        assert (found.path / "tokenizer.json").read_bytes() == DESCRIPTIONS["tokenizer.json"]


def test_the_engine_asks_for_the_tokenizer_of_the_model_s_revision(
    hub: FakeHub, tmp_path: Path
) -> None:
    save_tiny_tokenizer(tmp_path)
    tokenizer = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
    hub.repos["org/tiny"]["v1"] = DESCRIPTIONS | tokenizer  # those of main are broken
    (tmp_path / "config.json").write_bytes(b"{}")
    config = EngineConfig(model="org/tiny", tokenizer="org/tiny", revision="v1")
    checkpoint = Checkpoint(tmp_path, "huggingface")
    assert read_text_side(config, checkpoint).tokenizer.vocab_size == 339


def test_an_empty_variable_is_none(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "")
    path = resolve_checkpoint("org/tiny").path
    assert path.is_relative_to(tmp_path / "home")


def test_a_folder_for_downloads_and_the_token_are_used(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(tmp_path)
    path = resolve_checkpoint("org/tiny-GGUF", download_dir="else where").path
    assert path.is_relative_to(tmp_path / "else where")
    assert hub.tokens == {"Bearer hf_secret"}


# --- without the hub -------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["org/tiny", "org/tiny-GGUF:Q4_K_M"])
def test_what_is_in_the_cache_is_enough_without_a_network(
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: str,
) -> None:
    checkpoint = resolve_checkpoint(model)
    unplug(hub, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="streamkv"):
        assert resolve_checkpoint(model) == checkpoint
    assert "can't reach http://127.0.0.1:9" in caplog.text  # nobody should have to guess
    caplog.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_checkpoint(model) == checkpoint
    assert caplog.text == ""  # as was asked for


def test_a_revision_in_the_cache_is_enough_without_a_network(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/tiny"]["refs/pr/1"] = DESCRIPTIONS | WEIGHTS
    checkpoint = resolve_checkpoint("org/tiny", revision="refs/pr/1")
    unplug(hub, monkeypatch)
    for revision in ("refs/pr/1", checkpoint.path.name):
        assert resolve_checkpoint("org/tiny", revision=revision) == checkpoint
    with pytest.raises(ModelLoadError, match="can't reach"):
        resolve_checkpoint("org/tiny")


def test_a_commit_that_the_hub_has_lost_is_used_from_the_cache(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = resolve_checkpoint("org/tiny")
    del hub.repos["org/tiny"]["main"]
    assert resolve_checkpoint("org/tiny", revision=checkpoint.path.name) == checkpoint
    assert f"no revision '{checkpoint.path.name}'" in caplog.text


def test_a_part_of_a_model_in_the_cache_is_not_taken_for_all(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (resolve_checkpoint("org/tiny").path / SHARDS[1]).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=f"HF_HUB_OFFLINE.*{SHARDS[1]} is missing"):
        resolve_checkpoint("org/tiny")
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set.*unset it"):
        resolve_checkpoint("org/other")


# --- interruptions ---------------------------------------------------------------------------


def test_a_connection_that_breaks_is_taken_up_where_it_ended(hub: FakeHub) -> None:
    content = bytes(range(256)) * 10_000
    hub.repos["org/tiny-GGUF"]["main"]["tiny-Q4_K_M.gguf"] = content
    hub.stop_after["tiny-Q4_K_M.gguf"] = 2_500_000
    assert resolve_checkpoint("org/tiny-GGUF").path.read_bytes() == content
    assert hub.ranges == [f"bytes={2 << 20}-"]


def test_what_progress_raises_ends_the_download_at_once_and_leaves_nothing_half(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(stage: str, fraction: float) -> None:
        if hub.is_stuck.is_set():
            raise KeyboardInterrupt

    hub.stuck[SHARDS[1]] = 3000
    with pytest.raises(KeyboardInterrupt):
        resolve_checkpoint("org/tiny", stop)
    assert hub.hung_up.wait(20)
    assert not useless_parts(tmp_path)

    hub.stuck.clear()
    hub.fetched.clear()
    resolve_checkpoint("org/tiny")
    assert SHARDS[1] in hub.fetched and "config.json" not in hub.fetched


def test_a_program_that_is_killed_takes_its_download_with_it(hub: FakeHub, tmp_path: Path) -> None:
    hub.stuck["tiny-Q4_K_M.gguf"] = 1
    with downloading_program() as process:
        assert hub.is_stuck.wait(20)
        process.kill()
    assert hub.hung_up.wait(20)
    assert not useless_parts(tmp_path)


def test_what_a_killed_download_has_left_is_removed_by_the_next_one(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.stuck["tiny-Q4_K_M.gguf"] = 1
    with downloading_program() as process:
        assert hub.is_stuck.wait(20)
        (alive,) = useless_parts(tmp_path)
        stale = alive.with_name(f"{'0' * 64}.01234567.incomplete")
        fresh = alive.with_name(f"{'1' * 64}.01234567.incomplete")
        resumed = alive.with_name(f"{'2' * 64}.incomplete")
        for part in (stale, fresh, resumed):
            part.write_bytes(b"x" * 1000)
        for part in (stale, alive, resumed):
            os.utime(part, (0, 0))
        resolve_checkpoint("org/tiny-GGUF:Q8_0")
        process.kill()
        left = {part for part in (alive, stale, fresh, resumed) if part.exists()}
    assert left == {alive, fresh, resumed}
    assert hub.hung_up.wait(20)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "headers", "named"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "let you in.*/org/tiny.*HF_TOKEN"),
        (401, {"X-Error-Code": "RepoNotFound"}, "no .*/org/tiny, or it is private.*HF_TOKEN"),
        (401, {}, "answers 401: it wants a token: set HF_TOKEN"),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, "disabled"),
        (404, {}, "/org/tiny answers 404: check the name and HF_ENDPOINT"),
        (429, {}, "too many requests"),
        (451, {}, "answers 451: .*legal reasons; find another"),
        (503, {}, "answers 503: try again later"),
        (200, {}, "no hub's.*HF_ENDPOINT"),
    ],
)
def test_what_the_hub_refuses_is_one_line_that_says_what_to_do(
    hub: FakeHub, status: int, headers: dict[str, str], named: str
) -> None:
    hub.refused = status, headers, b"<html>"
    with pytest.raises(ModelLoadError, match=named) as caught:
        resolve_checkpoint("org/tiny")
    message = str(caught.value)
    assert message.startswith("org/tiny: ") and "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    ("token", "status", "named"),
    [("hf_old", 401, "not valid"), ("hf_old", 403, "may not read"), ("ä", 200, "HF_TOKEN: expec")],
)
def test_a_token_that_does_not_help_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, token: str, status: int, named: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.refused = status, {}, b""
    with pytest.raises(ModelLoadError, match=named):
        resolve_checkpoint("org/tiny")


@pytest.mark.parametrize("host", ["127.0.0.1:9", "no-such-host.invalid"])
def test_no_network_is_one_line_that_says_what_to_do(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://{host}")
    with pytest.raises(ModelLoadError, match=f"can't reach http://{host}.*proxy") as caught:
        resolve_checkpoint("org/tiny")
    assert "\n" not in str(caught.value)


def test_an_unknown_revision_or_file_is_refused(hub: FakeHub) -> None:
    with pytest.raises(ModelLoadError, match="no revision 'v9'"):
        resolve_checkpoint("org/tiny", revision="v9")
    with pytest.raises(ModelLoadError, match=r"no file a.gguf; it has .*tiny-Q8_0.gguf"):
        resolve_checkpoint("org/tiny-GGUF/a.gguf")


def test_an_index_of_shards_that_are_not_there_is_refused(hub: FakeHub) -> None:
    del hub.repos["org/tiny"]["main"][SHARDS[1]]
    with pytest.raises(ModelLoadError, match=f"index names '{SHARDS[1]}'"):
        resolve_checkpoint("org/tiny")


@pytest.mark.parametrize("weight_map", [{"a": ["x"]}, {"a": "../x"}, {}, None])
def test_an_index_of_no_files_is_a_broken_checkpoint(hub: FakeHub, weight_map: object) -> None:
    index = json.dumps({"weight_map": weight_map}).encode()
    hub.repos["org/tiny"]["main"]["model.safetensors.index.json"] = index
    with pytest.raises(ModelLoadError, match="weight_map to map.*the checkpoint is broken"):
        resolve_checkpoint("org/tiny")


def test_a_name_that_is_no_file_s_is_a_broken_repository(hub: FakeHub) -> None:
    hub.repos["org/bad"] = {"main": {"../up-Q4_K_M.gguf": b"x", "a-Q8_0.gguf": b"q8"}}
    with pytest.raises(ModelLoadError, match=r"file '../up-Q4_K_M.gguf'; the repository is broken"):
        resolve_checkpoint("org/bad")
    assert resolve_checkpoint("org/bad:Q8_0").path.read_bytes() == b"q8"


def test_too_full_a_disk_is_refused_before_the_download(hub: FakeHub) -> None:
    hub.sizes["tiny-Q4_K_M.gguf"] = 1 << 60
    with pytest.raises(ModelLoadError, match=r"expected 1099511627776 MiB.*--download-dir"):
        resolve_checkpoint("org/tiny-GGUF")
    assert hub.fetched == []


def test_a_folder_that_cannot_be_written_is_named(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=f"can't use {file}.*--download-dir"):
        resolve_checkpoint("org/tiny", download_dir=str(file))
    monkeypatch.setenv("HF_HOME", str(file))
    with pytest.raises(ModelLoadError, match=f"can't use {file}.*HF_HOME"):
        resolve_checkpoint("org/tiny")


def test_a_process_that_dies_is_an_error_with_its_last_words(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "_PROGRAM", "streamkv.no_such_module")
    with pytest.raises(ModelLoadError, match="without a result.*No module named"):
        resolve_checkpoint("org/tiny")


# --- strings ---------------------------------------------------------------------------------


def test_a_path_that_exists_is_never_a_hub_id(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("org/tiny")
    folder.mkdir(parents=True)
    with pytest.raises(ModelLoadError, match="a folder without config.json"):
        resolve_checkpoint("org/tiny")
    (folder / "config.json").write_bytes(b"{}")
    assert resolve_checkpoint("org/tiny") == Checkpoint(folder, "huggingface")
    with pytest.raises(ConfigError, match="leave --revision out"):
        resolve_checkpoint("org/tiny", revision="main")
    assert hub.fetched == []


def test_the_library_is_loaded_by_the_download_alone() -> None:
    probe = (
        "import sys, streamkv.weights.hub, streamkv.engine.loading; "
        "sys.exit('huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
