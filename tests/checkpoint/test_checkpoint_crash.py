"""A writer may die at any moment: earlier commits are intact, and the next writer continues from them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.checkpoint.sample_states import check_newest_checkpoint, files, save_checkpoint

from culm.checkpoint import CheckpointCatalog, Storage
from culm.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PRIMITIVES = ("open", "write", "fsync", "replace", "mkdir", "unlink", "remove", "rmdir")


class Killed(BaseException):
    """Not an Exception, so that no handler catches it."""


@contextmanager
def operations(stop: Callable[[int, str, Callable[..., Any], tuple[Any, ...]], None]) -> Iterator[list[str]]:
    """Call `stop` with the number of each disk operation before it happens. Returns the names of the operations so
    far."""
    done: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            done.append(name)
            stop(len(done), name, real, args)
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in PRIMITIVES:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield done


def kill_at(number: int) -> Callable[[int, str, Callable[..., Any], tuple[Any, ...]], None]:
    """From that operation on nothing happens any more: a dead process cleans nothing up. A write stops half-way."""

    def stop(now: int, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if now == number and name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        if now >= number:
            raise Killed

    return stop


def fail_at(number: int) -> Callable[[int, str, Callable[..., Any], tuple[Any, ...]], None]:
    """Only that operation fails; all others work."""

    def stop(now: int, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if now == number:
            raise OSError(errno.ENOSPC, "No space left on device")

    return stop


def one_round(folder: Path, step: int, *, workers: int = 2) -> None:
    """What a run does at a checkpoint."""
    catalog = CheckpointCatalog(Storage(folder))
    save_checkpoint(catalog, step, workers=workers)
    catalog.prune(keep_last=1)


def count(folder: Path, before: Callable[[Path], None], work: Callable[[Path], None]) -> int:
    before(folder)
    with operations(lambda *_: None) as done:
        work(folder)
    return len(done)


def test_a_kill_at_any_operation_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    total = count(tmp_path / "count", lambda folder: one_round(folder, 1), lambda folder: one_round(folder, 2))
    outcomes = []
    for number in range(1, total + 1):
        folder = tmp_path / str(number)
        one_round(folder, 1)
        with pytest.raises(Killed), operations(kill_at(number)):
            one_round(folder, 2)
        outcomes.append(check_newest_checkpoint(folder))
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}


def test_after_a_kill_at_any_operation_the_next_round_leaves_nothing_but_its_checkpoint(tmp_path: Path) -> None:
    total = count(tmp_path / "count", lambda folder: one_round(folder, 1), lambda folder: one_round(folder, 2))
    for number in range(1, total + 1):
        folder = tmp_path / str(number)
        one_round(folder, 1)
        with pytest.raises(Killed), operations(kill_at(number)):
            one_round(folder, 2)
        one_round(folder, 3, workers=3)
        assert check_newest_checkpoint(folder) == 3
        assert len(files(folder)) == 4
        assert Storage(folder).list() == ["step-00000003"]


def test_a_kill_while_the_only_checkpoint_is_written_again_leaves_it_whole(tmp_path: Path) -> None:
    total = count(
        tmp_path / "count", lambda folder: one_round(folder, 1), lambda folder: one_round(folder, 1, workers=3)
    )
    shards = set()
    for number in range(1, total + 1):
        folder = tmp_path / str(number)
        one_round(folder, 1)
        with pytest.raises(Killed), operations(kill_at(number)):
            one_round(folder, 1, workers=3)
        assert check_newest_checkpoint(folder) == 1
        shards.add(len(CheckpointCatalog(Storage(folder)).newest().manifest.files))
    assert shards == {2, 3}


def test_a_failure_of_any_operation_is_an_error_that_leaves_a_whole_checkpoint_and_no_temporary_file(
    tmp_path: Path,
) -> None:
    total = count(tmp_path / "count", lambda folder: one_round(folder, 1), lambda folder: one_round(folder, 2))
    for number in range(1, total + 1):
        folder = tmp_path / str(number)
        one_round(folder, 1)
        with pytest.raises(CheckpointError, match="the disk is full"), operations(fail_at(number)):
            one_round(folder, 2)
        assert check_newest_checkpoint(folder) in (1, 2)
        assert not [name for name in files(folder) if name.endswith(".tmp")]


class Doomed(Storage):
    """An object store whose user dies at the n-th put or delete."""

    def __init__(self, root: str, number: int) -> None:
        super().__init__(root)
        self.left = number

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._live()
        super().write(name, data)

    def delete(self, prefix: str) -> None:
        self._live()
        super().delete(prefix)

    def _live(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise Killed


def test_a_kill_at_any_put_or_delete_leaves_a_whole_checkpoint_in_an_object_store(memory_url: str) -> None:
    outcomes = []
    for number in range(1, 6):
        root = f"{memory_url}/{number}"
        save_checkpoint(CheckpointCatalog(Storage(root)), 1)
        doomed = CheckpointCatalog(Doomed(root, number))
        with pytest.raises(Killed):
            save_checkpoint(doomed, 2)
            doomed.prune(keep_last=1)
        outcomes.append(check_newest_checkpoint(root))
    assert outcomes == [1, 1, 1, 2, 2]


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_real_kill_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.checkpoint.write_checkpoints_forever", str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(5)]
        writer.kill()
        seen += [int(line) for line in writer.stdout]
    catalog = CheckpointCatalog(Storage(tmp_path))
    found = catalog.newest()
    assert found.rejected == ()
    # The commit of one more step may have been made and not yet printed.
    assert found.manifest.step in (seen[-1], seen[-1] + 1)
    for name, tensor in catalog.open(found.manifest).load().items():
        assert tensor.unique().tolist() == [found.manifest.step], name
