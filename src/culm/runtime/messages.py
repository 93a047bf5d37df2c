"""Control messages between agents, workers and the leader, and their encoding.

Every message is msgpack, encoded and decoded by msgspec with a type: nothing that arrives is executed. The Struct tags
are the names on the wire. Reports of a worker carry its number in the run (`Member.worker`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple, TypeAlias

import msgspec

from culm.plan.recover.lineage import WorkerInventory
from culm.runtime.epoch import Epoch


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """Leader to workers: leave every epoch below this number and report what you hold."""

    epoch: int
    leader: str


class EpochAnnouncement(msgspec.Struct, frozen=True, tag="announcement"):
    """The newest epoch, under the key `announced`: written after the epoch itself is in the store."""

    number: int
    digest: str
    """The SHA-256 of the encoded epoch."""
    epoch: bytes = b""
    """The encoded epoch; empty: it is large, and agents have received parts of it, or read it from the store."""


class EpochPart(msgspec.Struct, frozen=True, tag="part"):
    """What some workers need of a large epoch, from the leader to one agent and from agent to agent. It counts once
    that epoch has been announced."""

    digest: str
    """Digest of the whole epoch."""
    workers: tuple[int, ...]
    body: bytes
    """An encoded epoch without the action lists of workers that these exchange nothing with."""
    forward_to: tuple[str, ...] = ()
    """The agents that the receiver sends it to, each with a share of the others."""


class HaltReport(msgspec.Struct, frozen=True, tag="halt_report"):
    """A worker's answer to Halt. No action of the epochs below can finish on this worker any more."""

    worker: int
    epoch: int
    inventory: WorkerInventory
    leader_snapshot: bytes = b""
    """The snapshot in the last Commit that had one."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Worker to leader, at regular intervals: progress in this epoch."""

    worker: int
    epoch: int
    actions_done: int
    """Number of actions run. While layers are built or a disk is waited for, each heartbeat counts as an action."""
    slowest_action_s: float
    """Seconds of the slowest action so far. The leader allows silence of at least that length."""


class ShadowMemoryFull(msgspec.Struct, frozen=True, tag="shadow_memory_full"):
    """Worker to leader: page-locked memory does not suffice for what the forwards of replicas leave. Some forwards are
    not run in advance."""

    worker: int
    epoch: int
    needed: int
    """Bytes that one forward leaves."""
    lent: int
    """Bytes of page-locked memory in use."""
    cap: int


class ShadowCaughtUp(msgspec.Struct, frozen=True, tag="shadow_caught_up"):
    """Worker to leader: the copy of a fresh shadow is complete and is updated with the reduced gradients."""

    worker: int
    epoch: int
    stage: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Leader to workers: in this epoch begin no step from this one on. Open steps are completed."""

    epoch: int
    stop_before: int


class HandoffReceived(msgspec.Struct, frozen=True, tag="handoff_received"):
    """Worker to leader: everything that leaving workers had for this one has arrived."""

    worker: int
    epoch: int


class WorkerStarted(msgspec.Struct, frozen=True, tag="hello"):
    """Worker to its agent: the worker runs and has this address."""

    worker: int
    address: str


class LayersReady(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to leader: the layers are built or loaded."""

    worker: int
    epoch: int
    seconds: float
    reduce: str = ""
    """What sums gradients with other workers: nccl, gloo or frames. Empty: nothing does."""
    reduce_fallback: str = ""
    """Why this is not NCCL, if that was asked for."""


class StepPermit(msgspec.Struct, frozen=True, tag="permit"):
    """Leader to workers: steps below this number may run."""

    end_step: int


class CountRun(NamedTuple):
    """Consecutive micro-batches with the same counts. A step without errors is one run, so that reports stay small."""

    micro_batches: int
    least: int
    most: int


def count_runs(least: Iterable[int], most: Iterable[int]) -> tuple[CountRun, ...]:
    """The counts of all micro-batches as runs."""
    pairs = groupby(zip(least, most, strict=True))
    return tuple(CountRun(sum(1 for _ in same), *pair) for pair, same in pairs)


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """Worker to leader: the reduced gradients of this step are complete here, and the weights are updated."""

    worker: int
    epoch: int
    step: int
    reported_at: float
    counts: tuple[CountRun, ...]
    """How often each micro-batch is in the sums, by the additions to them and by the samples that were fetched: the
    minimum and the maximum over the worker's segments. 1 is right, 0 is lost."""
    loss_sum: float | None = None
    """Set by the workers that have the reduced gradient of the last segment; equal on all of them."""
    weight_sum: float | None = None
    grad_norm: float | None = None
    skipped: bool = False
    values: dict[str, float] = {}
    """The named values of Job.metrics, reduced over the step; from the workers that report `loss_sum`."""
    busy_s: float = 0.0
    """Seconds that the worker computed in this step, without waits for input."""
    actions: dict[str, int] = {}
    """The actions that it ran in this time, by segment and kind, as in 2F."""
    stream_digest: str | None = None
    """Digest of the items of the step, if Job.data is a stream and this worker has read them."""


class CollectReport(msgspec.Struct, frozen=True, tag="collect"):
    """A worker of a large cluster to an agent: send this report to the leader, with those of the other workers of the
    pipeline."""

    leader: str
    expected: int
    """How many workers of the pipeline report the step."""
    report: StepReport


class ReportBundle(msgspec.Struct, frozen=True, tag="reports"):
    """An agent to the leader: reports of several workers about one step."""

    reports: tuple[StepReport, ...]


class EvaluationReport(msgspec.Struct, frozen=True, tag="evaluation"):
    """A worker with the last segment to the leader: its part of an evaluation after `step`."""

    worker: int
    step: int
    micro_batch_losses: tuple[tuple[int, float, float, tuple[float, ...]], ...]
    """For each of its micro-batches: number, loss (for a mean: times the weight), weight, values of Job.metrics."""


class ShardReport(msgspec.Struct, frozen=True, tag="shard"):
    """Worker to leader: the worker's shard of the checkpoint is on storage."""

    worker: int
    epoch: int
    step: int
    name: str
    sha256: str
    size: int
    tensors: tuple[str, ...]
    scalars: dict[str, int | float | bool | str | None]
    checksums: dict[int, str] = {}
    """By layer: of weights and optimizer state after `step` steps on this worker, for layers with several holders."""


class StorageReport(msgspec.Struct, frozen=True, tag="storage"):
    """Worker to leader: its checkpoint shard cannot be written, or can be written again."""

    worker: int
    step: int
    """The completed steps of the checkpoint."""
    why: str
    """The reason of the failure; empty: the storage works again."""
    skipped: bool = False
    """Whether the checkpoint was given up."""


class DamageReport(msgspec.Struct, frozen=True, tag="damage"):
    """Worker to leader: a frame arrived damaged."""

    worker: int
    sender: str
    """The address of the worker that sent it."""
    frame: str
    """The frame, which was requested again; empty: the damage was in a header, and the connection was closed."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Leader to workers: every holder has the reduced gradients of this step. Workers may delete what they kept for
    it."""

    step: int
    epoch: int
    """The epoch of the commit. A worker that has left it has reported what it holds, and keeps that."""
    leader_snapshot: bytes = b""
    """Kept by the workers while the store cannot be reached, for the next leader."""


class EndRun(msgspec.Struct, frozen=True, tag="finish"):
    """Leader to workers: the run ends before this step. Send the final report and end."""

    end_step: int


class EvaluateAfter(msgspec.Struct, frozen=True, tag="evaluate"):
    """Leader to workers: in this epoch, evaluate after this many completed steps. Later epochs name it themselves."""

    epoch: int
    completed_steps: int


class SaveAfter(msgspec.Struct, frozen=True, tag="save_after"):
    """Leader to workers: in this epoch, write a checkpoint after this many completed steps."""

    epoch: int
    completed_steps: int


class FinalReport(msgspec.Struct, frozen=True, tag="final"):
    """Worker to leader, its last message: digests of its layers and its statistics."""

    worker: int
    digests: dict[int, tuple[str, str]]
    spans: tuple[tuple[int, str, float, float], ...]
    """(step, action, start, end) of the last actions."""
    kept_bytes: int
    peak_tapes: int
    peak_rss: int
    waited_s: float
    peak_device_bytes: int = 0
    """The most memory of its device that tensors took; 0 on a CPU."""
    peak_slab_bytes: int = 0
    """The most host memory that its slabs took, which is page-locked for a GPU; 0 on a CPU."""
    eager_forwards: tuple[int, int] = (0, 0)
    """Eager forwards of shadow replicas: (number run in a bubble, number due)."""


class FailedAction(msgspec.Struct, frozen=True):
    """An exception in the code that a worker runs. It may be the fault of its machine. The worker executes nothing
    more in the epoch, and keeps what it holds."""

    epoch: int
    step: int
    """The open step; -1: not known."""
    action: str
    """The action; empty: the exception was raised outside of the actions of a step."""
    exception: str
    """Class name of the first exception of the chain."""
    location: str
    """FILE:LINE of the innermost frame of the job's code or, without one, of any code."""
    device: str = ""
    """Identifier of the worker's GPU; empty: it computes on the CPU."""
    out_of_memory: bool = False
    """Whether the device had no memory left. The worker has emptied its cache."""


class FailureReport(msgspec.Struct, frozen=True, tag="failed"):
    """Worker or agent to leader: an error, with the reason in one sentence. It ends the run unless it has a `peer` or
    an `action`."""

    worker: int
    error_class: str
    """Name of a class in culm.errors."""
    message: str
    traceback: str = ""
    peer: str = ""
    """With NodeLost: the address to which the connection broke."""
    action: FailedAction | None = None
    """Set if the error may be the fault of the worker's machine."""


class Dismiss(msgspec.Struct, frozen=True, tag="dismiss"):
    """Leader to agent: the node is declared lost. It ends, and its machine may join again as another node."""

    reason: str


class RestartWorker(msgspec.Struct, frozen=True, tag="renew"):
    """Leader to agent: end the workers of this incarnation and start others. No error if they have ended already."""

    incarnation: int


class StopNow(msgspec.Struct, frozen=True, tag="stop"):
    """Stop at once."""

    reason: str = ""


Message: TypeAlias = (
    Epoch
    | EpochPart
    | Halt
    | HaltReport
    | Heartbeat
    | ShadowMemoryFull
    | ShadowCaughtUp
    | Drain
    | HandoffReceived
    | WorkerStarted
    | LayersReady
    | StepPermit
    | StepReport
    | CollectReport
    | ReportBundle
    | EvaluationReport
    | ShardReport
    | StorageReport
    | DamageReport
    | Commit
    | EndRun
    | EvaluateAfter
    | SaveAfter
    | FinalReport
    | FailureReport
    | Dismiss
    | RestartWorker
    | StopNow
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
decode_announcement = msgspec.msgpack.Decoder(EpochAnnouncement).decode
