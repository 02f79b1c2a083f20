"""Whatever is wrong with a checkpoint's files is said in one readable line that names them."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny import save_tiny_checkpoint, save_tiny_tokenizer, tiny_gguf_metadata
from weights.gguf_files import save_gguf

from streamkv.config import EngineConfig
from streamkv.engine.loading import build_model, read_text_side
from streamkv.errors import ConfigError, ModelLoadError
from streamkv.weights.gguf import GGUFFile
from streamkv.weights.hub import resolve_checkpoint

MAX_MESSAGE_CHARS = 400
TRUNCATIONS = (0.0, 0.01, 0.3, 0.7, 0.99)
TEXT_PARTS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
PARTS = ("config.json", *TEXT_PARTS)
INDEX = "model.safetensors.index.json"
SHARD = "model-2.safetensors"
CONTENTS = {
    "empty": b"",
    "blank": b" \n",
    "zeros": bytes(300),
    "noise": random.Random(0).randbytes(3000),
    "an HTML page or XML": b"<!doctype html><html>404</html>",
    "a zip archive": b"PK\x03\x04" + bytes(200),
    "a PDF document": b"%PDF-1.7\n%\xe2\xe3" + bytes(200),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "deep": b'{"a":' * 100_000,
    "control": b'{"\x1b[31m\x07":}',
    "list": b"[]",
    "null": b"null",
}


def refusal(path: Path, *, text_only: bool = False, **config: Any) -> str | None:
    """The line that loading it to the end gives; None if the model works. `text_only`: only what
    the checkpoint has besides weights is read."""
    engine = EngineConfig(
        model=str(path), num_gpu_blocks_override=8, packed_cache_gib=0, threads=1, **config
    )
    try:
        if text_only:
            read_text_side(engine, resolve_checkpoint(engine.model))
            return None
        model = build_model(engine, None, None, lambda stage, fraction: None)
        model.runner.load(lambda stage, fraction: None)
        model.runner.close()
    except (ModelLoadError, ConfigError) as error:
        assert error.message.isprintable()
        assert len(error.message.replace(str(path.parent), "")) < MAX_MESSAGE_CHARS
        return error.message
    return None


def refused(path: Path, named: str, **config: Any) -> str:
    message = refusal(path, **config)
    assert message is not None and named in message, message
    return message


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that works, in two shards."""
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("whole"), head_dim=16)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = sorted(tensors)[:10], sorted(tensors)[10:]
    weight_map = {}
    for number, names in enumerate(halves, start=1):
        save_file({name: tensors[name] for name in names}, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(folder) is None
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


@pytest.mark.parametrize("name", [*PARTS, INDEX, SHARD])
def test_a_file_with_something_else_inside_is_named(folder: Path, name: str) -> None:
    for what, content in CONTENTS.items():
        (folder / name).write_bytes(content)
        message = refused(folder, f"{folder / name}: ")
        if what.startswith(("a ", "an ")):
            assert what in message, message


@pytest.mark.parametrize("name", [*PARTS, INDEX, SHARD])
def test_a_file_that_is_cut_anywhere_is_named(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for part in TRUNCATIONS:
        (folder / name).write_bytes(content[: int(part * len(content))])
        refused(folder, f"{folder / name}: ")


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_folder(path: Path) -> None:
    path.mkdir()


def put_link_to_nowhere(path: Path) -> None:
    """As in a cache of downloads that somebody has cleared up."""
    path.symlink_to("blobs/gone")


def put_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def put_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", [*PARTS, "chat_template.jinja", INDEX, SHARD])
@pytest.mark.parametrize(
    "put", [put_pipe, put_folder, put_link_to_nowhere, put_link_to_itself, put_endless]
)
def test_what_is_no_regular_file_is_named_and_not_waited_for(
    folder: Path, name: str, put: Callable[[Path], None]
) -> None:
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    assert "regular file" in refused(folder, f"{folder / name}: expected a")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("config.json", "a folder without config.json"),
        ("tokenizer.json", "got no tokenizer.json"),
        (INDEX, f"expected model.safetensors or {INDEX}, found neither"),
        (SHARD, f"/{SHARD}: "),
    ],
)
def test_a_file_that_is_missing_is_named(folder: Path, name: str, named: str) -> None:
    (folder / name).unlink()
    refused(folder, named)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_file_that_is_not_needed_may_be_missing(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert refusal(folder) is None


@contextmanager
def without_the_rights_of_root() -> Iterator[None]:
    """This thread, and those it starts, may read what modes allow, root's too: see capset(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, rights) == 0
    before = rights[0]  # the effective ones
    rights[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        rights[0] = before
        assert libc.capset(header, rights) == 0


@pytest.mark.parametrize("name", [*PARTS, INDEX, SHARD])
def test_a_file_that_may_not_be_read_is_named(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    with without_the_rights_of_root():
        assert "Permission denied" in refused(folder, f"{folder / name}: ")


def test_a_broken_chat_template_names_the_checkpoint(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert "--chat-template" in refused(folder, f"{folder}: chat template: ")


WRONG: tuple[Any, ...] = (None, True, -1, 0, 1.5, float("nan"), float("inf"), 2**40, 10**30)
WRONG += ("", "x\x1b[2J\n", "a" * 5000, [], ["x"], [[None]], {"a": 1})


@pytest.mark.parametrize("name", [*PARTS, INDEX])
def test_no_value_of_another_type_or_size_crashes(folder: Path, name: str) -> None:
    """It is refused in one line that names the checkpoint, or it makes no difference."""
    content = json.loads((folder / name).read_text())
    paths = [(key,) for key in content]
    paths += [
        (key, inner) for key in ("rope_parameters", "model") for inner in content.get(key, ())
    ]
    for path in paths:
        for value in WRONG:
            changed = json.loads(json.dumps(content))
            if len(path) == 2:
                changed[path[0]][path[1]] = value
            else:
                changed[path[0]] = value
            (folder / name).write_text(json.dumps(changed))
            message = refusal(folder, text_only=name in TEXT_PARTS)
            is_small = path == ("max_position_embeddings",)  # then there is too little memory
            assert message is None or is_small or str(folder) in message, (path, value, message)


# --- GGUF ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("gguf"), head_dim=16, hidden_size=64)
    path = save_gguf(
        folder, folder / "whole.gguf", type_of=lambda name: "Q8_0", more=tiny_gguf_metadata()
    )
    assert refusal(path) is None
    return path


def header_bytes(path: Path) -> int:
    return min(tensor.offset for tensor in GGUFFile(path).tensors.values())


def test_a_gguf_file_cut_anywhere_is_named(whole_gguf: Path, tmp_path: Path) -> None:
    content, path = whole_gguf.read_bytes(), tmp_path / "cut.gguf"
    end = header_bytes(whole_gguf)
    for length in (*range(end + 64, 0, -97), *range(len(content) - 1, end, -7001), *range(32)):
        path.write_bytes(content[:length])
        refused(path, f"{path}: ")


def test_no_changed_byte_of_a_gguf_files_header_crashes(whole_gguf: Path, tmp_path: Path) -> None:
    content, path = whole_gguf.read_bytes(), tmp_path / "changed.gguf"
    rng = random.Random(1)
    end = header_bytes(whole_gguf)
    sizes = (0, 1, 2**31, 2**40, 2**64 - 1, len(content))
    for start in (*range(24), *rng.sample(range(end), 250)):
        for value in (rng.randbytes(1), struct.pack("<Q", rng.choice(sizes))):
            changed = bytearray(content)
            changed[start : start + len(value)] = value
            path.write_bytes(changed)
            message = refusal(path)
            assert message is None or str(path) in message, (start, value, message)


@pytest.mark.parametrize("what", CONTENTS)
def test_a_gguf_file_with_something_else_inside_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENTS[what])
    message = refused(path, f"{path}: ")
    assert not what.startswith(("a ", "an ")) or what in message


def test_a_file_of_another_byte_order_or_version_is_to_be_converted(
    whole_gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "big.gguf"
    for version in (struct.pack(">I", 3), struct.pack("<I", 1), struct.pack("<I", 9)):
        path.write_bytes(b"GGUF" + version + whole_gguf.read_bytes()[8:])
        assert "little-endian" in refused(path, f"{path}: expected GGUF version 2 or 3")


@pytest.mark.parametrize("put", [put_pipe, put_folder, put_link_to_nowhere, put_endless])
def test_what_is_no_regular_gguf_file_is_named(tmp_path: Path, put: Callable[[Path], None]) -> None:
    path = tmp_path / "model.gguf"
    put(path)
    refused(path, f"{path}")


def test_a_gguf_file_in_pieces_or_without_a_tokenizer_says_what_to_do(
    whole_gguf: Path, tmp_path: Path
) -> None:
    piece = save_gguf(whole_gguf.parent, tmp_path / "p.gguf", more={"split.count": 3})
    assert "--merge" in refused(piece, f"{piece}: expected a whole model")
    bare = save_gguf(whole_gguf.parent, tmp_path / "bare.gguf")
    assert "--tokenizer" in refused(bare, f"{bare}: expected tokenizer.ggml.model")
    save_tiny_tokenizer(tmp_path)
    assert refusal(bare, tokenizer=str(tmp_path)) is None


# --- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "exit_code", "named"),
    [
        ((), 1, "tokenizer.json: the tokenizer can't be read: it is a zip archive"),
        (("--chat-template", "no/such/file"), 2, "--chat-template no/such/file: "),
    ],
)
def test_the_server_ends_with_that_line(
    folder: Path, flags: tuple[str, ...], exit_code: int, named: str
) -> None:
    (folder / "tokenizer.json").write_bytes(CONTENTS["a zip archive"])
    command = [sys.executable, "-m", "streamkv", "serve", str(folder), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == exit_code and not done.stdout
    *log, line = done.stderr.splitlines()
    assert line.startswith("streamkv: ") and named in line and len(log) <= 1, done.stderr
