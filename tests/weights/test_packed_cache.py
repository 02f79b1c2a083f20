"""Packed weights on disk: equal ones come back, and nothing else ever does."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import save_tiny_checkpoint
from weights.gguf_files import save_gguf
from weights.loading import change_tensors, load_weights

from streamkv.errors import ConfigError
from streamkv.ops.extension import load_extension
from streamkv.weights import packed_cache
from streamkv.weights.gguf_checkpoint import GGUFCheckpoint
from streamkv.weights.jobs import Progress
from streamkv.weights.packed_cache import PackedFile, packed_key

GIB = 1 << 30
KEY = "0123456789abcdef" * 4
SIZES = (64, 8, 3000, 1024)
NUM_BYTES = sum(SIZES)


@pytest.fixture(autouse=True)
def _pieces_are_small(monkeypatch):
    monkeypatch.setattr(packed_cache, "PIECE_BYTES", 512)


def random_buffers(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, np.uint8) for size in SIZES]


def keep(folder: Path, buffers: list[np.ndarray], key: str = KEY, max_bytes: int = GIB) -> None:
    """Write, with the progress checked."""
    fractions: list[float] = []
    PackedFile(folder, key, buffers).write(max_bytes, 2, Progress(NUM_BYTES, fractions.append))
    assert fractions == sorted(fractions)


def found(folder: Path, key: str = KEY, max_bytes: int = GIB) -> list[np.ndarray] | None:
    """What is read, if it is of use."""
    buffers = [np.zeros(size, np.uint8) for size in SIZES]
    fractions: list[float] = []
    done = Progress(NUM_BYTES, fractions.append)
    if not PackedFile(folder, key, buffers).read(max_bytes, 2, done):
        return None
    assert fractions[-1] == 1 and len(fractions) == 1 + 1 + 6 + 2  # a step for each piece
    return buffers


def equal(one: list[np.ndarray] | None, other: list[np.ndarray]) -> bool:
    return one is not None and all(map(np.array_equal, one, other))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_kept_comes_back(tmp_path, caplog):
    folder = tmp_path / "new" / "packed"
    assert found(folder) is None
    keep(folder, random_buffers(1))
    keep(folder, random_buffers(2), "f" * 64)
    assert equal(found(folder), random_buffers(1))
    assert equal(found(folder, "f" * 64), random_buffers(2))
    assert names(folder) == {f"{KEY}.bin", f"{'f' * 64}.bin"}
    assert not caplog.records


def test_the_log_says_where_packed_weights_are_kept_and_when_they_are_used(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    keep(tmp_path, random_buffers(1))
    assert found(tmp_path)
    kept, used = (record.getMessage() for record in caplog.records)
    assert kept.endswith(f"kept for the next start: {tmp_path / KEY}.bin")
    assert used.endswith(f"read from {tmp_path / KEY}.bin")


def one_warning(caplog) -> str:
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()
    caplog.clear()
    return record.getMessage()


def test_no_cut_and_no_flipped_bit_goes_unnoticed(tmp_path, caplog):
    keep(tmp_path, random_buffers(1))
    path = tmp_path / f"{KEY}.bin"
    whole = path.read_bytes()
    header_bytes = packed_cache.HEADER.size + 8 * 10 + packed_cache.DIGEST_BYTES
    data_start = len(whole) - NUM_BYTES
    for length in (0, 1, header_bytes, data_start, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert found(tmp_path) is None
        assert f"expected {len(whole)} bytes, got {length}" in one_warning(caplog)
    for place in (*range(0, header_bytes, 3), *range(data_start, len(whole), 61)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        assert found(tmp_path) is None
        assert "damaged" in one_warning(caplog)
    holed = whole[: data_start + 512] + bytes(512) + whole[data_start + 1024 :]
    path.write_bytes(holed)
    assert found(tmp_path) is None
    assert "damaged between bytes" in one_warning(caplog)
    path.write_bytes(whole + b"\0")
    assert found(tmp_path) is None
    assert "expected" in one_warning(caplog)

    keep(tmp_path, random_buffers(3))  # takes the place of what was of no use
    assert equal(found(tmp_path), random_buffers(3)) and not caplog.records


def test_words_in_each_others_place_do_not_go_unnoticed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(packed_cache, "CHECK_COLUMNS", 8)
    monkeypatch.setattr(packed_cache, "CHECK_ROWS", 4)  # of a piece's 64 words, 32 at a time
    keep(tmp_path, random_buffers(1))
    path = tmp_path / f"{KEY}.bin"
    whole = path.read_bytes()
    start = len(whole) - NUM_BYTES + 64 + 8  # of a buffer of 3000 bytes: 5 pieces and 55 words
    for one, other in [(0, 1), (0, 8), (3, 11), (0, 32), (7, 63), (321, 374), (373, 374)]:
        words = np.frombuffer(whole[start : start + 3000], np.uint64).copy()
        words[[one, other]] = words[[other, one]]
        path.write_bytes(whole[:start] + words.tobytes() + whole[start + 3000 :])
        assert found(tmp_path) is None
        assert "damaged between bytes" in one_warning(caplog)


def test_a_smaller_limit_holds_from_the_next_start_on(tmp_path, caplog):
    keys = [digit * 64 for digit in "abc"]
    for age, key in enumerate(keys):
        keep(tmp_path, random_buffers(age), key)
        os.utime(tmp_path / f"{key}.bin", (age, age))
    file_bytes = (tmp_path / f"{keys[0]}.bin").stat().st_size
    assert found(tmp_path, keys[0], max_bytes=2 * file_bytes)  # used now
    assert names(tmp_path) == {f"{keys[0]}.bin", f"{keys[2]}.bin"}
    assert found(tmp_path, "d" * 64, max_bytes=file_bytes) is None
    assert names(tmp_path) == {f"{keys[0]}.bin"}
    assert found(tmp_path, keys[0], max_bytes=file_bytes - 1) is None
    assert not names(tmp_path) and not caplog.records


def test_a_file_of_another_model_and_what_is_no_file_are_left_out(tmp_path, caplog):
    keep(tmp_path, random_buffers(1))
    os.rename(tmp_path / f"{KEY}.bin", tmp_path / f"{'a' * 64}.bin")
    assert found(tmp_path, "a" * 64) is None
    assert "another model" in one_warning(caplog)
    os.mkfifo(tmp_path / f"{KEY}.bin")
    assert found(tmp_path) is None  # and not waited for
    assert one_warning(caplog)
    os.unlink(tmp_path / f"{KEY}.bin")
    os.mkdir(tmp_path / f"{KEY}.bin")
    assert found(tmp_path) is None
    assert one_warning(caplog)
    keep(tmp_path, random_buffers(1))
    assert "not kept there" in one_warning(caplog)
    assert not any(name.endswith(".tmp") for name in names(tmp_path))


def test_what_was_used_longest_ago_goes_first(tmp_path, caplog):
    keys = [digit * 64 for digit in "abc"]
    for age, key in enumerate(keys):
        keep(tmp_path, random_buffers(age), key)
        os.utime(tmp_path / f"{key}.bin", (age, age))
    (tmp_path / "notes.txt").write_text("of somebody else")
    assert found(tmp_path, keys[0])  # used now: it becomes the last to go
    file_bytes = (tmp_path / f"{keys[0]}.bin").stat().st_size
    keep(tmp_path, random_buffers(9), KEY, max_bytes=3 * file_bytes)
    assert names(tmp_path) == {f"{key}.bin" for key in (keys[0], keys[2], KEY)} | {"notes.txt"}
    keep(tmp_path, random_buffers(9), KEY, max_bytes=2 * file_bytes + 5)
    assert names(tmp_path) == {f"{keys[0]}.bin", f"{KEY}.bin", "notes.txt"}
    assert not caplog.records


def test_what_is_larger_than_allowed_or_than_the_disk_likes_is_not_kept(
    tmp_path, caplog, monkeypatch
):
    keep(tmp_path, random_buffers(1), "b" * 64)
    keep(tmp_path, random_buffers(1), max_bytes=NUM_BYTES)  # the header counts
    assert "--packed-cache-gib allows" in one_warning(caplog)
    file_bytes = (tmp_path / f"{'b' * 64}.bin").stat().st_size
    usage = SimpleNamespace(free=2 * file_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    keep(tmp_path, random_buffers(1))
    assert "of free disk space" in one_warning(caplog)
    assert names(tmp_path) == {f"{'b' * 64}.bin"}
    usage.free += 1
    keep(tmp_path, random_buffers(1))
    assert f"{KEY}.bin" in names(tmp_path)


def test_files_that_were_never_finished_go_after_a_while(tmp_path):
    old, new = tmp_path / f"{KEY}.abc_1.tmp", tmp_path / f"{KEY}.abc_2.tmp"
    for path in (old, new):
        path.write_bytes(bytes(100))
    os.utime(old, (0, 0))
    keep(tmp_path, random_buffers(1))
    assert names(tmp_path) == {f"{KEY}.bin", new.name}


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(tmp_path, caplog):
    (tmp_path / "packed").write_text("a file")
    keep(tmp_path / "packed", random_buffers(1))
    assert str(tmp_path / "packed") in one_warning(caplog)
    assert found(tmp_path / "packed") is None
    assert one_warning(caplog)


def test_a_write_that_nobody_waits_for_leaves_nothing(tmp_path):
    def stop(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PackedFile(tmp_path, KEY, random_buffers(1)).write(GIB, 2, Progress(NUM_BYTES, stop))
    assert not names(tmp_path)


# --- through the loader -------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("STREAMKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "WORTH_BYTES", 1)
    monkeypatch.setattr(packed_cache, "WORTH_MADE_BYTES", 1)
    return tmp_path / "cache" / "packed"


def load_bytes(path: Path, **how: Any) -> list[bytes]:
    """All that is packed, vectors included."""
    weights = load_weights(path, **{"packed_cache_gib": 1.0, "dtype": "bfloat16"} | how)
    return [
        weight.tobytes()
        if isinstance(weight, np.ndarray)
        else weight.unpack(0, weight.num_outputs).tobytes()
        for weight in weights.values()
    ]


TYPES = {"embed_tokens": "Q8_0", "q_proj": "Q4_1", "k_proj": "F32", "o_proj": "BF16"}


def save_mixed(folder: Path) -> Path:
    """Quantized, partly quantized and float matrices."""
    return save_gguf(
        save_tiny_checkpoint(folder, num_key_value_heads=4),
        folder / "model.gguf",
        type_of=lambda name: TYPES.get(name.split(".")[-2], "Q4_0"),
    )


def test_a_second_load_takes_the_quantized_weights_from_the_cache(tmp_path, cache, monkeypatch):
    path = save_mixed(tmp_path)
    expected = load_bytes(path, quantization="auto", packed_cache_gib=0)
    assert not cache.exists()
    assert load_bytes(path, quantization="auto") == expected
    assert len(names(cache)) == 1

    def refuse(*_: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(GGUFCheckpoint, "blocks", refuse)
    assert load_bytes(path, quantization="auto", num_threads=1) == expected


def test_quantizing_at_load_is_done_once(tmp_path, cache, monkeypatch):
    folder = save_tiny_checkpoint(tmp_path)
    kept = {way: load_bytes(folder, quantization=way) for way in ("int8", "int4")}
    assert len(names(cache)) == 2
    loader_cpu = SimpleNamespace(**vars(load_extension()))
    num_values = 0

    def count(name: str) -> Any:
        def run(values: np.ndarray, format: str) -> Any:
            nonlocal num_values
            num_values += values.size
            return getattr(load_extension(), name)(values, format)

        return run

    for name in ("quantize", "quantize_reporting"):
        setattr(loader_cpu, name, count(name))
    monkeypatch.setattr("weights.loading.load_extension", lambda: loader_cpu)
    assert load_bytes(folder, quantization="int8") == kept["int8"]
    assert load_bytes(folder, quantization="int4") == kept["int4"]
    assert num_values == 3 * 40 * 512  # the fingerprints of int8, and of int8 and Q4_1
    assert load_bytes(folder, quantization="none") and len(names(cache)) == 2


def test_where_there_is_no_home_nothing_is_kept(tmp_path, cache, monkeypatch, caplog):
    def no_home(*_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    folder = save_tiny_checkpoint(tmp_path)
    expected = load_bytes(folder, quantization="int8", packed_cache_gib=0)
    monkeypatch.delenv("STREAMKV_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert load_bytes(folder, quantization="int8") == expected
    message = one_warning(caplog)
    assert "not kept" in message and "STREAMKV_CACHE" in message
    load_bytes(folder, quantization="int8", packed_cache_gib=0)
    assert not caplog.records


def test_what_can_not_be_quantized_is_not_kept(tmp_path, cache):
    folder = save_tiny_checkpoint(tmp_path)
    change_tensors(folder, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].mul_(1e6))
    with pytest.raises(ConfigError):
        load_bytes(folder, quantization="int4")
    assert not cache.exists()


def test_a_damaged_file_is_written_again(tmp_path, cache, caplog):
    path = save_mixed(tmp_path)
    expected = load_bytes(path, quantization="auto")
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    assert load_bytes(path, quantization="auto") == expected
    assert "damaged" in one_warning(caplog)
    assert load_bytes(path, quantization="auto") == expected and not caplog.records


@pytest.mark.parametrize("kind", ["huggingface", "gguf"])
def test_a_checkpoint_that_was_written_to_is_packed_again(tmp_path, cache, kind):
    path = written = save_mixed(tmp_path)
    how = {"quantization": "auto"}
    if kind == "huggingface":
        path, written, how = tmp_path, tmp_path / "model.safetensors", {"quantization": "int8"}
    before = load_bytes(path, **how)
    stat = written.stat()
    content = bytearray(written.read_bytes())
    for place in range(len(content) - 3000, len(content)):
        content[place] ^= 1
    written.write_bytes(content)
    os.utime(written, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as some copies do
    found = load_bytes(path, **how)
    assert found == load_bytes(path, packed_cache_gib=0, **how) != before
    assert len(names(cache)) == 2


def test_what_is_packed_at_once_leaves_nothing_on_disk(tmp_path, cache, monkeypatch):
    path = save_mixed(tmp_path)
    monkeypatch.setattr(packed_cache, "WORTH_BYTES", 1 << 20)
    monkeypatch.setattr(packed_cache, "WORTH_MADE_BYTES", 1 << 14)
    load_bytes(path, quantization="auto")  # of which only the floats beside others are made
    assert not cache.exists()
    load_bytes(path.parent, quantization="int8")
    assert len(names(cache)) == 1
    monkeypatch.setattr(packed_cache, "WORTH_BYTES", 1 << 14)
    load_bytes(path, quantization="auto")
    assert len(names(cache)) == 2


def test_another_layout_or_another_search_is_another_key(tmp_path):
    cpu = load_extension()

    class Shifted(cpu.QuantizedWeight):  # type: ignore[misc, name-defined]
        def buffers(self) -> list[np.ndarray]:
            return [np.roll(buffer, 1) for buffer in super().buffers()]

    def finer(values: np.ndarray, name: str) -> np.ndarray:
        rows = cpu.quantize(values, name)
        rows[0, 0] ^= 1
        return rows

    def key(formats: tuple[str, ...], **changed: Any) -> str:
        changed_cpu = SimpleNamespace(**vars(cpu) | changed)
        one = SimpleNamespace(name="w", parts=(("w", (64, 32)),), is_paired=False)
        return packed_key(changed_cpu, ("file", 1), [one], {"w": formats})

    plain = {own: key(own) for own in (("Q4_K",), ("Q6_K",), ("int8",), ("Q4_K", "Q6_K"))}
    assert len(set(plain.values())) == 4
    for own, value in plain.items():
        assert key(own) == value
        assert key(own, QuantizedWeight=Shifted) != value
        assert (key(own, quantize=finer) != value) == ("int8" in own)
