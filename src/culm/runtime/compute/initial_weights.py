"""The tensors that Job.init names: safetensors files below a path or a URL, of which single tensors are read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from culm.checkpoint.safetensors_codec import DTYPE_OF_NAME
from culm.checkpoint.storage import Storage
from culm.errors import CheckpointError, JobError
from culm.initial_location import locate_initial

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _StoredTensor:
    """Where a tensor is."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


class InitialWeights:
    """Tensors by name, in one safetensors file or in those of a folder. Only headers are read at first."""

    def __init__(self, init: str) -> None:
        """Raises JobError if there is nothing, or if a file is none of safetensors."""
        self.init = init
        place = locate_initial(init)
        folder, _, name = place.rpartition("/")
        is_file = name.endswith(".safetensors") or Path(place).is_file()
        self._storage = Storage((folder or ".") if is_file else place)
        try:
            files = [name] if is_file else self._files_of_folder()
            self._tensors = {key: found for file in files for key, found in self._read_header(file).items()}
        except CheckpointError as error:
            raise JobError(f"Job.init is {init!r}: {error}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        return self._tensors[name].shape

    def read(self, names: Iterable[str], others: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
        """Tensors by name. `others`: further names of tied parameters. Raises JobError if one is missing."""
        return {name: self._read_tensor(stored) for name, stored in self.stored_names(names, others).items()}

    def stored_names(self, names: Iterable[str], others: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """The stored name of each tensor. A tied parameter may be stored under any of its names. Raises JobError if one
        is missing: a partly loaded model would train silently."""
        known = self._tensors.keys()
        stored_names = {
            name: next((n for n in (name, *others.get(name, ())) if n in known), None) for name in sorted(names)
        }
        missing = [name for name, stored in stored_names.items() if stored is None]
        if missing:
            raise JobError(
                f"Job.init {self.init!r} has no tensor {missing[0]!r} ({len(missing)} are missing): "
                f"{_describe_stored(missing[0], set(known))}"
            )
        return {name: stored for name, stored in stored_names.items() if stored is not None}

    def _files_of_folder(self) -> list[str]:
        """The safetensors files of a folder: those of its index or, without one, all."""
        found = self._storage.list("")
        if _INDEX in found:
            try:
                return sorted(set(json.loads(self._storage.read(_INDEX))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise JobError(f"Job.init is {self.init!r}: its {_INDEX} is not as other tools write it") from None
        files = [name for name in found if name.endswith(".safetensors")]
        if not files:
            held = f"it has {', '.join(found[:3])}" if found else "it is empty or not there"
            raise JobError(
                f"Job.init is {self.init!r}, which has no .safetensors file ({held}): name a file, a folder of "
                "save_pretrained, or write one with culm export RUN model.safetensors"
            )
        return files

    def _read_header(self, file: str) -> dict[str, _StoredTensor]:
        size = int.from_bytes(self._storage.read_range(file, 0, 8), "little")
        total = self._storage.size(file) or 0
        try:
            if not 2 <= size <= total - 8:
                raise ValueError("it has no header")
            header = json.loads(self._storage.read_range(file, 8, 8 + size))
            first = 8 + size
            tensors = {
                name: _StoredTensor(
                    file,
                    tuple(entry["shape"]),
                    DTYPE_OF_NAME[entry["dtype"]],
                    first + entry["data_offsets"][0],
                    first + entry["data_offsets"][1],
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
            if any(found.end > total for found in tensors.values()):
                raise ValueError("its end is missing")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobError(
                f"Job.init {self.init!r} cannot be read as safetensors: {file}: {type(error).__name__}: {error}"
            ) from None
        return tensors

    def _read_tensor(self, name: str) -> Tensor:
        found = self._tensors[name]
        try:
            data = bytearray(self._storage.read_range(found.file, found.begin, found.end))
        except CheckpointError as error:
            raise JobError(f"Job.init is {self.init!r}: {error}") from None
        if not data:
            return torch.empty(found.shape, dtype=found.dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(found.dtype).view(found.shape)


def _describe_stored(missing: str, known: set[str]) -> str:
    """What a file has instead of a tensor: similar names, or names of another scheme."""
    if not any(name.partition(".")[0].isdigit() for name in known):
        example = f", such as {min(known)!r}" if known else ""
        return (
            f"its names do not begin with the index of a layer{example}; rename them, or use culm.hf.parts for a model "
            "of transformers"
        )
    ending = missing.partition(".")[2]
    close = difflib.get_close_matches(missing, sorted(known), n=3, cutoff=0.5)
    close += [name for name in sorted(known) if ending and name.endswith(f".{ending}") and name not in close]
    return f"did you mean {', '.join(map(repr, close[:3]))}?" if close else "it is from another model"
