"""Events and instructions of the leader: what `LeaderState.handle` takes and returns. All of them can be logged."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from culm.cluster.leader.output.hook_runner import HookResult
from culm.cluster.leader.stored_snapshot import EncodedSnapshot
from culm.errors import CulmError
from culm.market.cost_record import CostRecord
from culm.observe.step_metrics import StepMetrics
from culm.plan.recover.lineage import WorkerInventory
from culm.plan.reshape.pipeline_shape import PipelineShape
from culm.runtime import messages
from culm.runtime.epoch import Epoch, Member

# Events.


class Started(msgspec.Struct, frozen=True, tag="started"):
    """This node has become the leader. Contains what a previous leader has left in the store."""

    epoch: bytes | None
    record: bytes | None
    nodes: dict[int, bytes]
    """The node records of the members of that epoch."""
    hook_result: bytes | None
    previous_leader: int | None
    killed_at: dict[int, float] = {}
    absent_nodes: tuple[int, ...] = ()
    """Nodes that the previous leader knew as rented and that are not in the store any more."""
    sessions_expired: bool = False
    """Whether this node has replaced its session, and found no leader: other nodes may do the same."""


class KeyChanged(msgspec.Struct, frozen=True, tag="key"):
    """A key of the store has changed; None: it was deleted."""

    key: str
    value: bytes | None
    killed_at: dict[int, float] = {}
    """When the node of this key was killed, if a fault was injected."""


class ErrorRaised(msgspec.Struct, frozen=True, tag="error"):
    """An error outside of the state machine that ends the run."""

    error_class: str
    message: str
    trace: str = ""

    @classmethod
    def from_error(cls, error: CulmError) -> ErrorRaised:
        return cls(type(error).__name__, str(error), error.trace)


class RecheckTimer(msgspec.Struct, frozen=True, tag="recheck"):
    """Check again whether the next epoch can start."""

    epoch: int
    wait_expired: bool = True
    """Whether the time limit for replacement nodes has passed."""


class StartAfterTimer(msgspec.Struct, frozen=True, tag="start_after"):
    """The run may begin without the nodes that have not joined yet."""


class ReturnTimer(msgspec.Struct, frozen=True, tag="return"):
    """Members that have lost their sessions had time to open new ones."""


class SessionTimer(msgspec.Struct, frozen=True, tag="session"):
    """Check whether the members without a session still run."""


class Suspicion(msgspec.Struct, frozen=True, tag="suspicion"):
    """A worker reported an unreachable peer, and the store has had time to confirm a loss."""

    epoch: int
    message: messages.FailureReport


class ProgressTimer(msgspec.Struct, frozen=True, tag="progress"):
    """Check whether the epoch has made progress since the last check."""


class BudgetTimer(msgspec.Struct, frozen=True, tag="budget"):
    """Check the budget of the run while no step is committed."""


class HookTimer(msgspec.Struct, frozen=True, tag="hook_timer"):
    """Check whether the hook has returned for a step."""

    step: int
    started_at: float
    pause: float
    """Seconds until this check."""


class NodeEvicted(msgspec.Struct, frozen=True, tag="evicted"):
    """The agent of the leader's node has ended the session of a node that hangs or was given up."""

    node: int


class PlanSearched(msgspec.Struct, frozen=True, tag="plan_searched"):
    """The search for a shorter plan of a shape has ended."""

    depths: tuple[int, ...]
    plan: str = ""
    """The shorter plan as text; empty: there is none."""
    step_s: float = 0.0
    """Predicted seconds of a step with it."""
    why: str = ""
    """Why there is none."""


class CheckpointWritten(msgspec.Struct, frozen=True, tag="checkpoint_written"):
    """Writing the manifest of a checkpoint has ended."""


class FoundCheckpoint(msgspec.Struct, frozen=True, tag="found"):
    """The newest valid checkpoint."""

    step: int
    folder: str


class CommittedCheckpoint(msgspec.Struct, frozen=True, tag="committed"):
    """A checkpoint that is valid from now on."""

    step: int
    size: int
    prune_failed: str
    """Why old checkpoints could not be deleted; empty: they are."""
    verified: bool = False
    """Whether all holders of every layer agreed."""
    path: str = ""
    """Its folder."""


class PlannedEpoch(msgspec.Struct, frozen=True, tag="planned"):
    """The epoch that a recovery continues in."""

    epoch: Epoch
    why: str
    source: str
    planned_ahead: bool
    """Whether its plan was in the cache."""


class ReshapeVerdict(msgspec.Struct, frozen=True, tag="verdict"):
    """What the policy decided about the shape of the pipelines."""

    kind: str
    layout: str
    depths: tuple[int, ...] | None
    """The depths of the new shape; None: the shape stays."""
    why: str


class ReshapeDecided(msgspec.Struct, frozen=True, tag="reshape_decided"):
    """The policy has decided about the shape of the pipelines in an epoch; None: nothing."""

    epoch: int
    verdict: ReshapeVerdict | None


class ShapeBuilt(msgspec.Struct, frozen=True, tag="shape_built"):
    """The shape with pipelines of these depths; None: there is none."""

    depths: tuple[int, ...]
    shape: PipelineShape | None
    why: str = ""
    """Why there is none."""


class EndedWorkers(msgspec.Struct, frozen=True, tag="ended_workers"):
    """The workers whose process has ended."""

    addresses: tuple[str, ...]


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """A call has returned, or failed with an error."""

    number: int
    result: bool | FoundCheckpoint | CommittedCheckpoint | PlannedEpoch | ReshapeVerdict | EndedWorkers | None = None
    error: ErrorRaised | None = None


TimerEvent: TypeAlias = (
    RecheckTimer | StartAfterTimer | ReturnTimer | SessionTimer | Suspicion | ProgressTimer | BudgetTimer | HookTimer
)
LeaderEvent: TypeAlias = (
    messages.Message
    | Started
    | KeyChanged
    | ErrorRaised
    | TimerEvent
    | HookResult
    | NodeEvicted
    | PlanSearched
    | ReshapeDecided
    | ShapeBuilt
    | CheckpointWritten
    | Completed
)

# Instructions without a result.


class SendMessage(msgspec.Struct, frozen=True, tag="send"):
    """Send an encoded message to an agent or a worker."""

    address: str
    body: bytes


class SendToAll(msgspec.Struct, frozen=True, tag="send_all"):
    """Send the same encoded message to several agents or workers."""

    addresses: tuple[str, ...]
    body: bytes


class PutKey(msgspec.Struct, frozen=True, tag="put"):
    """Write a key to the store in the background, in order."""

    key: str
    value: bytes
    keep_every_value: bool = False


class PutSnapshot(msgspec.Struct, frozen=True, tag="put_snapshot"):
    """Write the snapshot to the store in the background, in order with keys."""

    snapshot: EncodedSnapshot


class WriteStep(msgspec.Struct, frozen=True, tag="write_step"):
    """Write a committed step to the run folder and the writers."""

    metrics: StepMetrics


class WriteEvent(msgspec.Struct, frozen=True, tag="write_event"):
    """Write an event to the run folder and the writers."""

    event: dict[str, Any]


class WriteCost(msgspec.Struct, frozen=True, tag="write_cost"):
    """Write cost.json in the background. A newer record may replace one that was not written yet."""

    record: CostRecord


class RewindLines(msgspec.Struct, frozen=True, tag="rewind"):
    """Remove the lines of this step and later ones."""

    step: int


class SyncFolder(msgspec.Struct, frozen=True, tag="sync"):
    """Copy lines to a run folder that is a URL."""


class StartTimer(msgspec.Struct, frozen=True, tag="timer"):
    """Feed an event back after some seconds; 0: right after this event."""

    seconds: float
    event: TimerEvent


class StartHook(msgspec.Struct, frozen=True, tag="hook"):
    """Call the job's hook for a step. Its result is an event."""

    metrics: StepMetrics


class ExpectHeartbeats(msgspec.Struct, frozen=True, tag="expect"):
    """From now on the members of an epoch send heartbeats."""

    epoch: int
    workers: tuple[int, ...]
    slowest_action_s: float


class EvictNode(msgspec.Struct, frozen=True, tag="evict"):
    """End the session of a node."""

    node: int


class PrecomputePlans(msgspec.Struct, frozen=True, tag="precompute"):
    """Compute the plans for the next possible losses in the background."""

    inventories: dict[int, WorkerInventory]
    committed: int
    old_epoch: Epoch | None


class ImprovePlan(msgspec.Struct, frozen=True, tag="improve"):
    """Search for a shorter plan of a shape in the background. The result is the event PlanSearched."""

    shape: PipelineShape


class DecideReshape(msgspec.Struct, frozen=True, tag="decide_reshape"):
    """Apply the policy of the run to the present nodes in the background. The result is the event ReshapeDecided."""

    epoch: int


class BuildShape(msgspec.Struct, frozen=True, tag="build_shape"):
    """Partition and plan pipelines of these depths in the background. The result is the event ShapeBuilt."""

    depths: tuple[int, ...]


class LeaveNode(msgspec.Struct, frozen=True, tag="leave"):
    """Let the leader's own node go, after the state is in the store for the next leader."""

    dismissed: bool = False
    """Whether it is declared lost. Otherwise it has handed over everything after a notice."""


class EndLeading(msgspec.Struct, frozen=True, tag="end"):
    """The run has ended; None: all steps are committed and all workers have reported."""

    error: ErrorRaised | None = None


# Calls: the event that is being handled continues with their result.


class OpenWriters(msgspec.Struct, frozen=True, tag="open"):
    """Open the run folder and the writers."""

    new_run: bool
    """Whether the run starts. Then a folder that cannot be written is an error."""


class FlushLines(msgspec.Struct, frozen=True, tag="flush"):
    """Wait until lines are written, for a limited time."""


class WaitForStore(msgspec.Struct, frozen=True, tag="written"):
    """Wait until all keys are written."""


class PublishEpoch(msgspec.Struct, frozen=True, tag="publish"):
    """Replace the epoch in the store, if this node is still the leader, and announce it. Returns whether it is."""

    number: int
    body: bytes
    digest: str
    is_large: bool
    """Whether the members were sent parts of it, so that the announcement need not contain it."""


class CommitStep(msgspec.Struct, frozen=True, tag="commit_step"):
    """Write a commit to the store. Returns whether it is there; with `wait` it always is."""

    record: EncodedSnapshot | None
    step: bytes | None
    wait: bool
    store_unreachable: bool
    """Whether the store was out of reach at the last commit."""


class ReachCommit(msgspec.Struct, frozen=True, tag="reach_commit"):
    """The commit of a step is in the store: the point at which faults are injected."""

    step: int


class DeleteKey(msgspec.Struct, frozen=True, tag="delete"):
    key: str


class FindCheckpoint(msgspec.Struct, frozen=True, tag="find_checkpoint"):
    """Find the newest valid checkpoint. Returns FoundCheckpoint or None."""


class ReturnToVerified(msgspec.Struct, frozen=True, tag="return_to_verified"):
    """Find the newest verified checkpoint and delete later ones. Returns FoundCheckpoint or None."""


class CommitCheckpoint(msgspec.Struct, frozen=True, tag="commit_checkpoint"):
    """Commit the newest checkpoint whose shards and steps are all there. Returns CommittedCheckpoint or None."""

    committed_steps: int


class ProbeWorkers(msgspec.Struct, frozen=True, tag="probe_workers"):
    """Ask the machines of workers whether their processes have ended. Returns EndedWorkers."""

    addresses: tuple[str, ...]


class FindSmallerStages(msgspec.Struct, frozen=True, tag="find_smaller_stages"):
    """Find the fastest shape of the present nodes whose stages need less memory. Returns ReshapeVerdict or None."""


class PlanRecovery(msgspec.Struct, frozen=True, tag="plan"):
    """Plan the epoch after a halt from the inventories of the survivors. Returns PlannedEpoch. The loss of a node ends
    this call: its result is then ignored."""

    number: int
    inventories: dict[int, WorkerInventory]
    committed: int
    moving_slots: tuple[int, ...]
    arrivals: dict[int, Member]
    leaving_slots: tuple[int, ...]
    zones: dict[int, str]
    departure_steps: float
    slow_slots: dict[int, float] = {}
    """By slot of a slow worker: how many times as long as its peers it takes."""
    slow_reason: str = ""
    limits_activations: bool = False
    """Whether no worker may keep more activations than in 1F1B."""
    failed_slots: tuple[int, ...] = ()
    """Slots of nodes that execute nothing any more, first among the `leaving_slots`."""


class PlanReshape(msgspec.Struct, frozen=True, tag="plan_reshape"):
    """Plan the epoch in which the present workers form pipelines of other depths. Returns PlannedEpoch. The loss of a
    node ends this call, too."""

    number: int
    workers: dict[int, Member]
    inventories: dict[int, WorkerInventory]
    """By worker."""
    step: int
    zones: dict[int, str]
    depths: tuple[int, ...] | None
    """None: the template for the number of workers."""
    why: str = ""
    shape: PipelineShape | None = None
    """The shape with these depths, if it is known."""


CallBody: TypeAlias = (
    OpenWriters
    | FlushLines
    | WaitForStore
    | PublishEpoch
    | CommitStep
    | ReachCommit
    | DeleteKey
    | FindCheckpoint
    | ReturnToVerified
    | CommitCheckpoint
    | ProbeWorkers
    | FindSmallerStages
    | PlanRecovery
    | PlanReshape
)


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Execute something and feed its result back as Completed with this number."""

    number: int
    body: CallBody


Instruction: TypeAlias = (
    SendMessage
    | SendToAll
    | PutKey
    | PutSnapshot
    | WriteStep
    | WriteEvent
    | WriteCost
    | RewindLines
    | SyncFolder
    | StartTimer
    | StartHook
    | ExpectHeartbeats
    | EvictNode
    | PrecomputePlans
    | ImprovePlan
    | DecideReshape
    | BuildShape
    | LeaveNode
    | EndLeading
    | Call
)
