"""KvStore: blocks come back from disk, also in the next process, whatever happened in between."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from runner.kv_stores import (
    BLOCK_BYTES,
    SMALL,
    Driver,
    block,
    content_of,
    digest_of,
    number_of,
    opened,
    segments,
    warned,
)

from streamkv.errors import ConfigError
from streamkv.runner.kv_segments import INDEX_BITS, SegmentFormat
from streamkv.words import format_bytes


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "deep" / "kv"


def damage(path: Path, content: bytes, *, byte: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(content) + byte] ^= 4
    path.write_bytes(data)


# --- what it is for ---


def test_blocks_come_back(folder, caplog):
    with opened(folder) as driver:
        assert driver.index == []
        records = [driver.write(number, slot=number % 4) for number in range(20)]
        assert all(one.ok and not one.dropped for one in records)
        assert len({one.record for one in records}) == 20
        for number in random.Random(1).sample(range(20), 20):
            wanted = block(number, record=records[number].record)
            assert driver.read(wanted, slot=4 + number % 4) == content_of(number)
    assert warned(caplog) == []


def test_a_restart_finds_all(folder, caplog):
    with opened(folder) as driver:
        for number in range(10):
            driver.write(number)
    with opened(folder) as driver:
        assert [number_of(one) for one in driver.index] == list(range(10))
        for one in driver.index:
            assert one[1:] == block(number_of(one))[1:]
            assert driver.read(one) == content_of(number_of(one))
        assert list(driver.store.index()) == []
        driver.write(10)
    with opened(folder) as driver:
        assert len(driver.index) == 11
    assert len(segments(folder)) == 2  # a new file by each process that writes
    assert warned(caplog) == []


def test_a_process_that_writes_nothing_leaves_no_file(folder):
    with opened(folder):
        pass
    assert segments(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == ["lock"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_parents_come_first(folder):
    """In whatever order they were written; a circle is left out."""
    source = random.Random(3)
    parents = {number: source.randrange(-1, number) for number in range(60)}
    with opened(folder, limit_bytes=1 << 19) as driver:
        for number in source.sample(range(60), 60):
            driver.write(number, parent=parents[number])
        driver.write(100, parent=101)
        driver.write(101, parent=100)
    with opened(folder, limit_bytes=1 << 19) as driver:
        seen = {digest_of(-1)}
        for one in driver.index:
            assert one.parent in seen
            seen.add(one.digest)
        assert len(driver.index) == 60


def test_the_newest_of_equal_blocks_counts(folder):
    with opened(folder, limit_bytes=SMALL) as driver:
        records = [driver.write(number).record for number in (0, 1, 0)]
    with opened(folder, limit_bytes=SMALL) as driver:
        assert [one.record for one in driver.index] == [records[2], records[1]]
        assert [driver.read(one) for one in driver.index] == [content_of(0), content_of(1)]
        assert driver.read(block(0, record=records[0])) is None


# --- files that others wrote, or that were damaged ---


def test_damage_is_found_when_it_is_read(folder, caplog):
    with opened(folder) as driver:
        for number in range(3):
            driver.write(number)
    damage(segments(folder)[0], content_of(1))
    with opened(folder) as driver:
        assert warned(caplog) == []
        first, second, third = driver.index
        assert driver.read(second) is None
        assert driver.read(second) is None
        (line,) = warned(caplog)
        assert "block 1 can't be used: damaged data;" in line and str(segments(folder)[0]) in line
        assert [driver.read(first), driver.read(third)] == [content_of(0), content_of(2)]
        driver.write(1)
    with opened(folder) as driver:  # never given again: the new one is
        assert [driver.read(one) for one in driver.index] == [content_of(n) for n in range(3)]
    assert warned(caplog) == []


def test_damage_while_it_runs(folder, caplog):
    with opened(folder) as driver:
        records = [driver.write(number).record for number in range(4)]
        (path,) = segments(folder)
        damage(path, digest_of(1), byte=3)
        os.truncate(path, path.stat().st_size - 5)
        found = [driver.read(block(number, record=records[number])) for number in range(4)]
        assert found == [content_of(0), None, content_of(2), None]
        assert len(warned(caplog)) == 2


def test_another_block_is_not_given(folder, caplog):
    with opened(folder) as driver:
        record = driver.write(0).record
        assert driver.read(block(5, record=record)) is None
        assert "another prefix" in warned(caplog)[0]
        for unknown in (-1, 1, 1 << INDEX_BITS | 1, 7 << INDEX_BITS, 1 << 80):
            assert driver.read(block(0, record=unknown)) is None
        assert warned(caplog) == []


def test_a_line_for_each_damaged_file(folder, caplog):
    with opened(folder, limit_bytes=SMALL) as driver:
        for number in range(8):
            driver.write(number)
    first, second, third, fourth = segments(folder)
    damage(first, digest_of(0), byte=31)
    damage(first, digest_of(1), byte=0)
    os.truncate(second, second.stat().st_size - 1)
    third.write_bytes(b"")
    with opened(folder, limit_bytes=SMALL) as driver:
        assert [number_of(one) for one in driver.index] == [2, 6, 7]
        lines = warned(caplog)
        assert len(lines) == 3
        assert any("2 KV blocks not used: 2 damaged" in one and str(first) in one for one in lines)
        assert any("2 KV blocks not used: 1 cut off" in one and str(second) in one for one in lines)
        assert any("empty" in one and str(third) in one for one in lines)
        assert segments(folder) == [second, fourth]  # nothing of use was in the others
        driver.write(20)
    with opened(folder, limit_bytes=SMALL) as driver:
        assert len(driver.index) == 4


def test_everything_under_such_a_name(folder, caplog):
    folder.mkdir(parents=True)
    names = [f"kv-{number:08d}.segment" for number in range(8)]
    (folder / names[0]).mkdir()
    (folder / names[1]).symlink_to(folder / "elsewhere")
    os.mkfifo(folder / names[2])
    (folder / names[3]).write_bytes(b"hello")
    (folder / names[4]).write_bytes(random.Random(0).randbytes(10_000))
    (folder / names[5]).write_bytes(bytes(10_000))
    (folder / names[6]).symlink_to(folder / names[4])
    (folder / ("kv-" + "9" * 18 + ".segment")).write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    with opened(folder) as driver:
        assert driver.index == []
        lines = warned(caplog)
        assert len(lines) == 4
        assert any("and 3 more: not used: it is no regular file" in one for one in lines)
        assert driver.write(0).ok
    with opened(folder, limit_bytes=SMALL // 2) as driver:  # what isn't ours isn't deleted for room
        driver.write(1)
        driver.write(2)
    assert (folder / names[0]).is_dir() and (folder / names[1]).is_symlink()
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_unreadable_file(folder, caplog, monkeypatch):
    with opened(folder, limit_bytes=SMALL) as driver:
        for number in range(4):
            driver.write(number)
    first, second = segments(folder)
    real = os.open

    def open_most(path, *rest):
        if path == first:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *rest)

    monkeypatch.setattr(os, "open", open_most)
    with opened(folder, limit_bytes=SMALL) as driver:
        assert [number_of(one) for one in driver.index] == [2, 3]
        (line,) = warned(caplog)
        assert "Permission denied" in line and first.name in line


def test_other_models_share_the_folder_until_room_is_needed(folder, caplog):
    options = {"limit_bytes": SMALL}
    with opened(folder, fingerprint="A", **options) as driver:
        for number in range(4):
            driver.write(number)
    with opened(folder, fingerprint="B", **options) as driver:
        assert driver.index == []
        (line,) = warned(caplog)
        assert "and 1 more: not used: of another model" in line
        for number in range(2):
            driver.write(number)
    with opened(folder, fingerprint="A", **options) as driver:
        assert [driver.read(one) for one in driver.index] == [content_of(n) for n in range(4)]
        results = [driver.write(number) for number in range(4, 8)]
        assert not any(one.dropped for one in results)  # B's went, though it is newer
    with opened(folder, fingerprint="A", **options) as driver:
        assert [number_of(one) for one in driver.index] == list(range(8))


# --- how much there may be ---


def test_the_oldest_are_deleted(folder, caplog):
    written: list[int] = []
    gone: set[int] = set()
    with opened(folder, limit_bytes=SMALL) as driver:
        for number in range(50):
            result = driver.write(number)
            assert result.ok
            written.append(result.record)
            gone.update(result.dropped)
            assert sum(path.stat().st_size for path in segments(folder)) <= SMALL
        assert gone == set(written[: len(gone)]) and len(written) - len(gone) >= 6
        for number, record in enumerate(written):
            content = driver.read(block(number, record=record))
            assert content == (None if record in gone else content_of(number))
    assert warned(caplog) == []
    with opened(folder, limit_bytes=SMALL // 2) as driver:  # less is allowed now
        kept = [number_of(one) for one in driver.index]
        assert kept == list(range(50 - len(kept), 50)) and 2 <= len(kept) <= 4
        assert driver.write(50).record not in written
    assert sum(path.stat().st_size for path in segments(folder)) <= SMALL // 2


def test_one_block_is_enough_room(folder):
    needed = SegmentFormat("", BLOCK_BYTES, 4).file_bytes(1)
    with opened(folder, limit_bytes=needed) as driver:
        first, second = driver.write(0), driver.write(1)
        assert second.dropped == (first.record,)
        assert driver.read(block(1, record=second.record)) == content_of(1)
    with pytest.raises(ConfigError, match=r"--kv-cache-disk\): expected at least .* KiB"):
        Driver(folder, limit_bytes=needed - 1)


def test_what_a_lower_limit_deletes_is_said(folder, caplog):
    with opened(folder, limit_bytes=SMALL) as driver:
        for number in range(8):
            driver.write(number)
    first, second, third, _ = segments(folder)
    taken = format_bytes(2 * first.stat().st_size)
    limit_bytes = 2 * first.stat().st_size + 100
    with opened(folder, limit_bytes=limit_bytes) as driver:
        assert [number_of(one) for one in driver.index] == [4, 5, 6, 7]
        assert segments(folder)[0] == third
        (line,) = warned(caplog)
        assert line == (
            f"{folder}: deleted 2 files with 4 usable KV blocks, {taken}: "
            f"more than --kv-cache-disk ({format_bytes(limit_bytes)}) allows"
        )
        assert driver.write(8).dropped == (driver.index[0].record, driver.index[1].record)
    with opened(folder, limit_bytes=1 << 30) as driver:
        assert [number_of(one) for one in driver.index] == [6, 7, 8]
    assert warned(caplog) == []


def test_what_is_deleted_for_new_blocks_is_said_once_and_counted(folder, caplog):
    caplog.set_level("INFO")
    with opened(folder, limit_bytes=SMALL) as driver:
        size = 0
        for number in range(20):
            driver.write(number)
            size = size or segments(folder)[0].stat().st_size * (number % 2)
        allowed = f"--kv-cache-disk ({format_bytes(SMALL)})"
        (line,) = [one for one in caplog.messages if "usable" in one]
        assert f"{allowed} is reached" in line
        assert f": 1 file with 2 usable KV blocks, {format_bytes(size)}; more are only" in line
    num_gone = 10 - len(segments(folder))
    assert num_gone > 1
    assert caplog.messages[-1] == (
        f"{folder}: deleted in all {num_gone} files with {2 * num_gone} usable KV blocks, "
        f"{format_bytes(num_gone * size)}: as {allowed} says"
    )
    assert warned(caplog) == []


def test_what_fits_is_not_deleted_for_what_is_of_no_use(folder, caplog):
    """Foreign files, damaged ones and those that never fit go first."""
    caplog.set_level("INFO")
    with opened(folder, limit_bytes=SMALL) as driver:
        for number in range(6):
            driver.write(number)
    first, damaged, _ = segments(folder)
    damage(damaged, digest_of(2), byte=31)
    damage(damaged, digest_of(3), byte=0)
    size = first.stat().st_size
    foreign = folder / "kv-00000007.segment"
    foreign.write_bytes(bytes(size))
    (folder / "kv-00000008.segment").write_bytes(b"")
    with opened(folder, limit_bytes=1 << 20, fingerprint="another model") as driver:
        for number in range(20):
            driver.write(number)
    large = segments(folder)[-1]
    warned(caplog)
    with opened(folder, limit_bytes=3 * size) as driver:  # the large one goes, whatever is done
        assert {number_of(one) for one in driver.index} == {0, 1, 4, 5}
        assert not large.exists() and not damaged.exists() and foreign.exists()
        deleted = [one for one in caplog.messages if ": deleted" in one]
        assert deleted[0] == f"{damaged}: deleted: nothing in it is of use"
        assert "1 file with 0 usable KV blocks" in deleted[1] and len(deleted) == 2
    caplog.clear()
    with opened(folder, limit_bytes=2 * size) as driver:
        assert {number_of(one) for one in driver.index} == {0, 1, 4, 5}
        assert not foreign.exists()
        assert f"1 file with 0 usable KV blocks, {format_bytes(size)}" in warned(caplog)[1]


def test_an_empty_file_is_deleted_and_that_is_said(folder, caplog):
    caplog.set_level("INFO")
    folder.mkdir(parents=True)
    path = folder / "kv-00000100.segment"
    path.write_bytes(b"")
    with opened(folder):
        assert segments(folder) == []
        said = [one for one in caplog.messages if str(path) in one]
        assert said == [f"{path}: not used: empty", f"{path}: deleted: nothing in it is of use"]


# --- folders ---


def test_one_process_has_the_folder(folder):
    with opened(folder) as driver:
        with pytest.raises(ConfigError, match=r"--kv-cache-dir.*another one is using") as caught:
            Driver(folder)
        assert str(folder) in str(caught.value)
        assert driver.write(0).ok
    with opened(folder) as driver:
        assert len(driver.index) == 1


@pytest.mark.parametrize("number", (errno.EACCES, errno.EROFS, errno.EIO))
@pytest.mark.parametrize("function", ("open", "pwrite"))
def test_folders_that_cannot_be_written(folder, monkeypatch, number, function):
    folder.mkdir(parents=True)

    def fail(*args):
        paths = args[:1] if function == "open" else ()
        raise OSError(number, os.strerror(number), *paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(ConfigError, match="--kv-cache-dir.*can be written") as caught:
            Driver(folder)
    assert str(folder) in str(caught.value) and os.strerror(number) in str(caught.value)
    assert ("its permissions" in str(caught.value)) == (number == errno.EACCES)
    assert "delete" not in str(caught.value)
    assert (str(folder / "lock") in str(caught.value)) == (function == "open")
    with opened(folder) as driver:  # the lock is free, and nothing is left
        assert driver.write(0).ok


def test_folders_that_are_none(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name, what in (
        ("file", "file: it is a file; give another"),
        ("file/deep/folder", f"folder: {tmp_path}/file: it is a file; give another"),
        ("link", "link: it is no folder; give another"),
        ("/proc/nothing", "nothing: No such file or directory; give another"),
    ):
        with pytest.raises(ConfigError, match=f"--kv-cache-dir.*, got {tmp_path / name}") as caught:
            Driver(tmp_path / name)
        assert f"{what} one with --kv-cache-dir, or leave it out" in str(caught.value)


@pytest.mark.parametrize("name", ("lock", "probe"))
def test_a_file_that_is_none_is_named(folder, name):
    folder.mkdir(parents=True)
    path = folder / name
    path.mkdir()
    with pytest.raises(ConfigError, match=f"{path}: Is a directory; delete that, give another"):
        Driver(folder)
    path.rmdir()
    path.symlink_to(folder / "elsewhere")
    if name == "lock":
        with pytest.raises(ConfigError, match=f"{path}: Too many .* links; delete that, give"):
            Driver(folder)
        path.unlink()
    with opened(folder) as driver:
        assert driver.write(0).ok
