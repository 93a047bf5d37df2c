"""The checkpoints of one run: write shards, commit, find the newest intact checkpoint, delete old ones.

    <root>/step-00000100/shard-00000100-3-1f0c9a52d6b3e874.safetensors     one per worker, in any order
    <root>/step-00000100/manifest.json                                     written last: this is the commit

The name of a shard ends with the beginning of its checksum, so a file is never replaced by one with other content. A
committed checkpoint stays intact even while other workers write the same step again with other layers.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch

import culm
from culm.checkpoint import safetensors_codec
from culm.checkpoint.checkpoint_reader import CheckpointReader, damage_message
from culm.checkpoint.manifest import FileEntry, Manifest, to_plain_facts, to_plain_scalars
from culm.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping, Sequence

    from torch import Tensor

    from culm.checkpoint.storage import Storage

VerifyLevel: TypeAlias = Literal["full", "sizes"]
"""full: read every byte of every file and compare its checksum. sizes: check that all files exist with their full
length."""

MANIFEST = "manifest.json"
BEST = "best.json"
"""Beside the folders of the checkpoints: the step of the best one, and the value it was chosen by."""
_FOLDER = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"shard-[A-Za-z0-9._-]+\.safetensors")


class ShardReceipt(msgspec.Struct, frozen=True):
    """Proof that a shard is on storage. A worker sends it to the leader, which commits."""

    name: str
    sha256: str
    bytes: int
    tensors: tuple[str, ...]


class NewestCheckpoint(NamedTuple):
    """The newest intact checkpoint, and the newer ones that were skipped, each with the reason."""

    manifest: Manifest
    rejected: tuple[tuple[int, str], ...]


class CheckpointCatalog:
    """The checkpoints below one root. It keeps no state: any process may read, but only one at a time should commit and
    prune."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def shard_name(self, step: int, worker: int | str) -> str:
        """The file name of a worker's shard, without the checksum. It contains the step, so that a file outside its
        folder can be identified."""
        name = f"shard-{step:08d}-{worker}.safetensors"
        if not _SHARD.fullmatch(name):
            raise CheckpointError(f"worker {worker!r} cannot name a file: use letters, digits, '.', '_' and '-'")
        return name

    def write_shard(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> ShardReceipt:
        """Write the tensors to storage. The receipt has the name of the file, which includes the checksum.

        The tensors must not change until this returns: pass a snapshot. On failure no file is left behind.
        """
        assert _SHARD.fullmatch(name), name
        data = safetensors_codec.encode(tensors)
        digest = safetensors_codec.sha256(data)
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
        *,
        verified: bool = False,
        evaluations: Mapping[int, Mapping[str, float]] | None = None,
    ) -> Manifest:
        """Make the shards a checkpoint, in one atomic write. Until then, and if this fails, they are not a checkpoint.

        Raises CheckpointError if a tensor is in two shards or also among the scalars, if a shard is not on storage, or
        if there is no shard. Shards that an earlier attempt at this step left behind are removed.
        """
        manifest = Manifest(
            step=step,
            files={receipt.name: FileEntry(sha256=receipt.sha256, bytes=receipt.bytes) for receipt in receipts},
            weight_map=_weight_map(step, receipts),
            scalars=to_plain_scalars(scalars),
            facts=to_plain_facts(facts),
            culm=culm.__version__,
            torch=str(torch.__version__),
            created=created,
            verified=verified,
            evaluations={step: dict(named) for step, named in (evaluations or {}).items()},
        )
        _check_scalars(manifest)
        self._check_sizes(manifest)
        self._delete_unlisted(step, keep={*manifest.files, *self._committed_files(step)})
        self.storage.write(_manifest_name(step), manifest.to_json())
        return manifest

    def steps(self) -> list[int]:
        """The committed steps, oldest first. They may be damaged: see `check`."""
        return [step for step in self._folder_steps() if self.storage.exists(_manifest_name(step))]

    def check(self, step: int, *, verify: VerifyLevel = "full") -> Manifest:
        """The manifest of a committed step whose files are all as written. Otherwise raises CheckpointError, which
        names the damaged file."""
        manifest = self._manifest(step)
        if manifest.step != step:
            raise CheckpointError(
                f"{self.storage.display_path(_folder(step))} holds the manifest of step {manifest.step}: move it back"
            )
        self._check_sizes(manifest)
        if verify == "full":
            self._check_checksums(manifest)
        return manifest

    def newest(
        self, *, before: int | None = None, verify: VerifyLevel = "full", only_verified: bool = False
    ) -> NewestCheckpoint:
        """The newest intact checkpoint (of a step below `before`), and the reasons why newer ones are not.

        `only_verified`: pass over checkpoints whose layers were not compared between their holders.

        After `verify="sizes"` open it with `verify=True`: each file is then verified when it is used. Raises
        CheckpointError if no checkpoint is intact, with the problem of each.
        """
        rejected: list[tuple[int, str]] = []
        for step in reversed(self.steps()):
            if before is not None and step >= before:
                continue
            try:
                if only_verified and not self._manifest(step).verified:
                    rejected.append((step, "its layers were not compared between their holders"))
                    continue
                return NewestCheckpoint(self.check(step, verify=verify), tuple(rejected))
            except CheckpointError as error:
                rejected.append((step, str(error)))
        raise CheckpointError(self._none_found_message(before, rejected))

    def open(self, manifest: Manifest, *, verify: bool = False) -> CheckpointReader:
        """Open a checkpoint for reading. `verify`: compare the checksum of a file before the first tensor is read from
        it."""
        return CheckpointReader(self.storage, _folder(manifest.step), manifest, verify=verify)

    def delete_after(self, step: int) -> None:
        """Delete all checkpoints of later steps: they may contain the effect of a faulty machine."""
        for later in [number for number in self._folder_steps() if number > step]:
            self._delete(later)

    def delete_uncommitted(self, last_step: int) -> None:
        """Delete the folders of steps up to `last_step` that were never committed."""
        committed = self.steps()
        for step in [number for number in self._folder_steps() if number <= last_step and number not in committed]:
            self._delete(step)

    def folder_of(self, step: int) -> str:
        """The path or URL of the folder of a checkpoint."""
        return self.storage.display_path(_folder(step))

    def write_best(self, step: int, name: str, value: float) -> None:
        """Record which checkpoint is the best one by a value of the evaluations."""
        text = {"step": step, "metric": name, "value": value if isfinite(value) else str(value)}
        self.storage.write(BEST, json.dumps(text).encode())

    def best(self) -> int:
        """The step of the best checkpoint. Raises CheckpointError if none is recorded."""
        if not self.storage.exists(BEST):
            raise CheckpointError(
                f"{self.storage.root} records no best checkpoint: set Job.keep_best, or name a step with --step"
            )
        try:
            return int(json.loads(self.storage.read(BEST))["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.storage.display_path(BEST)} is not as culm writes it: {error}") from error

    def prune(
        self,
        keep_last: int,
        *,
        verify: VerifyLevel = "full",
        keep: Container[int] = (),
        damaged: Collection[int] = (),
    ) -> tuple[int, ...]:
        """Delete all but the last `keep_last` committed checkpoints and those in `keep`. Returns the steps whose
        folders were deleted.

        Abandoned folders (older than the newest commit, never committed) and files that no manifest names are deleted,
        too. A damaged checkpoint takes no other's place: the last `keep_last` that are intact by `verify` and not
        among the `damaged` ones are kept. If none is intact, no folder is deleted.
        """
        if keep_last < 1:
            raise UsageError(f"keep_last is {keep_last}: keep at least 1 checkpoint")
        committed = [step for step in self.steps() if step not in damaged]
        kept = committed[-keep_last:]
        doomed = [
            step for step in self._folder_steps() if kept and step < kept[-1] and step not in kept and step not in keep
        ]
        if doomed:  # otherwise nothing is read
            intact = self._last_intact(committed, keep_last, verify)
            doomed = [step for step in doomed if intact and step not in intact]
        for step in doomed:
            self._delete(step)
        for step in kept:
            self._delete_unlisted_committed(step)
        return tuple(doomed)

    def _last_intact(self, committed: Sequence[int], count: int, verify: VerifyLevel) -> list[int]:
        """The last `count` checkpoints that are intact, the newest first."""
        intact: list[int] = []
        for step in reversed(committed):
            with suppress(CheckpointError):
                intact.append(self.check(step, verify=verify).step)
            if len(intact) == count:
                break
        return intact

    def _delete(self, step: int) -> None:
        # The manifest first: an interrupted deletion leaves an abandoned folder, not a broken checkpoint.
        self.storage.delete(_manifest_name(step))
        self.storage.delete(_folder(step))

    def _delete_unlisted(self, step: int, keep: set[str]) -> None:
        """Delete all shards and temporary files in the folder except `keep`."""
        for name in self.storage.list(_folder(step)):
            if name not in keep and name != MANIFEST:
                self.storage.delete(f"{_folder(step)}/{name}")

    def _delete_unlisted_committed(self, step: int) -> None:
        with suppress(_UnreadableManifest):
            self._delete_unlisted(step, keep=set(self._manifest(step).files))

    def _committed_files(self, step: int) -> set[str]:
        """The files of an earlier commit of this step, which is valid until the next commit replaces it."""
        if not self.storage.exists(_manifest_name(step)):
            return set()
        try:
            return set(self._manifest(step).files)
        except _UnreadableManifest:
            return set()

    def _manifest(self, step: int) -> Manifest:
        name = _manifest_name(step)
        data = self.storage.read(name)
        try:
            return Manifest.from_json(data)
        except CheckpointError as error:
            raise _UnreadableManifest(f"{self.storage.display_path(name)}: {error}") from error

    def _folder_steps(self) -> list[int]:
        """Steps with a folder, committed or not, oldest first."""
        matches = (_FOLDER.fullmatch(name) for name in self.storage.list())
        return sorted(int(match[1]) for match in matches if match)

    def _check_sizes(self, manifest: Manifest) -> None:
        for name, entry in manifest.files.items():
            file = f"{_folder(manifest.step)}/{name}"
            size = self.storage.size(file)
            if size is None:
                raise CheckpointError(f"{self.storage.display_path(file)} is missing")
            if size != entry.bytes:
                raise CheckpointError(
                    f"{self.storage.display_path(file)} has {size} bytes, not the {entry.bytes} that were written"
                )

    def _check_checksums(self, manifest: Manifest) -> None:
        for name, entry in manifest.files.items():
            file = f"{_folder(manifest.step)}/{name}"
            if self.storage.sha256(file) != entry.sha256:
                raise CheckpointError(damage_message(self.storage.display_path(file)))

    def _none_found_message(self, before: int | None, rejected: Sequence[tuple[int, str]]) -> str:
        place = self.storage.root if before is None else f"{self.storage.root} before step {before}"
        if not rejected:
            return f"there is no committed checkpoint in {place}: start without resuming, or name another folder"
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in rejected)
        return f"no checkpoint in {place} is whole ({reasons}): restore one of them, or start without resuming"


class _UnreadableManifest(CheckpointError):
    """The storage answered, but the file is not a valid manifest."""


def _folder(step: int) -> str:
    assert step >= 0, step
    return f"step-{step:08d}"


def _manifest_name(step: int) -> str:
    return f"{_folder(step)}/{MANIFEST}"


def _weight_map(step: int, receipts: Sequence[ShardReceipt]) -> dict[str, str]:
    if not receipts:
        raise CheckpointError(f"step {step} cannot be committed without a shard: write one first")
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
