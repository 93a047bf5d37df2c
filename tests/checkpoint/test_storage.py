from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import tracemalloc
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from tests.checkpoint.sample_states import files

from culm.checkpoint import Storage
from culm.checkpoint import storage as storage_module
from culm.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_what_is_written_is_read_back(storage: Storage) -> None:
    storage.write("a/b.bin", b"one")
    storage.write("a/b.bin", memoryview(b"other"))
    assert storage.read("a/b.bin") == b"other"
    assert storage.size("a/b.bin") == 5
    assert storage.sha256("a/b.bin") == hashlib.sha256(b"other").hexdigest()


def test_folders_of_a_driver_that_knows_them_are_made_when_missed(tmp_path: Path) -> None:
    storage = Storage(f"simplecache::file://{tmp_path}/run")
    storage.write("a/b.bin", b"one")
    assert (tmp_path / "run" / "a" / "b.bin").read_bytes() == b"one"


def test_an_empty_file_is_a_file(storage: Storage) -> None:
    storage.write("empty", b"")
    assert storage.exists("empty")
    assert storage.read("empty") == b""


def test_a_folder_or_a_missing_name_is_no_file(storage: Storage) -> None:
    storage.write("a/b.bin", b"one")
    assert not storage.exists("a")
    assert not storage.exists("c")
    assert not storage.exists("a/b.bin/c")


def test_a_listing_names_files_and_folders_in_order(storage: Storage) -> None:
    for name in ("b/2", "b/1", "a/x/y", "c"):
        storage.write(name, b".")
    assert storage.list() == ["a", "b", "c"]
    assert storage.list("b") == ["1", "2"]
    assert storage.list("nowhere") == []


def test_a_root_that_does_not_exist_is_empty(storage: Storage) -> None:
    assert storage.list() == []


def test_deleting_takes_the_file_or_the_folder_and_nothing_else(storage: Storage) -> None:
    for name in ("a/1", "a/2", "ab/1"):
        storage.write(name, b".")
    storage.delete("a/1")
    assert storage.list("a") == ["2"]
    storage.delete("a")
    storage.delete("a")
    assert storage.list() == ["ab"]


def test_a_path_a_file_url_and_a_string_name_the_same_place(tmp_path: Path) -> None:
    Storage(tmp_path).write("x", b"1")
    assert Storage(f"file://{tmp_path}").read("x") == b"1"
    assert Storage(f"{tmp_path}/").read("x") == b"1"


def test_a_written_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Storage(tmp_path).write("x", b"1")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_writing_survives_a_system_that_takes_a_few_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    Storage(tmp_path).write("x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_a_file_is_durable_before_it_takes_its_place_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            done.append(name)
            return real(*args)

        return call

    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    Storage(tmp_path).write("x", b"1")
    assert done == ["write", "fsync", "replace", "fsync"]


def test_a_folder_that_is_deleted_while_a_file_is_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process deletes an abandoned checkpoint."""
    write = storage_module._write_and_sync
    deleted: list[Path] = []

    def too_late(path: Path, data: memoryview) -> None:
        if not deleted:
            path.parent.rmdir()
            deleted.append(path.parent)
        write(path, data)

    monkeypatch.setattr(storage_module, "_write_and_sync", too_late)
    Storage(tmp_path).write("step/part", b"late")
    assert deleted
    assert [file.name for file in (tmp_path / "step").iterdir()] == ["part"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_is_one_sentence_and_the_former_file_stays(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path)
    storage.write("a/x", b"former")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match=r"could not write .*/a/x: the disk is full: free some space"):
        storage.write("a/x", b"new")
    assert files(tmp_path) == {"a/x"}
    assert storage.read("a/x") == b"former"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.real
def test_a_disk_that_is_really_full_keeps_the_former_file_and_no_other(tiny_disk: Path) -> None:
    storage = Storage(tiny_disk)
    storage.write("x", b"former")
    with pytest.raises(CheckpointError, match="the disk is full"):
        storage.write("x", bytes(100_000))
    assert files(tiny_disk) == {"x"}
    assert storage.read("x") == b"former"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(errno.EACCES, "no"), "permission was denied"),
        (OSError(errno.EROFS, "no"), "permission was denied"),
        (OSError(errno.EIO, "bad sector"), r"OSError: .*bad sector: check that the place can be reached"),
    ],
)
def test_an_error_of_the_system_says_what_to_do(
    error: OSError, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(CheckpointError, match=f"could not write .*/x: {sentence}"):
        Storage(tmp_path).write("x", b"1")


def test_an_error_of_a_remote_driver_becomes_a_checkpoint_error(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Throttled(Exception):
        pass

    def refuse(*_: Any, **__: Any) -> None:
        raise Throttled("slow down")

    storage = Storage(memory_url)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", refuse)
    with pytest.raises(CheckpointError, match=f"could not look at {memory_url}/x: Throttled: slow down"):
        storage.exists("x")


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"could not write .*/a/x: a part of the path is a file, not a folder"):
        Storage(tmp_path).write("a/x", b"1")


def test_a_folder_in_the_way_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match=r"could not write .*/a: it is a folder"):
        Storage(tmp_path).write("a", b"1")
    assert files(tmp_path) == set()


def test_reading_a_missing_file_names_it(storage: Storage) -> None:
    with pytest.raises(CheckpointError, match=r"could not read .*/x: it does not exist"):
        storage.read("x")


def test_lines_are_read_one_by_one(storage: Storage) -> None:
    storage.write("lines", b"one\ntwo\n\nlast")
    assert list(storage.read_lines("lines")) == [b"one\n", b"two\n", b"\n", b"last"]
    with pytest.raises(CheckpointError, match="does not exist"):
        next(storage.read_lines("missing"))


def test_the_checksum_of_a_small_file_needs_little_memory(tmp_path: Path) -> None:
    """The allocator keeps what was needed once."""
    storage = Storage(tmp_path)
    storage.write("small", bytes(1000))
    tracemalloc.start()
    try:
        assert storage.sha256("small") == hashlib.sha256(bytes(1000)).hexdigest()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("culm.checkpoint.storage.url_to_fs", missing)
    with pytest.raises(CheckpointError, match=r"driver for s3://bucket/run is missing \(Install s3fs to access S3\)"):
        Storage("s3://bucket/run")


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"floppy://a cannot be opened .*name a local folder"):
        Storage("floppy://a")
