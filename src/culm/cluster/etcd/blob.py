"""Blobs: what is too large for one value, in parts, under the hash of its content. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from culm.errors import UsageError

MAX_BLOB = 64 * 2**20
_PART = 2**20


def name(data: bytes) -> str:
    """The SHA-256 of the content; refuses what is larger than a plan could ever be."""
    if len(data) > MAX_BLOB:
        raise UsageError(f"a blob has {len(data):,} bytes and the store takes {MAX_BLOB:,}: put it on storage instead")
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
