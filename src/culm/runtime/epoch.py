"""The epoch: an immutable configuration of the cluster. All workers train under one epoch at a time.

A lost or joining node leads to a new epoch; an epoch is never edited. It is sent as msgpack (see `messages`).
"""

from __future__ import annotations

import msgspec

from culm.plan.recover.recovery_plan import RecoveryPlan
from culm.plan.reshape.pipeline_shape import PipelineShape
from culm.plan.reshape.slot_assignment import LayerTransfer


class Member(msgspec.Struct, frozen=True):
    """A worker of the epoch. Its index in the list of members is its slot: pipeline * P + stage."""

    worker: int
    """Number of the worker in the run. Node n has the workers n * K to n * K + K - 1, with K `workers_per_node`."""
    address: str
    incarnation: int = 0
    """How often the workers of its node have been restarted. Distinguishes workers that use the same address."""
    workers_per_node: int = 1

    @property
    def node(self) -> int:
        """The node of the worker: it is lost and leaves together with all of its workers."""
        return self.worker // self.workers_per_node

    @property
    def label(self) -> str:
        """The worker as text: 'node 3', or 'node 3 worker 1' if nodes have several workers."""
        return worker_label(self.worker, self.workers_per_node)


def worker_label(worker: int, workers_per_node: int) -> str:
    """A worker as text: 'node 3', or 'node 3 worker 1' if nodes have several workers."""
    node, index = divmod(worker, workers_per_node)
    return f"node {node}" if workers_per_node == 1 else f"node {node} worker {index}"


class Shadow(msgspec.Struct, frozen=True):
    """A worker that keeps a copy of a stage it does not run, updated with the reduced gradients that `source` sends."""

    stage: int
    slot: int
    source: int
    """The slot whose worker runs the stage and sends its reduced gradients."""
    needs_copy: bool = False
    """The worker has no copy yet: the source sends one, and reduced gradients from then on."""
    takes_over_stage: bool = False
    """When the copy is complete, the worker will stop running its own stage and run this one."""


class LayerInput(msgspec.Struct, frozen=True):
    """A tensor that a layer gets in a forward of training."""

    shape: tuple[int, ...]
    dtype: str
    """Such as 'float32'."""
    requires_grad: bool


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """Members, layers by segment, and the plan. An epoch is self-contained."""

    number: int
    leader: str
    """The address that reports are sent to."""
    members: tuple[Member | None, ...]
    """By slot; None: the slot is empty."""
    segments: tuple[tuple[int, int], ...]
    """Layers [first, last + 1) of each segment."""
    plan: str
    """The plan of a step, as text (culm.schedule.Plan)."""
    evaluation_plan: str | None
    """The forward-only plan of an evaluation."""
    start: int
    """The first step to run. The weights include all steps before it."""
    end_step: int
    """The step after the last one."""
    weighted_loss: bool
    """Whether the loss returns (sum, weight)."""
    checkpoint_every: int = 0
    checkpoint_overdue: bool = False
    """Whether a checkpoint that was due failed. It is then saved after the first step, by workers that have no earlier
    write under way."""
    storage: str | None = None
    """Where checkpoints are written to and, when `start` > 0, read from."""
    resume_step: int | None = None
    """The number of completed steps of the checkpoint to start from."""
    resume_from: str | None = None
    reduces_on_devices: bool = False
    """Whether gradients are summed on the devices, where all members of a group can."""
    keeps_outputs: bool = False
    """Whether outputs of actions are kept until the step commits, so that a loss can be recovered from."""
    shadows: tuple[Shadow, ...] = ()
    eager_shadows: bool = False
    """Whether shadows run the forward of their replicas while they would otherwise wait."""
    committed_steps: int = 0
    """Steps below this number are committed."""
    heartbeat_s: float = 0.0
    """Seconds between two heartbeats of a worker; 0: none are sent."""
    rebuild_epoch: int = 1
    """The last epoch in which all workers built or loaded their layers. What they held before is not valid."""
    dropped_micro_batches: tuple[int, ...] = ()
    """Micro-batches that are not run from `start` on, because their pipeline has lost a node (strategy drop)."""
    leaving_slots: tuple[int, ...] = ()
    """Slots whose workers complete what they have begun, hand over what they have, and leave."""
    recovery: RecoveryPlan = RecoveryPlan()
    """How the open steps, which come before `start`, are completed."""
    shape: PipelineShape | None = None
    """The shape of the run if it was changed; None: the initial shape."""
    shape_epoch: int = 0
    """The first epoch with this shape, which numbers stages and segments. 0: the initial shape."""
    shape_start: int = 0
    """The first step of this shape."""
    layer_moves: tuple[LayerTransfer, ...] = ()
    """The layers that workers send to each other before `start`, because the shape is new."""
    stop_before: int | None = None
    """No worker begins this step or a later one in this epoch; None: there is no limit."""

    evaluations: tuple[int, ...] = ()
    """Evaluations that the leader has chosen by time, from `start` on: the steps completed before each."""
    checkpoints: tuple[int, ...] = ()
    """The same for checkpoints."""
    report_collectors: tuple[str, ...] = ()
    """By pipeline: the agent that collects the step reports of its workers for the leader. Empty: each worker sends its
    own to the leader."""
    layer_inputs: tuple[tuple[LayerInput, ...], ...] = ()
    """By layer: what it gets, to compile it before its first action. Empty: layers are not compiled."""

    def slot_of(self, worker: int) -> int | None:
        """The slot of a worker in this epoch; None: the worker is not a member."""
        return next((slot for slot, m in enumerate(self.members) if m is not None and m.worker == worker), None)

    def slots_of_node(self, node: int) -> list[int]:
        """The slots that the workers of a node fill in this epoch."""
        return [slot for slot, m in enumerate(self.members) if m is not None and m.node == node]

    def dropped_in(self, step: int) -> tuple[int, ...]:
        """The micro-batches that are left out of a step."""
        return self.recovery.dropped_micros.get(step, ()) if step < self.start else self.dropped_micro_batches

    @property
    def drops_samples(self) -> bool:
        """Whether samples are dropped in this epoch. Then training differs from a run without losses."""
        return bool(self.dropped_micro_batches or any(self.recovery.dropped_micros.values()))

    def address(self, slot: int) -> str:
        member = self.members[slot]
        assert member is not None, f"slot {slot} is empty"
        return member.address

    @property
    def rebuild(self) -> bool:
        """Whether workers build or load their layers; otherwise they continue with what they hold."""
        return self.rebuild_epoch == self.number

    @property
    def changes_shape(self) -> bool:
        """Whether this is the first epoch with its shape: each worker holds other layers than before."""
        return self.shape_epoch == self.number

    @property
    def staying_slots(self) -> list[int]:
        """The slots that are filled and do not leave."""
        return [
            slot for slot, member in enumerate(self.members) if member is not None and slot not in self.leaving_slots
        ]

    @property
    def present_members(self) -> tuple[Member, ...]:
        """The members, without empty slots."""
        return tuple([member for member in self.members if member is not None])
