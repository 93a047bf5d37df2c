"""Job.files in a checkpoint folder: what describes the model besides its weights, such as config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.checkpoint.storage import Storage

_FOLDER = "model_files"


def write_model_files(storage: Storage, files: Mapping[str, bytes]) -> None:
    """Write the files that are not there yet or differ in size."""
    for name, data in files.items():
        if storage.size(f"{_FOLDER}/{name}") != len(data):
            storage.write(f"{_FOLDER}/{name}", data)


def read_model_files(storage: Storage) -> dict[str, bytes]:
    """The files by name; empty if the job had none."""
    return {name: storage.read(f"{_FOLDER}/{name}") for name in storage.list(_FOLDER)}
