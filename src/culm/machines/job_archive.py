"""Job archives: the source files of a job, as one content-addressed archive that other machines unpack.

An archive holds the files under the folder that the job's modules are imported from, without the ones that .gitignore
and .culmignore exclude. It travels through the encrypted store, and its digest is in the job's sealed reference, so a
machine never runs code that was not sent by a holder of the secret.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pathspec

from culm.errors import RunError, UsageError
from culm.job import import_root

MAX_BYTES = 32 << 20
"""Largest size of an archive before compression. It is kept in the store, which is no place for data."""
_LARGEST_SHOWN = 3
_ALWAYS_IGNORED = (
    ".git/",
    "__pycache__/",
    "*.pyc",
    ".venv/",
    "venv/",
    "node_modules/",
    ".*_cache/",
    ".ipynb_checkpoints/",
)
_IGNORE_FILES = (".gitignore", ".culmignore")
_RUN_FOLDER_FILES = ("steps.jsonl", "events.jsonl")
"""A folder with these files is a run folder."""
_HEAD_FILES = ("secret", "key.pem", "certificate.pem")
"""A folder with these files is the folder of `culm head`."""


class JobArchive(NamedTuple):
    """A packed archive."""

    digest: str
    """SHA-256 of the packed data."""
    data: bytes
    reference: str
    """FILE[:function] of the job, relative to the top folder of the archive."""


def pack_job(reference: str) -> JobArchive:
    """Pack the files of a job. `reference`: FILE[:function]. The same files give the same digest.

    Raises UsageError if they are larger than MAX_BYTES.
    """
    file_name, colon, function = reference.partition(":")
    file = Path(file_name).resolve()
    root = import_root(file)
    files = sorted({*_source_files(root), file})
    sizes = {path: path.stat().st_size for path in files}
    if sum(sizes.values()) > MAX_BYTES:
        raise UsageError(_too_large_message(root, sizes))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            entry.size, entry.mode = sizes[path], 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as content:
                tar.addfile(entry, content)
    data = zlib.compress(packed.getvalue())
    return JobArchive(hashlib.sha256(data).hexdigest(), data, f"{file.relative_to(root).as_posix()}{colon}{function}")


def unpack_job(data: bytes, digest: str, cache: Path) -> Path:
    """Unpack an archive below `cache` and return its top folder; one that is there already is used.

    Raises RunError if the data does not have this digest, or if other users can write to `cache`.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise RunError(f"the archive of the job is damaged: its digest is not {digest[:12]}")
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(cache)
    target = cache / digest
    if target.is_dir():
        return target
    unpacked = Path(tempfile.mkdtemp(dir=cache, prefix=f".{digest[:12]}-"))
    with tarfile.open(fileobj=io.BytesIO(zlib.decompress(data))) as tar:
        tar.extractall(unpacked, filter="data")
    try:
        unpacked.rename(target)
    except OSError:  # another agent of this machine was faster
        if not target.is_dir():
            raise
    return target


def _check_owner(cache: Path) -> None:
    """Refuse a folder in which another user could put code under the digest of an archive."""
    found = cache.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RunError(
            f"{cache} belongs to another user, or others can write to it: set XDG_CACHE_HOME to your own folder"
        )


def archive_cache() -> Path:
    """The folder for unpacked archives: $XDG_CACHE_HOME/culm/jobs, else ~/.cache/culm/jobs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "culm" / "jobs"


def _source_files(root: Path) -> Iterator[Path]:
    """The files under a folder that are not ignored. Links that lead out of the folder are left out."""
    rules = [(root, pathspec.GitIgnoreSpec.from_lines(_ALWAYS_IGNORED))]
    for folder, subfolders, names in os.walk(root):
        here = Path(folder)
        own = [line for name in _IGNORE_FILES if name in names for line in _read_lines(here / name)]
        if own:
            rules.append((here, pathspec.GitIgnoreSpec.from_lines(own)))
        subfolders[:] = [
            name
            for name in subfolders
            if not _ignored(here / name, rules, is_folder=True) and not _is_left_out(here / name)
        ]
        for name in names:
            path = here / name
            if path.is_file() and path.resolve().is_relative_to(root) and not _ignored(path, rules):
                yield path


def _ignored(path: Path, rules: list[tuple[Path, pathspec.GitIgnoreSpec]], *, is_folder: bool = False) -> bool:
    return any(
        path.is_relative_to(base) and spec.match_file(path.relative_to(base).as_posix() + "/" * is_folder)
        for base, spec in rules
    )


def _is_left_out(folder: Path) -> bool:
    """Whether a folder is that of a run, or holds the secrets of a head."""
    is_run = any((folder / name).is_file() for name in _RUN_FOLDER_FILES)
    return is_run or all((folder / name).is_file() for name in _HEAD_FILES)


def _read_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _too_large_message(root: Path, sizes: dict[Path, int]) -> str:
    largest = sorted(sizes, key=lambda path: -sizes[path])[:_LARGEST_SHOWN]
    names = ", ".join(f"{path.relative_to(root)} ({sizes[path] / 2**20:.1f} MiB)" for path in largest)
    return (
        f"the job's folder {root} has {sum(sizes.values()) / 2**20:.0f} MiB, and {MAX_BYTES >> 20} MiB can be sent to "
        f"other machines: list data in {root}/.culmignore and give it by URL; the largest files are {names}"
    )
