"""Read the tensors of one checkpoint on demand, file by file."""

from __future__ import annotations

import difflib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from culm.checkpoint import safetensors_codec
from culm.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from torch import Tensor

    from culm.checkpoint.manifest import Manifest, Scalar
    from culm.checkpoint.storage import Storage

V = TypeVar("V")
_MAX_PARALLEL_FILES = 8
"""Number of files read at the same time: remote storage has a latency per file."""


class CheckpointReader:
    """The tensors of one checkpoint by name. Only files that contain a requested tensor are opened, each once.

    A local file is mapped, and only the requested tensors are read from it. A remote file is read into memory once and
    kept until `close`. Returned tensors are on the CPU, in their own memory: they remain valid without the reader and
    the files. With `verify` the checksum of a local file is compared before its first use; that of a remote file always
    is.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, *, verify: bool) -> None:
        self.manifest = manifest
        self._storage = storage
        self._folder = folder
        self._verify = verify
        self._getters: dict[str, Callable[[str], Tensor]] = {}

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine, so that opening them again reads nothing."""
        return self._storage.local_path(self._folder) is not None

    def names(self) -> list[str]:
        """The names of all tensors of the checkpoint, sorted."""
        return sorted(self.manifest.weight_map)

    def tensor(self, name: str) -> Tensor:
        """One tensor. Raises CheckpointError for an unknown name, or for a file that is not as it was written."""
        file = self.manifest.weight_map.get(name)
        if file is None:
            raise CheckpointError(self._unknown_tensor_message(name))
        try:
            return self._open(file)(name)
        except (SafetensorError, KeyError, OSError) as error:
            raise CheckpointError(
                f"{name} cannot be read from {self._display_path(file)} ({error}): resume from an older checkpoint"
            ) from error

    def describe(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and type of a tensor. Of a local file only the header is read."""
        file = self.manifest.weight_map.get(name)
        path = None if file is None else self._storage.local_path(f"{self._folder}/{file}")
        if path is None:
            tensor = self.tensor(name)
            return tensor.shape, tensor.dtype
        with safe_open(str(path), framework="pt") as opened:
            stored = opened.get_slice(name)
            return torch.Size(stored.get_shape()), safetensors_codec.DTYPE_OF_NAME[stored.get_dtype()]

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Several tensors. Their files are opened, and remote ones read, in parallel."""
        wanted = list(names)
        files = {self.manifest.weight_map.get(name) for name in wanted} - {None, *self._getters}
        if len(files) > 1:
            with ThreadPoolExecutor(min(len(files), _MAX_PARALLEL_FILES), thread_name_prefix="checkpoint") as pool:
                list(pool.map(self._open_quietly, files))
        return {name: self.tensor(name) for name in wanted}

    def load(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names begin with whole parts: "1" selects "1.weight" and not "10.weight"; "" selects
        all."""
        return self.tensors(_names_below(prefix, self.names()))

    def scalars(self, prefix: str = "") -> dict[str, Scalar]:
        """The scalars whose names begin with whole parts."""
        return _select(prefix, self.manifest.scalars)

    def close(self) -> None:
        """Close the files. The reader may be used again, and then reopens them."""
        self._getters.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self, file: str) -> Callable[[str], Tensor]:
        if file not in self._getters:
            path = self._storage.local_path(f"{self._folder}/{file}")
            self._getters[file] = self._read_remote(file) if path is None else self._open_local(file, str(path))
        return self._getters[file]

    def _open_quietly(self, file: str) -> None:
        """Open a file in advance. An error is raised later, when a tensor of the file is requested."""
        with suppress(CheckpointError, SafetensorError, OSError):
            self._open(file)

    def _open_local(self, file: str, path: str) -> Callable[[str], Tensor]:
        if self._verify:
            self._check_checksum(file, self._storage.sha256(f"{self._folder}/{file}"))
        handle: Any = safe_open(path, framework="pt", device="cpu")
        return lambda name: handle.get_tensor(name).clone()

    def _read_remote(self, file: str) -> Callable[[str], Tensor]:
        data = self._storage.read(f"{self._folder}/{file}")
        self._check_checksum(file, safetensors_codec.sha256(data))
        tensors = safetensors_codec.decode(data)
        return lambda name: tensors[name].clone()

    def _check_checksum(self, file: str, found: str) -> None:
        if found != self.manifest.files[file].sha256:
            raise CheckpointError(damage_message(self._display_path(file)))

    def _display_path(self, file: str) -> str:
        return self._storage.display_path(f"{self._folder}/{file}")

    def _unknown_tensor_message(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.manifest.weight_map, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {len(self.manifest.weight_map)} others"
        return f"the checkpoint of step {self.manifest.step} has no tensor {name!r}: {hint}"


def damage_message(place: str) -> str:
    """The error message for a file whose bytes are not those that were written."""
    return f"{place} is damaged: its checksum does not match the manifest"


def _names_below(prefix: str, names: Iterable[str]) -> list[str]:
    whole = prefix.rstrip(".")
    return [name for name in names if not whole or name == whole or name.startswith(f"{whole}.")]


def _select(prefix: str, values: Mapping[str, V]) -> dict[str, V]:
    return {name: values[name] for name in _names_below(prefix, values)}
