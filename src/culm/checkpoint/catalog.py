"""The checkpoints of one run: writing shards, committing, finding the newest good one, throwing old ones away.

    <root>/step-00000100/shard-00000100-3-1f0c9a52d6b3e874.safetensors     one per worker, in any order
    <root>/step-00000100/manifest.json                                     written last: this is the commit

The name of a shard ends with the beginning of its checksum, so a file is never replaced by one with other content: a
committed checkpoint stays whole even while the same step is written again by other workers with other layers.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch

import culm
from culm.checkpoint import shard
from culm.checkpoint.manifest import FileEntry, Manifest, plain_facts, plain_scalars
from culm.checkpoint.reader import Reader, damaged
from culm.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from culm.checkpoint.storage import Storage

Verify: TypeAlias = Literal["full", "sizes"]
"""full: every byte of every file is read and its checksum compared; sizes: all files are there in their full length."""

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"shard-[A-Za-z0-9._-]+\.safetensors")


class ShardReceipt(msgspec.Struct, frozen=True):
    """Proof that a shard is on storage: a worker sends it to whoever commits."""

    name: str
    sha256: str
    bytes: int
    tensors: tuple[str, ...]


class Found(NamedTuple):
    """The newest good checkpoint, and the newer ones that were passed over, each with the reason."""

    manifest: Manifest
    rejected: tuple[tuple[int, str], ...]


class Catalog:
    """The checkpoints below one root. It keeps no state: any process may ask, one at a time should commit and prune."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def shard_name(self, step: int, worker: int | str) -> str:
        """What a worker calls its shard. The step is in it, so that a file says what it is outside its folder too."""
        name = f"shard-{step:08d}-{worker}.safetensors"
        if not _SHARD.fullmatch(name):
            raise CheckpointError(f"worker {worker!r} can not name a file: use letters, digits, '.', '_' and '-'")
        return name

    def write_shard(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> ShardReceipt:
        """Put the tensors on storage. The name in the receipt is the file's, with the checksum in it.

        The tensors must not change until this returns: hand over a snapshot. On failure nothing is left behind.
        """
        assert _SHARD.fullmatch(name), name
        data = shard.encode(tensors)
        digest = shard.sha256(data)
        file = f"{name.removesuffix('.safetensors')}-{digest[:16]}.safetensors"
        self.storage.write(f"{_folder(step)}/{file}", data)
        return ShardReceipt(name=file, sha256=digest, bytes=len(data), tensors=tuple(sorted(tensors)))

    def commit(
        self,
        step: int,
        receipts: Sequence[ShardReceipt],
        scalars: Mapping[str, Any],
        facts: Mapping[str, Any],
        created: float,
    ) -> Manifest:
        """Make the shards a checkpoint, in one atomic write. Until then, and if this fails, they are none.

        Refused are: a tensor in two shards, or among the scalars too; a shard that is not on storage; no shard at all.
        Shards that an earlier attempt at this step left behind are removed.
        """
        manifest = Manifest(
            step=step,
            files={receipt.name: FileEntry(sha256=receipt.sha256, bytes=receipt.bytes) for receipt in receipts},
            weight_map=_weight_map(step, receipts),
            scalars=plain_scalars(scalars),
            facts=plain_facts(facts),
            culm=culm.__version__,
            torch=str(torch.__version__),
            created=created,
        )
        _check_scalars(manifest)
        self._check_sizes(manifest)
        self._sweep(step, keep={*manifest.files, *self._committed_files(step)})
        self.storage.write(_manifest_name(step), manifest.to_json())
        return manifest

    def steps(self) -> list[int]:
        """The steps that are committed, oldest first. Whether they are whole is for `check` to say."""
        return [step for step in self._folders() if self.storage.exists(_manifest_name(step))]

    def check(self, step: int, *, verify: Verify = "full") -> Manifest:
        """The manifest of a committed step whose files are all as written; else a CheckpointError says which is not."""
        manifest = self._manifest(step)
        if manifest.step != step:
            raise CheckpointError(
                f"{self.storage.shown(_folder(step))} holds the manifest of step {manifest.step}: move it back"
            )
        self._check_sizes(manifest)
        if verify == "full":
            self._check_sums(manifest)
        return manifest

    def newest(self, *, before: int | None = None, verify: Verify = "full") -> Found:
        """The newest checkpoint that is whole (of a step below `before`), and why newer ones are not.

        After `verify="sizes"` open it with `verify=True`: each file is then checked where it is used, not here.
        If none is whole the CheckpointError lists what is wrong with each.
        """
        rejected: list[tuple[int, str]] = []
        for step in reversed(self.steps()):
            if before is not None and step >= before:
                continue
            try:
                return Found(self.check(step, verify=verify), tuple(rejected))
            except CheckpointError as error:
                rejected.append((step, str(error)))
        raise CheckpointError(self._none(before, rejected))

    def open(self, manifest: Manifest, *, verify: bool = False) -> Reader:
        """Read tensors of a checkpoint; `verify` compares the checksum of a file before the first tensor out of it."""
        return Reader(self.storage, _folder(manifest.step), manifest, verify=verify)

    def prune(self, keep_last: int, *, verify: Verify = "full") -> tuple[int, ...]:
        """Delete all but the last `keep_last` committed checkpoints; returns the steps whose folders went.

        Abandoned folders (older than the newest commit, never committed) and files that no manifest names go too. The
        newest checkpoint that is whole, by `verify`, stays whatever its age; if none is, no folder is deleted.
        """
        if keep_last < 1:
            raise UsageError(f"keep_last is {keep_last}: keep at least 1 checkpoint")
        committed = self.steps()
        kept = committed[-keep_last:]
        doomed = self._sparing(
            [step for step in self._folders() if kept and step < kept[-1] and step not in kept], verify
        )
        for step in doomed:
            self._delete(step)
        for step in kept:
            self._sweep_committed(step)
        return tuple(doomed)

    def _sparing(self, doomed: list[int], verify: Verify) -> list[int]:
        """Those of the doomed that may go. Nothing is read when nothing is doomed."""
        if not doomed:
            return []
        try:
            good = self.newest(verify=verify).manifest.step
        except CheckpointError:
            return []
        return [step for step in doomed if step != good]

    def _delete(self, step: int) -> None:
        # The manifest first: a deletion that is interrupted leaves an abandoned folder, not a broken checkpoint.
        self.storage.delete(_manifest_name(step))
        self.storage.delete(_folder(step))

    def _sweep(self, step: int, keep: set[str]) -> None:
        """Delete all shards and temporary files in the folder but those."""
        for name in self.storage.list(_folder(step)):
            if name not in keep and name != MANIFEST:
                self.storage.delete(f"{_folder(step)}/{name}")

    def _sweep_committed(self, step: int) -> None:
        with suppress(_Unreadable):
            self._sweep(step, keep=set(self._manifest(step).files))

    def _committed_files(self, step: int) -> set[str]:
        """The files of an earlier commit of this step, which is good until the next one has replaced it."""
        if not self.storage.exists(_manifest_name(step)):
            return set()
        try:
            return set(self._manifest(step).files)
        except _Unreadable:
            return set()

    def _manifest(self, step: int) -> Manifest:
        name = _manifest_name(step)
        data = self.storage.read(name)
        try:
            return Manifest.from_json(data)
        except CheckpointError as error:
            raise _Unreadable(f"{self.storage.shown(name)}: {error}") from error

    def _folders(self) -> list[int]:
        """Steps with a folder, committed or not, oldest first."""
        matches = (_FOLDER.fullmatch(name) for name in self.storage.list())
        return sorted(int(match[1]) for match in matches if match)

    def _check_sizes(self, manifest: Manifest) -> None:
        for name, entry in manifest.files.items():
            file = f"{_folder(manifest.step)}/{name}"
            size = self.storage.size(file)
            if size is None:
                raise CheckpointError(f"{self.storage.shown(file)} is missing")
            if size != entry.bytes:
                raise CheckpointError(
                    f"{self.storage.shown(file)} has {size} bytes, not the {entry.bytes} that were written"
                )

    def _check_sums(self, manifest: Manifest) -> None:
        for name, entry in manifest.files.items():
            file = f"{_folder(manifest.step)}/{name}"
            if self.storage.sha256(file) != entry.sha256:
                raise CheckpointError(damaged(self.storage.shown(file)))

    def _none(self, before: int | None, rejected: Sequence[tuple[int, str]]) -> str:
        place = self.storage.root if before is None else f"{self.storage.root} before step {before}"
        if not rejected:
            return f"there is no committed checkpoint in {place}: start without resuming, or name another folder"
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in rejected)
        return f"no checkpoint in {place} is whole ({reasons}): restore one of them, or start without resuming"


class _Unreadable(CheckpointError):
    """The storage answered, but what it holds is no manifest."""


def _folder(step: int) -> str:
    assert step >= 0, step
    return f"step-{step:08d}"


def _manifest_name(step: int) -> str:
    return f"{_folder(step)}/{MANIFEST}"


def _weight_map(step: int, receipts: Sequence[ShardReceipt]) -> dict[str, str]:
    if not receipts:
        raise CheckpointError(f"step {step} can not be committed without a shard: write one first")
    files: dict[str, str] = {}
    for receipt in receipts:
        for name in receipt.tensors:
            if name in files:
                raise CheckpointError(
                    f"{name} is in two shards of step {step}, {files[name]} and {receipt.name}: write it once"
                )
            files[name] = receipt.name
    return files


def _check_scalars(manifest: Manifest) -> None:
    for name in sorted(manifest.scalars.keys() & manifest.weight_map.keys()):
        raise CheckpointError(
            f"{name} is a scalar and also a tensor in {manifest.weight_map[name]}: keep one of the two"
        )
