"""Files by name below one root: a local folder, or any URL that fsspec supports (memory://, s3:// with its driver).

A write is atomic: whenever the writer is killed, a reader finds the old file or the new file, complete. On a local disk
a write is a temporary file in the same folder, fsync and a rename; in an object store it is one put. Every error is
a CheckpointError of one sentence: the place, what happened, what to do.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from culm.errors import CheckpointError
from culm.storage_access import before_access

if TYPE_CHECKING:
    from collections.abc import Iterator

_READ_BYTES = 1 << 24
_WRITE_ATTEMPTS = 3


class Storage:
    """Named files below a root. Names use "/" and are relative to the root. Every call accesses the storage; nothing is
    cached.

    `existing`: a local folder, the root or one above it, that is never created: while it is gone, writes fail. Without
    this, files would be written below the mount point of a disk that is not mounted, and a folder that was moved away
    could not be moved back.
    """

    def __init__(self, root: str | os.PathLike[str], *, existing: str | None = None) -> None:
        self.root = os.fspath(root)
        self._fs, self._base = _connect(self.root)
        self._existing = None
        if existing is not None and isinstance(self._fs, LocalFileSystem):
            self._existing = Path(_connect(existing)[1])

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file completely or not at all, and create the folders it needs.

        On failure an existing file of that name is unchanged and no temporary file is left.
        """
        with self._translate_errors("write", name):
            path = self.local_path(name)
            if path is None:
                self._put_object(self._full_path(name), bytes(data))
            else:
                _write_atomically(path, memoryview(data).cast("B"), self._existing)

    @contextmanager
    def open_new(self, name: str) -> Iterator[BinaryIO]:
        """A file to write in pieces, which appears under its name when the block ends without an error. For a URL it is
        a temporary file of this machine until then."""
        with self._translate_errors("write", name):
            path = self.local_path(name)
            if path is None:
                with tempfile.NamedTemporaryFile(prefix="culm-") as file:
                    yield cast("BinaryIO", file)
                    file.flush()
                    self._fs.put_file(file.name, self._full_path(name))
                return
            _make_folder(path.parent, self._existing)
            with _renamed_at_end(path) as temporary, temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())

    def _put_object(self, path: str, data: bytes) -> None:
        """Write a file through fsspec. Object stores have no folders; where there are folders, they are created when
        missing."""
        try:
            self._fs.pipe_file(path, data)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)

    def read(self, name: str) -> bytes:
        """All bytes of the file."""
        with self._translate_errors("read", name):
            return bytes(self._fs.cat_file(self._full_path(name)))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """The bytes of the file from `begin` up to `end`."""
        with self._translate_errors("read", name):
            return bytes(self._fs.cat_file(self._full_path(name), begin, end)) if end > begin else b""

    def read_lines(self, name: str) -> Iterator[bytes]:
        """The lines of the file with their ends, one after the other: it may be larger than memory."""
        with self._translate_errors("read", name), self._fs.open(self._full_path(name), "rb") as file:
            yield from file

    def sha256(self, name: str) -> str:
        """The checksum of the file, read in pieces: it may be larger than memory."""
        digest = hashlib.sha256()
        with self._translate_errors("read", name), self._fs.open(self._full_path(name), "rb") as file:
            # Large pieces: after each one this thread waits for the interpreter lock, which training holds. Not larger
            # than the file: the allocator keeps what a process has once held.
            size = getattr(file, "size", None) or _READ_BYTES
            while piece := file.read(min(size, _READ_BYTES)):
                digest.update(piece)
        return digest.hexdigest()

    def size(self, name: str) -> int | None:
        """The size of the file in bytes; None if it does not exist."""
        with self._translate_errors("look at", name):
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(self._full_path(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def exists(self, name: str) -> bool:
        """Whether a file of that name exists. Raises CheckpointError if the storage cannot be reached."""
        return self.size(name) is not None

    def list(self, prefix: str = "") -> list[str]:
        """The names of files and folders directly in a folder, sorted; empty if the folder does not exist."""
        with self._translate_errors("list", prefix):
            self._fs.invalidate_cache()
            folder = self._full_path(prefix)
            try:
                found = self._fs.ls(folder, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            # Object stores may list the folder itself among its content.
            paths = {path.rstrip("/") for path in found} - {folder}
            return sorted(path.rpartition("/")[2] for path in paths)

    def delete(self, prefix: str) -> None:
        """Delete a file, or a folder with its content. A name that does not exist is no error."""
        assert prefix.strip("/."), "the root itself is never deleted"
        with self._translate_errors("delete", prefix), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._full_path(prefix), recursive=True)

    def local_path(self, name: str) -> Path | None:
        """The path of the file on this machine's file system; None for other URLs."""
        return Path(self._full_path(name)) if isinstance(self._fs, LocalFileSystem) else None

    def display_path(self, name: str) -> str:
        """The location as a user would write it, for messages."""
        return "/".join(part for part in (self.root.rstrip("/"), name) if part) or self.root

    def _full_path(self, name: str) -> str:
        assert ".." not in name.split("/"), name
        return f"{self._base.rstrip('/')}/{name}".rstrip("/")

    @contextmanager
    def _translate_errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            before_access(verb)
            yield
        except CheckpointError:  # of another file, which a caller reads or writes meanwhile
            raise
        # Drivers raise arbitrary exceptions: each cloud has its own classes.
        except Exception as error:
            raise CheckpointError(f"could not {verb} {self.display_path(name)}: {_describe_error(error)}") from error


class _FolderGone(FileNotFoundError):
    """A folder that must exist is not there. Its text is the path."""


def _connect(root: str) -> tuple[Any, str]:
    try:
        filesystem, base = url_to_fs(root)
    except ImportError as error:
        raise CheckpointError(
            f"the driver for {root} is missing ({error}): install it, or name a local folder"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{root} cannot be opened ({error}): name a local folder, or a URL such as s3://bucket/folder"
        ) from error
    return filesystem, base


def _describe_error(error: Exception) -> str:
    """The error message: what happened and what to do about it."""
    match error:
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            message = "the disk is full: free some space there, or keep fewer checkpoints"
        case PermissionError() | OSError(errno=errno.EROFS):
            message = "permission was denied: allow it to this user, or choose another place"
        case _FolderGone():
            message = f"the folder {error} is gone: bring it back, or create it"
        case FileNotFoundError():
            message = "it does not exist: it was never written, or has been deleted meanwhile"
        case IsADirectoryError():
            message = "it is a folder: choose another name"
        case NotADirectoryError() | FileExistsError():
            message = "a part of the path is a file, not a folder: choose another path"
        case _:
            message = f"{type(error).__name__}: {error}: check that the place can be reached, then try again"
    return message


def _write_atomically(path: Path, data: memoryview, existing: Path | None) -> None:
    """Write a file next to its place, make it durable, then rename it. Folders below `existing` that are deleted
    meanwhile are created again: when other workers have completed the same checkpoint, its folder is pruned, and this
    shard is only late."""
    for left in reversed(range(_WRITE_ATTEMPTS)):
        _make_folder(path.parent, existing)
        try:
            _write_and_rename(path, data)
        except FileNotFoundError:
            if not left:
                raise
        else:
            return


def _write_and_rename(path: Path, data: memoryview) -> None:
    with _renamed_at_end(path) as temporary:
        _write_and_sync(temporary, data)


@contextmanager
def _renamed_at_end(path: Path) -> Iterator[Path]:
    """A temporary name beside a file. What is there at the end gets the name of the file."""
    # The suffix hides it from readers that load every *.safetensors file of the folder.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write_and_sync(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path, existing: Path | None = None) -> None:
    """Create a folder and its parents for their owner only, each durable before anything is put into it. Raises
    _FolderGone if `existing` is one of them and is not there."""
    if folder.is_dir():
        return
    if folder == existing and not folder.exists():
        raise _FolderGone(str(folder))
    _make_folder(folder.parent, existing)
    folder.mkdir(mode=0o700, exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in the folder durable: without this, a power failure may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and do not need to.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
