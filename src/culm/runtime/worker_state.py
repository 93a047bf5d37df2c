"""What a worker holds, independent of the epoch: its stage replicas, and the work it has done in open steps.

Epochs change; the worker state stays. After a loss, survivors report it (`inventory`), and the next epoch continues
from it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.device.device_copies import DeviceCopies
from culm.device.streams import COMPLETE
from culm.plan.recover.lineage import WorkerInventory, WorkKey
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.segment import Segment
from culm.runtime.compute.snapshot import Snapshot
from culm.runtime.microbatch_stats import MicroBatchStats, SegmentTotals
from culm.schedule import Action, Kind

if TYPE_CHECKING:
    from culm.device.device_copies import HostCopy
    from culm.device.streams import DeviceEvent
    from culm.job import Job
    from culm.transport.interface import Tensors


@dataclass
class GradientSum:
    """The gradient sum of a segment: one flat tensor for each trained layer, and the metadata summed with it."""

    totals: list[Tensor]
    """They may be read once `event` is complete."""
    metadata: Tensor
    event: DeviceEvent = COMPLETE
    on_device: bool = False
    """Whether the totals are still on the device that made them, not in host memory."""

    @property
    def nbytes(self) -> int:
        return sum(total.nbytes for total in self.totals)


@dataclass(frozen=True)
class StepOutcome:
    """How a step ended."""

    norm: float | None
    skipped: bool


@dataclass
class OpenStep:
    """What this worker holds of a step until it is committed."""

    stats: dict[int, MicroBatchStats] = field(default_factory=dict)
    """By segment that is run here."""
    outputs: dict[str, Tensors] = field(default_factory=dict)
    """Outputs of actions by name ("2F0", "1I3"), from which a holder can continue the work of a lost worker."""
    slab_copies: dict[str, HostCopy] = field(default_factory=dict)
    """By name: the outputs among them whose memory is a slab."""
    reduced_gradients: dict[int, GradientSum] = field(default_factory=dict)
    """By segment: its complete sum, where outputs are kept until the commit."""
    handed_off_sums: dict[int, list[GradientSum]] = field(default_factory=dict)
    """By segment: sums of workers that left, to be added to this worker's own sum before the reduce."""
    segment_totals: dict[int, SegmentTotals] = field(default_factory=dict)
    grad_norms: dict[int, Tensor] = field(default_factory=dict)
    loss_totals: tuple[float, float] | None = None
    """(sum of the losses, divisor), once known here."""
    received_values: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Frames of other workers that more than one stage here may need."""
    loaded_segments: set[int] = field(default_factory=set)
    """Segments whose accumulators contain the complete sum, not divided yet."""
    outcome: StepOutcome | None = None
    """How the step ended, once the layers that are run here have stepped."""
    busy_s: float = 0.0
    """Seconds that this worker has computed for the step."""
    actions: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """The actions that it ran in this time, by segment and kind, as in 2F."""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for output in self.outputs.values() for t in output if t is not None)

    def record_work(self, name: str, seconds: float) -> None:
        """Record that an action of this segment and kind, as in 2F, took so long."""
        self.busy_s += seconds
        self.actions[name] += 1

    def set_loss_totals(self, loss_totals: tuple[float, float]) -> None:
        self.loss_totals = loss_totals

    def set_outcome(self, outcome: StepOutcome) -> None:
        """Record how the step ended, unless it is recorded already: each replica of this worker ends the step."""
        self.outcome = self.outcome or outcome


class StageReplica:
    """The layers of one stage, with their optimizer state. `version` is the step that the weights are for."""

    def __init__(
        self, job: Job, stage: int, layer_ranges: dict[int, range], device: torch.device, version: int
    ) -> None:
        self.job, self.stage, self.layer_ranges = job, stage, layer_ranges
        self.state = ModelState(job, [layer for span in layer_ranges.values() for layer in span], device)
        self.segments = {g: Segment(job, self.state, span) for g, span in layer_ranges.items()}
        self.version = self.first_version = version
        self._saved_weights: dict[int, dict[str, Tensor]] = {}
        """By step: the weights and moving buffers before it."""
        self._spare_buffers: dict[str, Tensor] = {}
        """Memory of saved weights that are no longer needed. Allocating it again costs as much as writing to it."""

    def save_weights(self) -> None:
        """Before a step: save the tensors that it changes. A recovery may have to repeat actions of the open step."""
        if self.version in self._saved_weights:
            return
        changing = {**self.state.parameters(), **self.state.moving_buffers()}
        saved = self._spare_buffers or {name: torch.empty_like(value) for name, value in changing.items()}
        self._spare_buffers = {}
        with torch.no_grad():
            for name, value in changing.items():
                saved[name].copy_(value)
        self._saved_weights[self.version] = saved

    def save_weights_early(self) -> None:
        """Save the weights while the worker waits for a frame: they do not change before the step ends. Does nothing
        while the weights of an earlier step are saved, so that it needs no additional memory."""
        if not self._saved_weights:
            self.save_weights()

    def drop_committed(self, committed: int) -> None:
        """Drop saved weights and tapes of all steps up to and including `committed`."""
        for step in [step for step in self._saved_weights if step <= committed]:
            self._spare_buffers = self._saved_weights.pop(step)
        for segment in self.segments.values():
            segment.drop_tapes(committed)

    def advance_version(self) -> None:
        """The weights are for the next step now. Tapes of this step are dropped: they no longer fit the weights."""
        for segment in self.segments.values():
            segment.drop_tapes(self.version)
        self.version += 1

    def replay_segments(self, step: int) -> dict[int, Segment]:
        """Segments with the weights of an open step, to run actions again for their outputs. Nothing in this replica
        changes. If the replica has not made the step, they use its weights and continue from its tapes."""
        state = self.state
        if self.version != step:
            state = ModelState(self.job, self.state.layers, self.state.device)
            saved = self._saved_weights[step]
            state.restore(Snapshot(parameters=saved, buffers={**self.state.snapshot_all().buffers, **saved}))
        return {
            g: Segment(self.job, state, span, tapes=self.segments[g].tapes_of(step))
            for g, span in self.layer_ranges.items()
        }


class WorkerState:
    """Everything that one worker holds."""

    def __init__(
        self, job: Job, device: torch.device, copies: DeviceCopies | None = None, *, rebuild_epoch: int = 1
    ) -> None:
        """`copies`: between the device and host memory; default: the device is the CPU. `rebuild_epoch`: see
        Epoch.rebuild_epoch."""
        self.job, self.device, self.copies = job, device, copies or DeviceCopies()
        self.replicas: dict[int, StageReplica] = {}
        """By stage."""
        self.open_steps: defaultdict[int, OpenStep] = defaultdict(OpenStep)
        """By number. A record is created when it is first looked up."""
        self.rebuild_epoch, self.shape_epoch = rebuild_epoch, 0
        """The epoch that introduced the shape of the replicas."""
        self.previous_replicas: list[StageReplica] = []
        """Replicas of an earlier shape, unchanged. They stay until a step of the new shape is committed: if the new
        shape fails before, training continues from them."""
        self.copying_step: int | None = None
        """The step that a copy on its way here is for."""
        self.peak_kept_bytes = 0
        self.spans: deque[tuple[int, str, float, float]] = deque(maxlen=4096)
        """(step, action, start, end) of the last actions, of any epoch."""
        self._kept_bytes = 0

    def keep_output(self, step: int, name: str, tensors: Tensors, copy: HostCopy | None = None) -> None:
        """Keep the output of an action until the step is committed. `copy`: the slab that contains it."""
        open_step = self.open_steps[step]
        open_step.outputs[name] = tensors
        if copy is not None:
            open_step.slab_copies[name] = copy
        self._kept_bytes += sum([t.nbytes for t in tensors if t is not None])
        self.peak_kept_bytes = max(self.peak_kept_bytes, self._kept_bytes)

    def evict_oldest(self, first_step: int) -> bool:
        """Drop something in slabs, of step `first_step` or a later one: the oldest tape of a shadow replica or, if
        there is none, the oldest kept output without readers. False: there is neither. A recovery then has to run its
        action again."""
        segments = [segment for replica in self.replicas.values() for segment in replica.segments.values()]
        return any(s.drop_oldest_on_host(first_step) for s in segments) or self._evict_oldest_output(first_step)

    def _evict_oldest_output(self, first_step: int) -> bool:
        for number in sorted(number for number in self.open_steps if number >= first_step):
            open_step = self.open_steps[number]
            name = next((name for name, copy in open_step.slab_copies.items() if not copy.has_readers), None)
            if name is not None:
                del open_step.slab_copies[name]
                self._kept_bytes -= sum(t.nbytes for t in open_step.outputs.pop(name, ()) if t is not None)
                return True
        return False

    def stats_for(self, step: int, g: int, segment: Segment) -> MicroBatchStats:
        """The statistics of a segment in a step, created if there are none."""
        stats = self.open_steps[step].stats
        if g not in stats:
            stats[g] = MicroBatchStats(segment, self.job.micro_batches, is_first=g == 0, step=step)
        return stats[g]

    def add_handed_off_sum(self, step: int, g: int, gradient_sum: GradientSum) -> None:
        """Store a sum that a leaving worker handed to this one."""
        self.open_steps[step].handed_off_sums.setdefault(g, []).append(gradient_sum)

    def take_handed_off_sums(self, step: int, g: int) -> Sequence[GradientSum]:
        """Remove and return the stored sums of a segment."""
        return self.open_steps[step].handed_off_sums.pop(g, ())

    def set_copying_step(self, step: int | None) -> None:
        """Keep the records of this and later steps beyond their commit, for a copy on its way here; None: no copy."""
        self.copying_step = step

    def drop_committed(self, step: int) -> None:
        """Drop what was kept for all steps up to and including `step`: every holder has their reduced gradients.

        The other records of a step stay while a copy on its way here has to make the step.
        """
        for old in [number for number in self.open_steps if number <= step]:
            self._kept_bytes -= self.open_steps[old].nbytes
            self.open_steps[old].outputs.clear()
            self.open_steps[old].slab_copies.clear()
            if self.copying_step is None or old < self.copying_step:
                del self.open_steps[old]
        for replica in self.replicas.values():
            replica.drop_committed(step)
        self.previous_replicas = [replica for replica in self.previous_replicas if replica.version > step]

    def reshape(self, shape_epoch: int, replicas: dict[int, StageReplica], committed_steps: int) -> None:
        """Replace the replicas by those of a new shape. Records of open steps are dropped: no step is open, or the
        leader gave up the work that was done in it."""
        held = (*self.previous_replicas, *self.replicas.values())
        self.previous_replicas = [replica for replica in held if replica.version == committed_steps]
        self.replicas, self.shape_epoch = replicas, shape_epoch
        self.open_steps.clear()
        self.copying_step, self._kept_bytes = None, 0

    def find_layer_state(self, layer: int, version: int) -> ModelState | None:
        """The state that contains a layer for step `version`, in the current or an earlier shape; None: there is
        none."""
        held = (*self.replicas.values(), *self.previous_replicas)
        return next((r.state for r in held if r.version == version and layer in r.state.layers), None)

    def discard(self, step: int, g: int) -> None:
        """Clear this worker's own sum of a segment (see `RecoveryPlan.discarded`). Tapes and outputs stay."""
        open_step = self.open_steps[step]
        open_step.handed_off_sums.pop(g, None)
        stats = open_step.stats.get(g)
        if stats is not None:
            stats.restart()
            for layer in stats.segment.layers:
                layer.accumulator.clear()

    def discard_action(self, step: int, g: int, micro: int, *, clears_sum: bool) -> None:
        """Discard what an action that raised has left half done: its tape and, with `clears_sum`, the sum that it may
        have added to."""
        for replica in self.replicas.values():
            if g in replica.segments:
                replica.segments[g].take_additions()
                replica.segments[g].tapes.pop((step, micro), None)
        if clears_sum:
            self.discard(step, g)

    @contextmanager
    def dropping_on_error(self, replica: StageReplica) -> Iterator[None]:
        """Drop a replica if its update raises: some of its weights may be those of the next step."""
        try:
            yield
        except BaseException:
            self.replicas.pop(replica.stage, None)
            raise

    def inventory(self) -> WorkerInventory:
        """What this worker has finished, summed and kept. The epoch must be closed: nothing changes any more."""
        tapes = [
            (g, key, tape)
            for replica in self.replicas.values()
            for g, segment in replica.segments.items()
            for key, tape in segment.tapes.items()
        ]
        held_segments = {g for replica in self.replicas.values() for g in replica.segments}
        return WorkerInventory(
            weight_versions={stage: replica.version for stage, replica in self.replicas.items()},
            copied_at={
                stage: replica.first_version for stage, replica in self.replicas.items() if replica.first_version > 0
            },
            tapes_after_forward=tuple(
                WorkKey(step, g, micro) for g, (step, micro), tape in tapes if not tape.input_backward_done
            ),
            tapes_after_input_grad=tuple(
                WorkKey(step, g, micro) for g, (step, micro), tape in tapes if tape.input_backward_done
            ),
            accumulated_grads=tuple(self._accumulated_grads()),
            outputs=tuple(self._kept_outputs(Kind.F)),
            input_grads=tuple(self._kept_outputs(Kind.I)),
            complete_sums=tuple(
                (step, g)
                for step, open_step in self.open_steps.items()
                for g in open_step.reduced_gradients
                if g in held_segments
            ),
            rebuild_epoch=self.rebuild_epoch,
            shape_epoch=self.shape_epoch,
            layers_by_step=self._layers_by_version(),
        )

    def _layers_by_version(self) -> dict[int, tuple[int, ...]]:
        layers: dict[int, set[int]] = {}
        for replica in (*self.previous_replicas, *self.replicas.values()):
            layers.setdefault(replica.version, set()).update(replica.state.layers)
        return {version: tuple(sorted(indices)) for version, indices in layers.items()}

    def _accumulated_grads(self) -> Iterable[WorkKey]:
        """The micro-batches in this worker's own sums that are not reduced yet. Statistics of segments that are no
        longer held are skipped: their sums are gone, or a new copy has replaced the layers."""
        held = {segment for replica in self.replicas.values() for segment in replica.segments.values()}
        for step, open_step in self.open_steps.items():
            for g, stats in open_step.stats.items():
                if g in open_step.reduced_gradients or stats.segment not in held:
                    continue
                handed_off = (
                    part.metadata[: self.job.micro_batches].tolist() for part in open_step.handed_off_sums.get(g, ())
                )
                for counts in (stats.counts, *handed_off):
                    yield from (WorkKey(step, g, micro) for micro, count in enumerate(counts) if count)

    def _kept_outputs(self, kind: Kind) -> Iterable[WorkKey]:
        for step, open_step in self.open_steps.items():
            for name in open_step.outputs:
                action = Action.parse(name)
                if action.kind is kind:
                    yield WorkKey(step, action.segment, action.micro or 0)
