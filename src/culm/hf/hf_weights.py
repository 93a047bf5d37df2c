"""Where the weights of a Hugging Face model come from: memory, safetensors files, or the model's initialisation.

A source reads single tensors, by the names of the model. Files are opened where a layer is built, so that a node reads
its own layers only.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from culm.errors import JobError


class WeightSource(Protocol):
    """Tensors by the names of the model. `read` leaves out what the source does not have."""

    def has(self, name: str) -> bool: ...
    def read(self, names: Iterable[str]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class NoWeights:
    """The source of a model that is initialised at random."""

    def has(self, name: str) -> bool:  # noqa: ARG002 - the contract of a source
        return False

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:  # noqa: ARG002
        return {}


@dataclass(frozen=True)
class MemoryWeights:
    """The tensors of a model in this process. They are not copied; `culm.train` sends them to the nodes by value."""

    tensors: Mapping[str, Tensor]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.tensors[name] for name in names if name in self.tensors}


@dataclass(frozen=True)
class _StoredGroup:
    """Stored tensors that together give one or more tensors of the model."""

    keys: tuple[tuple[str, str], ...]
    """(stored name, pattern of the converter; or the stored name itself if it is only renamed)."""
    converter: Any
    """transformers' WeightConverter; None for a tensor that is only renamed."""


@dataclass(frozen=True)
class FileWeights:
    """Safetensors files of a folder, with the renaming and conversion that transformers applies for this model."""

    folder: str
    files: Mapping[str, str]
    """The file of each stored tensor."""
    groups: Mapping[str, _StoredGroup]
    """By the first name that the group gives."""
    group_of: Mapping[str, str]
    """By name of the model: the key in `groups`."""
    unused: tuple[str, ...] = ()
    """Stored tensors that the model does not have."""
    config: Any = field(default=None, compare=False)

    def has(self, name: str) -> bool:
        return name in self.group_of

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = [name for name in names if name in self.group_of]
        read: dict[str, Tensor] = {}
        for first in dict.fromkeys(self.group_of[name] for name in wanted):
            read |= self._read_group(first)
        return {name: read[name] for name in wanted}

    def _read_group(self, first: str) -> dict[str, Tensor]:
        group = self.groups[first]
        if group.converter is None:
            return {first: self._read_stored(group.keys[0][0])}
        converter = copy.deepcopy(group.converter)
        for stored, pattern in group.keys:
            converter.add_tensor(first, stored, pattern, self._read_stored(stored))
        converted = converter.convert(first, config=self.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def _read_stored(self, stored: str) -> Tensor:
        from safetensors import SafetensorError

        path = str(Path(self.folder) / self.files[stored])
        try:
            with _open_file(Path(path)) as file:
                tensor: Tensor = file.get_tensor(stored)
                return tensor
        except (SafetensorError, OSError) as error:
            raise JobError(f"the weights in {path!r} cannot be read: {error}") from None


def open_folder(folder: Path, model: Any) -> FileWeights:
    """The weights of a folder that `save_pretrained` wrote, for a model that may be on the meta device. Reads names,
    no tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    files = _stored_files(folder)
    shapes = _stored_shapes(folder, files)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known = model.state_dict()
    keys: dict[str, list[tuple[str, str]]] = {}
    converter_of: dict[str, Any] = {}
    unused = []
    for stored in sorted(files, key=_natural_order):
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, known)
        if name not in known and stored in known:
            name, pattern = stored, None
        if name not in known:
            unused.append(stored)
            continue
        keys.setdefault(name, []).append((stored, pattern or stored))
        converter_of[name] = by_pattern[pattern] if pattern is not None else None
    groups = {name: _StoredGroup(tuple(stored), converter_of[name]) for name, stored in keys.items()}
    for name, group in groups.items():
        if group.converter is None:
            check_shape(name, shapes[group.keys[0][0]], known[name].shape)
    group_of: dict[str, str] = {}
    for first, group in groups.items():
        targets: list[str] = group.converter.target_patterns if group.converter is not None else []
        group_of |= {first.replace(targets[0], target): first for target in targets}
        group_of[first] = first
    return FileWeights(str(folder), files, groups, group_of, tuple(unused), model.config)


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sorts expert 2 before expert 10: a conversion stacks tensors in this order."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _stored_files(folder: Path) -> dict[str, str]:
    """The file of each tensor in a folder: from the index of sharded weights, or of the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return found
    single = folder / "model.safetensors"
    if not single.is_file() and next(folder.glob("pytorch_model*.bin"), None) is not None:
        raise JobError(
            f"the weights in {str(folder)!r} are pytorch_model.bin, which cannot be read tensor by tensor: load the "
            "model with from_pretrained, and save it with save_pretrained"
        )
    if not single.is_file():
        raise JobError(
            f"{str(folder)!r} has no model.safetensors and no model.safetensors.index.json: save the model with "
            "save_pretrained(folder, safe_serialization=True)"
        )
    with _open_file(single) as file:
        return dict.fromkeys(file.keys(), single.name)


def _stored_shapes(folder: Path, files: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The shape of each stored tensor, from the headers of the files. Raises JobError for a file that is missing, or
    that lacks a tensor which the index assigns to it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(set(files.values())):
        if not (folder / name).is_file():
            raise JobError(
                f"{str(folder)!r} has no file {name!r}, which model.safetensors.index.json names: copy the whole folder"
            )
        with _open_file(folder / name) as file:
            held = set(file.keys())
            for stored in (stored for stored, where in files.items() if where == name):
                if stored not in held:
                    raise JobError(
                        f"{str(folder / name)!r} has no tensor {stored!r}, which model.safetensors.index.json names: "
                        "save the model again"
                    )
                shapes[stored] = tuple(file.get_slice(stored).get_shape())
    return shapes


def _open_file(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise JobError(f"the weights in {str(path)!r} cannot be read: {error}") from None


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises JobError for a tensor of another shape than the model's."""
    if tuple(found) != tuple(wanted):
        raise JobError(
            f"the tensor {name!r} has shape {tuple(found)} in the weights and {tuple(wanted)} in the model: the config "
            "does not belong to these weights"
        )
