"""The manifest: what one checkpoint consists of. It is written last: a folder with a manifest is a checkpoint.

The file is JSON. Its last entry, "sha256", is the checksum of all bytes before the comma of that entry, so that a
flipped bit in a number is detected as reliably as one in a tensor.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from culm.checkpoint.safetensors_codec import sha256
from culm.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

Scalar: TypeAlias = int | float | bool | str | None

FORMAT = "culm-checkpoint"
VERSION = 1
_CHECKSUM_PREFIX = b',\n  "sha256": "'
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")


class FileEntry(msgspec.Struct, frozen=True):
    """Size and checksum of a file. They are compared before anything in it is used."""

    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint: the state after `step` completed steps."""

    format: Literal["culm-checkpoint"] = "culm-checkpoint"
    version: Literal[1] = 1
    step: int
    files: dict[str, FileEntry]
    """File name in the folder of the step -> its size and checksum."""
    weight_map: dict[str, str]
    """Tensor name -> file name, as in the index files of other tools."""
    scalars: dict[str, Scalar]
    """Optimizer values that are not tensors, by name."""
    nonfinite: dict[str, Literal["nan", "inf", "-inf"]] = {}
    """In the file only: the scalars that JSON cannot represent. In memory they are among the others."""
    evaluations: dict[int, dict[str, float | Literal["nan", "inf", "-inf"]]] = {}
    """The evaluations by step that Job.early_stop and Job.keep_best still depend on. Use `evaluation_values`."""
    verified: bool = False
    """Whether all holders of every layer had equal weights and optimizer state."""
    facts: dict[str, Any]
    """Facts about the job: seed, layers, tied, exact, fingerprint, ..."""
    culm: str
    torch: str
    created: float
    """Seconds since 1970, by the clock of the committing node."""

    def to_json(self) -> bytes:
        """The bytes of manifest.json."""
        odd = {name: value for name, value in self.scalars.items() if isinstance(value, float) and not isfinite(value)}
        wire = msgspec.structs.replace(
            self,
            scalars={name: value for name, value in self.scalars.items() if name not in odd},
            nonfinite={name: str(value) for name, value in odd.items()},
            evaluations={
                step: {name: value if isfinite(value) else str(value) for name, value in named.items()}
                for step, named in self.evaluation_values.items()
            },
        )
        body = msgspec.json.format(msgspec.json.encode(wire), indent=2).removesuffix(b"\n}")
        return body + _checksum_entry(body)

    @property
    def evaluation_values(self) -> dict[int, dict[str, float]]:
        """`evaluations` as numbers."""
        return {step: {name: float(value) for name, value in named.items()} for step, named in self.evaluations.items()}

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """The manifest in those bytes. Raises CheckpointError if any byte is not as it was written."""
        _check_header(data)
        body, _, _ = data.rpartition(_CHECKSUM_PREFIX)
        if data != body + _checksum_entry(body):
            raise CheckpointError("the manifest is damaged: its checksum does not match")
        try:
            wire = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"the manifest is not as culm writes it: {error}") from error
        _check_files(wire)
        odd = {name: float(text) for name, text in wire.nonfinite.items()}
        return msgspec.structs.replace(wire, scalars=wire.scalars | odd, nonfinite={})


def to_plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as a reader of the file gets them (tuples become lists). Raises CheckpointError for a value that JSON
    cannot hold."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(facts), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the facts of the checkpoint are not plain JSON ({error}): use numbers, strings, lists"
        ) from error
    return plain


def to_plain_scalars(scalars: Mapping[str, Any]) -> dict[str, Scalar]:
    """The scalars as a reader gets them (a numpy float becomes a float). Raises CheckpointError, which names the
    scalar, for other values."""
    return {name: _to_plain_scalar(name, value) for name, value in scalars.items()}


def _to_plain_scalar(name: str, value: Any) -> Scalar:
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(
        f"{name} is a {type(value).__name__}: use a number, bool, string or None, and put tensors into a shard"
    )


def _checksum_entry(body: bytes) -> bytes:
    return _CHECKSUM_PREFIX + sha256(body).encode() + b'"\n}\n'


class _ManifestHeader(msgspec.Struct):
    format: str
    version: int


def _check_header(data: bytes) -> None:
    """Check kind and version before the checksum: another version may compute the checksum in another way."""
    try:
        head = msgspec.json.decode(data, type=_ManifestHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the manifest cannot be read: {error}") from error
    if head.format != FORMAT:
        raise CheckpointError(f"the manifest has format {head.format!r}, not {FORMAT!r}: it was not written by culm")
    if head.version != VERSION:
        raise CheckpointError(
            f"the manifest has version {head.version}, this culm reads {VERSION}: use the culm that wrote it"
        )


def _check_files(manifest: Manifest) -> None:
    for name in manifest.files:
        # A name with a path in it would point outside the folder.
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"the manifest names a file {name!r}: expected NAME.safetensors in its own folder")
    for tensor, name in manifest.weight_map.items():
        if name not in manifest.files:
            raise CheckpointError(f"the manifest puts {tensor} into {name!r}, which is none of its files")
