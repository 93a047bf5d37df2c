"""Slow storage: the files of a local folder behind `slow://WRITE_S,READ_S/path`, where writing a shard of a checkpoint
takes WRITE_S seconds and reading one READ_S seconds.

Training continues while a shard is written and stops while one is read, as with real checkpoints.
"""

from __future__ import annotations

import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

_SHARD = ".safetensors"


class SlowFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Local files with delays."""

    protocol = "slow"

    def __init__(self, write_s: float = 0.0, read_s: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self._files = LocalFileSystem(auto_mkdir=True)
        self.write_s, self.read_s = write_s, read_s

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        rest = path.partition("://")[2]
        return f"/{rest.partition('/')[2]}" if rest else path

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, float]:
        write_s, read_s = path.partition("://")[2].partition("/")[0].split(",")
        return {"write_s": float(write_s), "read_s": float(read_s)}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if path.endswith(_SHARD):
            time.sleep(self.write_s)
        self._files.pipe_file(path, value, mode=mode, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if path.endswith(_SHARD):
            time.sleep(self.read_s)
        content: bytes = self._files.cat_file(path, start=start, end=end, **options)
        return content

    def _open(self, path: str, mode: str = "rb", *_: Any, **options: Any) -> Any:
        return self._files.open(path, mode, **options)

    def info(self, path: str, **options: Any) -> Any:
        return self._files.info(path, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._files.ls(path, detail=detail, **options)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._files.rm(path, recursive=recursive, maxdepth=maxdepth)


def slow_url(folder: str, *, write_s: float, read_s: float) -> str:
    """The URL of a local folder behind slow storage."""
    return f"slow://{write_s:g},{read_s:g}/{folder.lstrip('/')}"


def register_slow_storage() -> None:
    """Register `slow://` URLs in this process."""
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
