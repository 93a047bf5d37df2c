"""Files by name below one root: a local folder, or any URL that fsspec knows (memory://, s3:// with its driver).

A write is atomic: whoever reads finds the former file whole or the new file whole, whatever moment the writer dies at.
On a local disk that is a temporary file in the same folder, fsync and a rename; in an object store it is one put.
Whatever goes wrong becomes a CheckpointError of one sentence: the place, what happened, what to do.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from culm.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 24
_TRIES = 3


class Storage:
    """Named files below a root. Names use "/" and are relative to the root. Every call talks to the storage anew."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._fs, self._base = _connect(self.root)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Put the file there, whole or not at all, with the folders it needs.

        On failure the former file of that name is untouched and no temporary file is left.
        """
        with self._explained("write", name):
            path = self.local_path(name)
            if path is None:
                self._put(self._full(name), bytes(data))
            else:
                _replace(path, memoryview(data).cast("B"))

    def _put(self, path: str, data: bytes) -> None:
        """Object stores know no folders; where there are some, they are made when missed."""
        try:
            self._fs.pipe_file(path, data)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)

    def read(self, name: str) -> bytes:
        """All bytes of the file."""
        with self._explained("read", name):
            return bytes(self._fs.cat_file(self._full(name)))

    def sha256(self, name: str) -> str:
        """The checksum of the file, read in pieces: it may be larger than the memory."""
        digest = hashlib.sha256()
        with self._explained("read", name), self._fs.open(self._full(name), "rb") as file:
            # Large pieces: after each one this thread has to wait for Python's lock, which the training holds.
            while piece := file.read(_PIECE):
                digest.update(piece)
        return digest.hexdigest()

    def size(self, name: str) -> int | None:
        """The number of bytes of the file; None if there is no such file."""
        with self._explained("look at", name):
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(self._full(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name. A storage that can not be asked is an error, not a no."""
        return self.size(name) is not None

    def list(self, prefix: str = "") -> list[str]:
        """The names of files and folders directly in that folder, sorted; none if there is no such folder."""
        with self._explained("list", prefix):
            self._fs.invalidate_cache()
            folder = self._full(prefix)
            try:
                found = self._fs.ls(folder, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            # Object stores may name the folder itself among its content.
            paths = {path.rstrip("/") for path in found} - {folder}
            return sorted(path.rpartition("/")[2] for path in paths)

    def delete(self, prefix: str) -> None:
        """Remove the file, or the folder with all that is in it. What is not there is fine."""
        assert prefix.strip("/."), "the root itself is never deleted"
        with self._explained("delete", prefix), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._full(prefix), recursive=True)

    def local_path(self, name: str) -> Path | None:
        """Where the file lies on this machine's file system; None for a URL of anything else."""
        return Path(self._full(name)) if isinstance(self._fs, LocalFileSystem) else None

    def shown(self, name: str) -> str:
        """The place as a user would write it, for messages."""
        return "/".join(part for part in (self.root.rstrip("/"), name) if part) or self.root

    def _full(self, name: str) -> str:
        assert ".." not in name.split("/"), name
        return f"{self._base.rstrip('/')}/{name}".rstrip("/")

    @contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        # Drivers raise what they like: each cloud has its own tree of errors.
        except Exception as error:
            raise CheckpointError(f"could not {verb} {self.shown(name)}: {_cause(error)}") from error


def _connect(root: str) -> tuple[Any, str]:
    try:
        filesystem, base = url_to_fs(root)
    except ImportError as error:
        raise CheckpointError(
            f"the driver for {root} is missing ({error}): install it, or name a local folder"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{root} can not be opened ({error}): name a local folder, or a URL such as s3://bucket/folder"
        ) from error
    return filesystem, base


def _cause(error: Exception) -> str:
    """What happened and what to do about it."""
    match error:
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return "the disk is full: free some space there, or keep fewer checkpoints"
        case PermissionError() | OSError(errno=errno.EROFS):
            return "permission was denied: allow it to this user, or choose another place"
        case FileNotFoundError():
            return "it is not there: it was never written, or has been deleted meanwhile"
        case IsADirectoryError():
            return "a folder stands there: choose another name"
        case NotADirectoryError() | FileExistsError():
            return "a file stands where a folder is needed: choose another place"
    return f"{type(error).__name__}: {error}: check that the place can be reached, then try again"


def _replace(path: Path, data: memoryview) -> None:
    """Write the file beside its place, make it durable, then move it there in one step. What is cleared away meanwhile
    is made again: when others have completed the same checkpoint, its folder is swept, and this part is merely late."""
    for left in reversed(range(_TRIES)):
        _make_folder(path.parent)
        try:
            _put(path, data)
        except FileNotFoundError:
            if not left:
                raise
        else:
            return


def _put(path: Path, data: memoryview) -> None:
    # The suffix keeps it out of sight of readers that take every *.safetensors in the folder.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write_through(temporary, data)
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write_through(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """The folder and those above it, each durable before anything is put into it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in the folder durable: without it a rename may be undone by a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can not sync a folder, and need not.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
