"""Digests of items of a data set: equal for equal content, whichever process read it."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import xxhash


def digest_items(items: Iterable[Any]) -> str:
    """A digest of the content of items. Objects of unknown classes count by their class alone."""
    found = xxhash.xxh3_128()
    for item in items:
        _add(found, item)
    return found.hexdigest()


def _add(found: xxhash.xxh3_128, value: Any) -> None:
    found.update(type(value).__name__.encode())
    if isinstance(value, dict):
        for name, entry in value.items():
            _add(found, name)
            _add(found, entry)
    elif isinstance(value, list | tuple):
        found.update(struct.pack("<q", len(value)))
        for entry in value:
            _add(found, entry)
    elif isinstance(value, str):
        found.update(value.encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        found.update(value)
    elif isinstance(value, bool | int | float | complex) or value is None:
        found.update(repr(value).encode())
    elif hasattr(value, "tobytes"):  # of numpy, or an image of Pillow
        if str(getattr(value, "dtype", "")) != "object":
            found.update(f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}".encode())
            found.update(value.tobytes())
    elif hasattr(value, "untyped_storage"):
        _add_tensor(found, value)


def _add_tensor(found: xxhash.xxh3_128, value: Any) -> None:
    import torch

    found.update(f"{value.dtype} {tuple(value.shape)}".encode())
    plain = value.detach().cpu().contiguous()
    found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
