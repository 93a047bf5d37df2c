"""Reading the tensors of one checkpoint, file by file, when they are asked for."""

from __future__ import annotations

import difflib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open

from culm.checkpoint import shard
from culm.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from torch import Tensor

    from culm.checkpoint.manifest import Manifest, Scalar
    from culm.checkpoint.storage import Storage

V = TypeVar("V")
_AT_ONCE = 8
"""Files that are read at the same time: storage far away makes one wait for each."""


class Reader:
    """The tensors of one checkpoint by name. Only files that hold something asked for are touched, each opened once.

    A local file is mapped, and only the tensors asked for are read from it; a remote file is read once into memory and
    kept until `close`. Tensors handed out are on the CPU and in memory of their own: they outlive reader and files.
    With `verify` a local file's checksum is compared before its first use; a remote file's always is.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, *, verify: bool) -> None:
        self.manifest = manifest
        self._storage = storage
        self._folder = folder
        self._verify = verify
        self._opened: dict[str, Callable[[str], Tensor]] = {}

    def names(self) -> list[str]:
        """All tensors of the checkpoint, sorted."""
        return sorted(self.manifest.weight_map)

    def tensor(self, name: str) -> Tensor:
        """One tensor. A name that is not there, or a file that is not as it was written, is a CheckpointError."""
        file = self.manifest.weight_map.get(name)
        if file is None:
            raise CheckpointError(self._unknown(name))
        try:
            return self._open(file)(name)
        except (SafetensorError, KeyError, OSError) as error:
            raise CheckpointError(
                f"{name} can not be read from {self._shown(file)} ({error}): resume from an older checkpoint"
            ) from error

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Several tensors. The files that they lie in are opened, and where they are far away read, side by side."""
        wanted = list(names)
        files = {self.manifest.weight_map.get(name) for name in wanted} - {None, *self._opened}
        if len(files) > 1:
            with ThreadPoolExecutor(min(len(files), _AT_ONCE), thread_name_prefix="checkpoint") as pool:
                list(pool.map(self._tried, files))
        return {name: self.tensor(name) for name in wanted}

    def load(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors below a prefix of whole parts: "1" gives "1.weight" and not "10.weight"; "" gives all."""
        return self.tensors(_below(prefix, self.names()))

    def scalars(self, prefix: str = "") -> dict[str, Scalar]:
        """The scalars below a prefix of whole parts."""
        return _select(prefix, self.manifest.scalars)

    def close(self) -> None:
        """Let go of the files. The reader may be used again, and then opens them anew."""
        self._opened.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self, file: str) -> Callable[[str], Tensor]:
        if file not in self._opened:
            path = self._storage.local_path(f"{self._folder}/{file}")
            self._opened[file] = self._fetch(file) if path is None else self._map(file, str(path))
        return self._opened[file]

    def _tried(self, file: str) -> None:
        """Open a file ahead. What is wrong with it is said when a tensor of it is asked for."""
        with suppress(CheckpointError, SafetensorError, OSError):
            self._open(file)

    def _map(self, file: str, path: str) -> Callable[[str], Tensor]:
        if self._verify:
            self._compare(file, self._storage.sha256(f"{self._folder}/{file}"))
        handle: Any = safe_open(path, framework="pt", device="cpu")
        return lambda name: handle.get_tensor(name).clone()

    def _fetch(self, file: str) -> Callable[[str], Tensor]:
        data = self._storage.read(f"{self._folder}/{file}")
        self._compare(file, shard.sha256(data))
        tensors = shard.decode(data)
        return lambda name: tensors[name].clone()

    def _compare(self, file: str, found: str) -> None:
        if found != self.manifest.files[file].sha256:
            raise CheckpointError(damaged(self._shown(file)))

    def _shown(self, file: str) -> str:
        return self._storage.shown(f"{self._folder}/{file}")

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.manifest.weight_map, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {len(self.manifest.weight_map)} others"
        return f"the checkpoint of step {self.manifest.step} has no tensor {name!r}: {hint}"


def damaged(place: str) -> str:
    """The sentence for a file whose bytes are not those that were written."""
    return f"{place} is damaged: its checksum does not match the manifest"


def _below(prefix: str, names: Iterable[str]) -> list[str]:
    whole = prefix.rstrip(".")
    return [name for name in names if not whole or name == whole or name.startswith(f"{whole}.")]


def _select(prefix: str, values: Mapping[str, V]) -> dict[str, V]:
    return {name: values[name] for name in _below(prefix, values)}
