"""Blobs: values that are too large for one key (plans for a thousand workers), in parts, under the hash of their
content. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from culm.errors import UsageError

MAX_BLOB = 64 * 2**20
LARGEST_VALUE = 2**19
"""Bytes that lie under a key itself: etcd takes requests of 1.5 MiB, and a swap names two values."""
_PART = 2**20
_MARK = b"\0blob "


def pointer(value: bytes) -> bytes:
    """What lies under the key of a value: the value or, if that is large, the name of a blob."""
    return _MARK + name(value).encode() if is_blob(value) else value


def is_blob(value: bytes) -> bool:
    """Whether a value lies in a blob. Nothing else ever looks like a pointer."""
    return len(value) > LARGEST_VALUE or value.startswith(_MARK)


def pointed(found: bytes) -> str | None:
    """The name of the blob that what lies under a key stands for; None: it is the value itself."""
    return found.removeprefix(_MARK).decode() if found.startswith(_MARK) else None


def name(data: bytes) -> str:
    """The SHA-256 of the content; refuses what is larger than a plan could ever be."""
    if len(data) > MAX_BLOB:
        raise UsageError(f"a value of {len(data):,} bytes is too large for the store: it takes {MAX_BLOB:,}")
    return hashlib.sha256(data).hexdigest()


def folder(home: str, name: str = "") -> bytes:
    """What the keys of a blob begin with; without a name those of all blobs."""
    return f"{home}blob/{name}{'/' if name else ''}".encode()


def parts_key(home: str, name: str) -> bytes:
    """The key that is written last: with it the blob is whole."""
    return folder(home, name) + b"~parts"


def name_of(home: str, key: bytes) -> str:
    return key.removeprefix(folder(home)).partition(b"/")[0].decode()


def split(home: str, name: str, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the parts, in order of writing, which is also the order of their names."""
    starts = range(0, len(data), _PART)
    for i, start in enumerate(starts):
        yield folder(home, name) + f"{i:06}".encode(), data[start : start + _PART]
    yield parts_key(home, name), str(len(starts)).encode()


def join(name: str, values: list[bytes]) -> bytes | None:
    """The content from the values of a blob's keys, by name; None if it is not whole."""
    data = b"".join(values[:-1])
    return data if values and hashlib.sha256(data).hexdigest() == name else None
