"""The epoch: the immutable value that everyone trains under, and the letters that carry it and its reports.

A failure or a newcomer replaces this one value; nothing edits it. Everything is msgpack through msgspec: typed, and
nothing that arrives is ever executed.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from culm.plan.lineage import Standing
from culm.plan.recover import Recovery
from culm.plan.relayout import Shape
from culm.plan.seating import Move


class Member(msgspec.Struct, frozen=True):
    """A worker of the epoch. Its place in the list of members is its slot: pipeline * P + stage."""

    node: int
    address: str
    life: int = 0
    """How often the node's worker had been started anew: an address may be used again."""


class Shadow(msgspec.Struct, frozen=True):
    """A worker that keeps a copy of a stage it does not run, stepped with the complete sums that `source` sends."""

    stage: int
    slot: int
    source: int
    """The slot whose worker runs the stage, and sends its sums."""
    fresh: bool = False
    """It has no copy yet: the source sends one, and sums from there on."""
    moves: bool = False
    """With the copy complete, the worker will leave the stage that it runs for this one."""


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """Members, layers by segment, and the plan; complete in itself."""

    number: int
    leader: str
    """Where reports go."""
    members: tuple[Member | None, ...]
    """By slot; None: nobody fills it."""
    segments: tuple[tuple[int, int], ...]
    """Layers [first, last + 1) of each segment."""
    plan: str
    """The plan of a step, as text (culm.schedule.Plan)."""
    evaluation: str | None
    """The F-only plan of an evaluation."""
    start: int
    """The first step to run: steps before it are in the weights already."""
    steps: int
    """The step after the last one."""
    weighted: bool
    """Whether the loss returns (sum, weight)."""
    checkpoint_every: int = 0
    owes: bool = False
    """Whether a checkpoint that was due came to nothing: the first step is saved, by whom no earlier write holds up."""
    storage: str | None = None
    """Where checkpoints go and, when `start` > 0, come from."""
    resume: int | None = None
    """The checkpoint to start from: its number of completed steps."""
    resume_from: str | None = None
    kept: bool = False
    """Whether what actions made is kept until the step commits, so that a loss can be recovered from."""
    shadows: tuple[Shadow, ...] = ()
    eager: bool = False
    """Whether shadows run the forward of their replicas where they would otherwise wait."""
    committed: int = 0
    """Steps below this number are committed."""
    beat_s: float = 0.0
    """Seconds between two beats of a worker; 0: none."""
    reset: bool = True
    """Whether workers build or load their layers anew; otherwise they go on with what they have in hand."""
    dropped: tuple[int, ...] = ()
    """Micro-batches that nobody runs from `start` on: their pipeline has lost a node (strategy drop)."""
    leaving: tuple[int, ...] = ()
    """Slots whose workers end what they have begun, hand over what they have, and go."""
    recovery: Recovery = Recovery()
    """How the steps that were open are completed, before `start`."""
    shape: Shape | None = None
    """What the run has been made into since it began; None: it is as it was set up."""
    shaped: int = 0
    """The first epoch that had this shape: stages and segments are numbered by it. 0: as set up."""
    moves: tuple[Move, ...] = ()
    """The layers that workers take from each other before `start`, because the shape is new."""
    until: int | None = None
    """Nobody begins this step or a later one in this epoch; None: there is no such limit."""

    def slot_of(self, node: int) -> int | None:
        """The slot that a node fills in this epoch."""
        return next((slot for slot, m in enumerate(self.members) if m is not None and m.node == node), None)

    def drops(self, step: int) -> tuple[int, ...]:
        """The micro-batches that are left out of a step."""
        return self.recovery.dropped.get(step, ()) if step < self.start else self.dropped

    @property
    def drops_any(self) -> bool:
        """Whether samples are lost in it: then it changes what is learned."""
        return bool(self.dropped or any(self.recovery.dropped.values()))

    def address(self, slot: int) -> str:
        member = self.members[slot]
        assert member is not None, f"nobody fills slot {slot}"
        return member.address

    @property
    def reshapes(self) -> bool:
        """Whether it is the first with its shape: every worker takes over other layers than it had."""
        return self.shaped == self.number

    @property
    def staying(self) -> list[int]:
        """The slots that are filled, and stay so."""
        return [slot for slot, member in enumerate(self.members) if member is not None and slot not in self.leaving]

    @property
    def alive(self) -> tuple[Member, ...]:
        """The members that there are."""
        return tuple(member for member in self.members if member is not None)


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """The leader to workers: leave every epoch below this number and report what you have in hand."""

    epoch: int
    leader: str


class Report(msgspec.Struct, frozen=True, tag="standing"):
    """A worker's answer to a halt. Nothing of the epochs below can finish there any more."""

    node: int
    epoch: int
    standing: Standing
    record: bytes = b""
    """Of the last commit that came with one."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A worker to the leader, now and then: so much have I done in this epoch."""

    node: int
    epoch: int
    done: int
    """Actions; and a beat itself, for who builds its layers or waits for a disk, however long that takes."""
    slowest_s: float
    """The longest action so far: who has such may be silent for as long."""


class Level(msgspec.Struct, frozen=True, tag="level"):
    """A fresh shadow to the leader: my copy of the stage is complete and follows the sums."""

    node: int
    epoch: int
    stage: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The leader to workers: in this epoch begin no step from this one on. What is open is completed."""

    epoch: int
    before: int


class Inherited(msgspec.Struct, frozen=True, tag="inherited"):
    """A worker to the leader: all that workers with notice had for me is here."""

    node: int
    epoch: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker to its agent: I am up, and can be reached here."""

    node: int
    address: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A worker to the leader: my layers are built, or loaded."""

    node: int
    epoch: int
    seconds: float


class Permit(msgspec.Struct, frozen=True, tag="permit"):
    """The leader to workers: steps below this number may run."""

    until: int


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """A worker to the leader: this step's sums are complete here and the weights have moved."""

    node: int
    epoch: int
    step: int
    at: float
    counted: tuple[int, ...]
    """How often each micro-batch was counted in the sums, smallest over my segments; must be one everywhere."""
    counted_most: tuple[int, ...]
    loss_sum: float | None = None
    """From whoever has the sums of the last segment; all of them have the same."""
    weight_sum: float | None = None
    norm: float | None = None
    skipped: bool = False


class EvaluationReport(msgspec.Struct, frozen=True, tag="evaluation"):
    """A worker with the last segment to the leader: its share of an evaluation after `step`."""

    node: int
    step: int
    parts: tuple[tuple[int, float, float], ...]
    """Of each of its micro-batches: number, loss (times the weight, for a mean), weight."""


class ShardReport(msgspec.Struct, frozen=True, tag="shard"):
    """A worker to the leader: my part of the checkpoint lies on storage."""

    node: int
    epoch: int
    step: int
    name: str
    sha256: str
    size: int
    tensors: tuple[str, ...]
    scalars: dict[str, int | float | bool | str | None]


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """The leader to workers: every holder has the complete sums of this step. Only permits to delete."""

    step: int
    epoch: int
    """In which that was so: who has left it has said what it keeps, and keeps it."""
    record: bytes = b""
    """Kept by the workers where the store is out of reach, for whoever leads next."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The leader to workers: the run ends before this step; report and go."""

    step: int


class Final(msgspec.Struct, frozen=True, tag="final"):
    """A worker to the leader, last of all: digests of its layers and its figures."""

    node: int
    digests: dict[int, tuple[str, str]]
    spans: tuple[tuple[int, str, float, float], ...]
    """(step, action, start, end) of the last actions."""
    kept_bytes: int
    peak_tapes: int
    peak_rss: int
    waited_s: float
    eager: tuple[int, int] = (0, 0)
    """Forwards of replicas: how many found a bubble, of how many."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A worker or an agent to the leader: the run can not go on, and why, in one sentence."""

    node: int
    kind: str
    """Name of a class in culm.errors."""
    message: str
    trace: str = ""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """The leader to an agent: end your worker of this life and start another. One that is gone already is no error."""

    life: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End now, whatever you are doing."""

    why: str = ""


Message: TypeAlias = (
    Epoch
    | Halt
    | Report
    | Beat
    | Level
    | Drain
    | Inherited
    | Hello
    | Ready
    | Permit
    | StepReport
    | EvaluationReport
    | ShardReport
    | Commit
    | Finish
    | Final
    | Failed
    | Renew
    | Stop
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
