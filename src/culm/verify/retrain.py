"""Retrain the steps of a run in one process, and compare weights, buffers and optimizer state at every checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from culm.checkpoint import CheckpointCatalog, Manifest, Storage
from culm.checkpoint.export import OPTIMIZER_PREFIX
from culm.cluster.prepare_run import inspect_layers, job_facts
from culm.errors import CheckpointError, UsageError
from culm.runtime.checkpoint_io import load_checkpoint
from culm.runtime.compute.deterministic import exact_algorithms
from culm.runtime.compute.device import select_device
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.snapshot import Snapshot, total_digest
from culm.testing.reference_loop import train_step

if TYPE_CHECKING:
    from culm.checkpoint import CheckpointReader
    from culm.job import Job
    from culm.verify.recorded_run import CheckpointRange, RecordedRun

ProgressCallback: TypeAlias = Callable[[str, int, int], None]
"""Called with a text, the steps done and all steps."""


@dataclass(frozen=True)
class Difference:
    """The first difference between the run and its retraining."""

    step: int
    """Completed steps of the checkpoint that differs: the cause is in the steps since `after`."""
    layer: int | None
    """None: the checkpoint is equal, but the digest in summary.json is not."""
    what: str
    """weights, buffers, optimizer, the key of summary.json, or file: a file is damaged, and its tensors cannot be
    read."""
    tensor: str | None
    """The first tensor of the layer that differs."""
    after: int
    """Completed steps of the last state that was equal, or of the start."""
    loss_step: int | None
    """The first step since the start whose loss differs from steps.jsonl; None: all losses are equal."""


@dataclass(frozen=True)
class Verification:
    """The result of `verify_steps`."""

    steps: CheckpointRange
    layers: int
    checkpoints: tuple[int, ...]
    """The checkpoints that were compared and are equal."""
    difference: Difference | None
    damage: str | None = None
    """If the checkpoint that differs does not have the bytes that were written: which of its files, as a sentence."""

    @property
    def proven_steps(self) -> int:
        """Steps that were retrained to the same bits."""
        return (self.checkpoints[-1] if self.checkpoints else self.steps.first) - self.steps.first

    def to_fields(self) -> dict[str, Any]:
        """The JSON of `culm verify --json`."""
        return {
            "equal": self.difference is None,
            "steps": self.proven_steps,
            "first_difference": None if self.difference is None else asdict(self.difference),
            "range": list(self.steps),
            "checkpoints": list(self.checkpoints),
            "damage": self.damage,
        }


def verify_steps(
    run: RecordedRun, job: Job, steps: CheckpointRange, progress: ProgressCallback = lambda *_: None
) -> Verification:
    """Retrain the steps in this process, from the initial weights or a checkpoint, and compare at every checkpoint.

    Stops at the first checkpoint that differs; one that is damaged differs. Changes nothing in the folder. Raises
    UsageError if the job is not the one that the checkpoints were made with, or if this machine is of another kind;
    CheckpointError if the checkpoint of the first step is damaged; and what a run would raise.
    """
    catalog = CheckpointCatalog(Storage(run.checkpoint_root))
    points = [p for p in run.checkpoints if steps.first < p <= steps.last or p == steps.first == 0]
    facts = job_facts(job, inspect_layers(job))
    for point in sorted({steps.first, *points} & {*run.checkpoints}):
        with suppress(CheckpointError):  # it is compared later
            _check_facts(catalog.check(point, verify="sizes"), facts)
    device = select_device(job)
    with _threads(job.threads), exact_algorithms(job, device):
        state = ModelState(job, range(len(job.layers)), device)
        if steps.first:
            _check_names(catalog.check(steps.first, verify="sizes"), state)
            load_checkpoint(state, run.checkpoint_root, steps.first)
        return _Retraining(run, job, steps, state, catalog, progress).compare_at(points)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_facts(manifest: Manifest, facts: dict[str, Any]) -> None:
    """Raise UsageError if the job or the machine is not that of the checkpoint."""
    for name, value in facts.items():
        if (made := manifest.facts.get(name, value)) == value:
            continue
        if name == "fingerprint":
            raise UsageError(f"the run was trained on {made}, this machine is {value}: verify it on the same kind")
        raise UsageError(
            f"the checkpoint of step {manifest.step} was made with {name}={made!r}, the job has {value!r}: name the "
            "job of the run with --job FILE[:function]"
        )


def _check_names(manifest: Manifest, state: ModelState) -> None:
    saved = {name for name in manifest.weight_map if not name.startswith(OPTIMIZER_PREFIX)}
    for name in sorted(saved ^ state.saved_names()):
        which = (
            "the checkpoint has, and the job has not" if name in saved else "the job has, and the checkpoint has not"
        )
        raise UsageError(
            f"{which}, the tensor {name!r} (step {manifest.step}): name the job of the run with --job FILE[:function]"
        )


class _Retraining:
    """A state that is trained from the first step on, and compared on the way."""

    def __init__(
        self,
        run: RecordedRun,
        job: Job,
        steps: CheckpointRange,
        state: ModelState,
        catalog: CheckpointCatalog,
        progress: ProgressCallback,
    ) -> None:
        self._run, self._job, self._steps, self._state = run, job, steps, state
        self._catalog, self._progress = catalog, progress
        self._next_step = steps.first
        self._equal_points: list[int] = []
        self._loss_step: int | None = None
        self._damage: str | None = None

    def compare_at(self, points: list[int]) -> Verification:
        """Train to each checkpoint and compare with it, then with summary.json if the last one is the run's end."""
        difference = None
        for point in points:
            self._train_to(point)
            difference = self._compare_checkpoint(point)
            if difference is not None:
                break
            self._equal_points.append(point)
        difference = difference or self._compare_summary()
        return Verification(self._steps, len(self._state.layers), tuple(self._equal_points), difference, self._damage)

    def _train_to(self, point: int) -> None:
        text, total = f"retraining steps {self._steps}", self._steps.last - self._steps.first
        self._progress(text, self._next_step - self._steps.first, total)
        while self._next_step < point:
            self._compare_loss(train_step(self._job, self._state, self._next_step))
            self._next_step += 1
            self._progress(text, self._next_step - self._steps.first, total)

    def _compare_loss(self, loss: float) -> None:
        recorded = self._run.losses.get(self._next_step)
        unknown = recorded is None or not math.isfinite(recorded)
        if self._loss_step is None and not unknown and recorded != loss:
            self._loss_step = self._next_step

    def _compare_checkpoint(self, point: int) -> Difference | None:
        try:
            return self._compare_layers(point, verify=True)
        except CheckpointError as error:
            self._damage = str(error)
        with suppress(CheckpointError):  # the tensor that differs says more than the file
            found = self._compare_layers(point, verify=False)
            if found is not None:
                return found
        return self._difference(point, None, "file", None)

    def _compare_layers(self, point: int, *, verify: bool) -> Difference | None:
        """Raises CheckpointError if the checkpoint cannot be read or, with `verify`, if a file is damaged."""
        manifest = self._catalog.check(point, verify="sizes")
        with self._catalog.open(manifest, verify=verify) as reader:
            for layer in self._state.layers:
                retrained = self._state.saved_snapshot([layer])
                saved = _saved_layer(reader, layer, retrained)
                if retrained.digest() != saved.digest():
                    return self._difference(point, layer, *_first_tensor(retrained, saved))
        return None

    def _compare_summary(self) -> Difference | None:
        summary = self._run.summary
        if summary is None or summary.get("steps") != self._next_step:
            return None
        digests = list(self._state.digests(self._state.layers).values())
        for key, part in (("weights_sha256", 0), ("state_sha256", 1)):
            if summary.get(key) not in (None, total_digest(digest[part] for digest in digests)):
                return self._difference(self._next_step, None, key, None)
        return None

    def _difference(self, step: int, layer: int | None, what: str, tensor: str | None) -> Difference:
        after = self._equal_points[-1] if self._equal_points else self._steps.first
        return Difference(step, layer, what, tensor, after, self._loss_step)


def _saved_layer(reader: CheckpointReader, layer: int, like: Snapshot) -> Snapshot:
    """The state of a layer in a checkpoint, sorted into parameters, buffers and optimizer state."""
    optimizer = f"{OPTIMIZER_PREFIX}{layer}"
    held = reader.load(str(layer))
    return Snapshot(
        parameters={name: value for name, value in held.items() if name in like.parameters},
        buffers={name: value for name, value in held.items() if name not in like.parameters},
        moments=reader.load(optimizer),
        scalars=reader.scalars(optimizer),
    )


def _first_tensor(retrained: Snapshot, saved: Snapshot) -> tuple[str, str | None]:
    """(weights, buffers or optimizer, name of the tensor) of the first difference; the digests differ."""
    parts = {"weights": "parameters", "buffers": "buffers", "optimizer": "moments"}
    for what, part in parts.items():
        ours, theirs = getattr(retrained, part), getattr(saved, part)
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs or not _same_bytes(ours[name], theirs[name]):
                return what, name
    names = sorted({*retrained.scalars, *saved.scalars})
    return "optimizer", next((n for n in names if retrained.scalars.get(n) != saved.scalars.get(n)), None)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return Snapshot({"": one}).digest() == Snapshot({"": other}).digest()
