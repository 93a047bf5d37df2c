"""Large values: values too large for one key (plans for a thousand workers) are stored in parts under the hash of their
content. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from culm.errors import UsageError

MAX_LARGE_VALUE_BYTES = 64 * 2**20
MAX_INLINE_BYTES = 2**19
"""Largest value stored under its own key: etcd accepts requests of 1.5 MiB, and a swap names two values."""
_PART_BYTES = 2**20
_POINTER_PREFIX = b"\0blob "


def pointer_or_value(value: bytes) -> bytes:
    """What to store under a key: the value itself or, if it is large, a pointer to its parts."""
    return _POINTER_PREFIX + content_hash(value).encode() if is_large(value) else value


def is_large(value: bytes) -> bool:
    """Whether a value is stored in parts. A value that looks like a pointer is, too."""
    return len(value) > MAX_INLINE_BYTES or value.startswith(_POINTER_PREFIX)


def pointer_target(stored: bytes) -> str | None:
    """The content hash that a stored pointer names; None: it is the value itself."""
    return stored.removeprefix(_POINTER_PREFIX).decode() if stored.startswith(_POINTER_PREFIX) else None


def content_hash(data: bytes) -> str:
    """The SHA-256 of the content. Raises UsageError for more than MAX_LARGE_VALUE_BYTES."""
    if len(data) > MAX_LARGE_VALUE_BYTES:
        raise UsageError(
            f"a value of {len(data):,} bytes is too large for the store: it takes {MAX_LARGE_VALUE_BYTES:,}"
        )
    return hashlib.sha256(data).hexdigest()


def key_prefix(home: str, name: str = "") -> bytes:
    """The prefix of the keys of a large value; without a name, of all large values."""
    return f"{home}blob/{name}{'/' if name else ''}".encode()


def part_count_key(home: str, name: str) -> bytes:
    """The key that is written last: once it exists, the value is complete."""
    return key_prefix(home, name) + b"~parts"


def split_into_parts(home: str, name: str, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the parts in the order of writing, which is also the order of their names."""
    starts = range(0, len(data), _PART_BYTES)
    for i, start in enumerate(starts):
        yield key_prefix(home, name) + f"{i:06}".encode(), data[start : start + _PART_BYTES]
    yield part_count_key(home, name), str(len(starts)).encode()


def join_parts(name: str, values: list[bytes]) -> bytes | None:
    """The content from the values of its keys, ordered by name; None if it is incomplete."""
    data = b"".join(values[:-1])
    return data if values and hashlib.sha256(data).hexdigest() == name else None
